"""Connecting to a Ray cluster, or starting one for this command alone; Ray is imported then."""

import os
import secrets
from collections.abc import MutableMapping
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from specctl.errors import SpecctlError, UsageError, pip_install, reason
from specctl.text_engine.job import ReplicaError

NAMESPACE = "specctl"
_LOOPBACK = "127.0.0.1"


def connected(address: str, *, started: bool = True) -> Any:
    """Ray, connected to a cluster.

    Args:
        address: ``ray://HOST:PORT``, ``HOST:PORT``, or ``auto`` for the one that runs on this machine.
        started: whether ``auto`` starts one where none runs; it ends with this process.

    Raises:
        UsageError: Ray is missing, or the cluster is not there.
    """
    found = running() if address == "auto" else address
    if found is None and not started:
        raise UsageError(
            "--keep-warm needs a Ray cluster that outlives this command", "start one with: ray start --head"
        )
    if found is None:
        alone(os.environ)
    elif "RAY_AUTH_MODE" not in os.environ and _token_is_there():
        os.environ["RAY_AUTH_MODE"] = "token"  # `ray start` asks for the token wherever there is one
    os.environ.setdefault("RAY_raylet_start_wait_time_s", "120")  # a busy machine needs more than half a minute
    ray = _imported()
    quiet = {"logging_level": "error", "namespace": NAMESPACE}
    try:
        try:
            ray.init("local", include_dashboard=False, **quiet) if found is None else ray.init(found, **quiet)
        except ConnectionError as error:
            raise UsageError(f"there is no Ray cluster at {found}", "start one with: ray start --head") from error
        if found is None and ray.util.get_node_ip_address() != _LOOPBACK:
            ray.shutdown()
            raise ReplicaError(
                f"Ray {ray.__version__} would listen to other machines", "install another version, or use --workers"
            )
    except SpecctlError:
        raise
    except Exception as error:  # Ray raises errors of many kinds, bare exceptions among them
        raise ReplicaError(f"Ray cannot connect to {address}: {reason(error)}") from error
    return ray


def running() -> str | None:
    """The address of the cluster that runs on this machine, or of the one that Ray's own variable names; else None.

    Those that listen on the loopback device alone are other commands', unless `ray start` made them, as on macOS.
    """
    if named := os.environ.get("RAY_ADDRESS"):
        return named
    import psutil  # type: ignore[import-untyped]

    flag = "--gcs-address="
    found = {
        word.removeprefix(flag)
        for process in psutil.process_iter(["cmdline"])
        for word in process.info["cmdline"] or ()
        if word.startswith(flag)
    }
    folder = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    try:
        last = (Path(folder) / "ray" / "ray_current_cluster").read_text().strip()
    except OSError:
        last = ""
    if last in found:
        return last
    return next((one for one in sorted(found) if not _on_loopback(one)), None)


def alone(environ: MutableMapping[str, str]) -> None:
    """Let the cluster that is started next be this process's: on the loopback device, behind a token of its own.

    Ray looks at both when it is imported, and so do its processes when they start.
    """
    environ["RAY_AUTH_MODE"] = "token"
    environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # off there, so Ray takes the loopback address; it may on Linux


def _imported() -> Any:
    try:
        import ray
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "ray":
            raise UsageError("--cluster needs Ray, which is not installed", pip_install("ray")) from error
        missing = f"its module {error.name} is missing" if isinstance(error, ModuleNotFoundError) else reason(error)
        raise UsageError(
            f"--cluster needs Ray, which is installed but cannot be imported: {missing}", pip_install("ray")
        ) from error
    return ray


def _on_loopback(address: str) -> bool:
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _token_is_there() -> bool:
    """Whether this user has a token for Ray clusters, where Ray looks for it."""
    if os.environ.get("RAY_AUTH_TOKEN"):
        return True
    return Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or "~/.ray/auth_token").expanduser().is_file()
