"""Connecting to a Ray cluster; Ray is imported then."""

import os
from pathlib import Path
from typing import Any

from specctl.errors import SpecctlError, UsageError, reason
from specctl.replicas.job import ReplicaError

NAMESPACE = "specctl"
MISSING = UsageError("--cluster needs Ray, which is not installed", 'pip install "specctl[ray]"')


def connected(address: str, *, started: bool = True) -> Any:
    """Ray, connected to a cluster.

    Args:
        address: ``ray://HOST:PORT``, ``HOST:PORT``, or ``auto`` for the one that runs on this machine.
        started: whether ``auto`` starts one where none runs; it ends with this process.

    Raises:
        UsageError: Ray is missing, or the cluster is not there.
    """
    if "RAY_AUTH_MODE" not in os.environ and _token_is_there():
        os.environ["RAY_AUTH_MODE"] = "token"  # `ray start` asks for the token wherever there is one
    os.environ.setdefault("RAY_raylet_start_wait_time_s", "120")  # a busy machine needs more than half a minute
    try:
        import ray
    except ImportError as error:
        raise MISSING from error
    quiet = {"logging_level": "error", "namespace": NAMESPACE}
    try:
        try:
            ray.init(address, **quiet)
        except ConnectionError as error:
            if address != "auto":
                raise UsageError(f"there is no Ray cluster at {address}", "start one with: ray start --head") from error
            if not started:
                raise UsageError(
                    "--keep-warm needs a Ray cluster that outlives this command", "start one with: ray start --head"
                ) from error
            ray.init(include_dashboard=False, **quiet)
    except SpecctlError:
        raise
    except Exception as error:  # Ray raises errors of many kinds, bare exceptions among them
        raise ReplicaError(f"Ray cannot connect to {address}: {reason(error)}") from error
    return ray


def _token_is_there() -> bool:
    """Whether this user has a token for Ray clusters, where Ray looks for it."""
    if os.environ.get("RAY_AUTH_TOKEN"):
        return True
    return Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or "~/.ray/auth_token").expanduser().is_file()
