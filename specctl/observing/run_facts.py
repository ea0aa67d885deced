"""Gathers where and how a command runs."""

import platform
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from specctl import __version__
from specctl.models.running.engines import engine_report
from specctl.models.running.pair import Pair
from specctl.models.running.threads import threads_of
from specctl.observing.candidate import level_key
from specctl.observing.results import Facts, of_request
from specctl.profile import Profile
from specctl.prompts.suites import Suite

if TYPE_CHECKING:
    import torch

SCIKIT_LEARN = "scikit-learn"


def gather(pair: Pair, profile: Profile, suite: Suite) -> Facts:
    """The provenance of a run that starts now: arguments, versions, devices, profile and suite."""
    runners = {"target": pair.target} | {level_key(level): draft for level, draft in enumerate(pair.drafts)}
    return Facts(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        argv=sys.argv[1:],
        versions={
            "python": platform.python_version(),
            "specctl": __version__,
            **{package: version(package) for package in ("torch", "transformers")},
        },
        devices={key: device_name(runner.device, threads_of(runner)) for key, runner in runners.items()},
        **of_request(profile, suite),
        engines={key: engine_report(runner) for key, runner in runners.items()},
        synthetic=any(getattr(model.config, "synthetic", False) for model in pair.models),
        threads=pair.thread_count,
        others_busy=pair.threads.others_busy if pair.threads is not None else None,
    )


def device_name(device: "torch.device", threads: int) -> str:
    """The device and its hardware, as text; of a CPU with the threads of a pass."""
    if device.type == "cuda":
        import torch

        return f"{device} ({torch.cuda.get_device_name(device)})"
    return f"{device} ({cpu_name()}, {threads} threads)"


def scikit_learn() -> str:
    """The version of scikit-learn, with which transformers moves the threshold of ``hf-confidence``; else ``none``."""
    try:
        return version(SCIKIT_LEARN)
    except PackageNotFoundError:
        return "none"


def cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's model; its architecture where the system does not tell the model."""
    try:
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name" and value.strip():
                return " ".join(value.split())
    except OSError:
        pass  # not Linux
    return platform.processor() or platform.machine()
