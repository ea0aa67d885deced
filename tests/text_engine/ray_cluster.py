"""A Ray cluster that runs apart from the test, as `ray start` leaves one, on the loopback device."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from specctl.processes import child_command
from specctl.text_engine.on_ray import alone


def main() -> None:
    """The program that holds the cluster: says its address, and ends it with its standard input."""
    import ray

    ray.init("local", include_dashboard=False, logging_level="error", num_cpus=4)
    print(ray.get_runtime_context().gcs_address, flush=True)
    sys.stdin.read()
    ray.shutdown()


@contextmanager
def cluster(folder: Path) -> Iterator[str]:
    """The address of a cluster whose processes work in a folder; this process gets the token that it asks for."""
    alone(os.environ)
    os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"
    held = subprocess.Popen(
        child_command("tests.text_engine.ray_cluster"),
        cwd=folder,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "RAY_raylet_start_wait_time_s": "120"},
    )
    assert held.stdin is not None
    assert held.stdout is not None
    try:
        yield held.stdout.readline().strip()
    finally:
        held.stdin.close()
        held.wait()
        held.stdout.close()
