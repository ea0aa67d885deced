"""Where and how a benchmark ran."""

import platform
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version

import torch

from specctl.models.loading.pair import Pair
from specctl.models.running.engines import engine_name
from specctl.observing.entrant import Entrant
from specctl.observing.results import Header
from specctl.profile import Profile
from specctl.prompts.suites import Suite


def describe(
    pair: Pair,
    profile: Profile,
    suite: Suite,
    entrants: Sequence[Entrant],
    lengths: Sequence[int],
    repeats: int,
    oracle: bool,
    drafts: Sequence[str] = (),
) -> Header:
    """The header of a results file; ``drafts`` names the pair's drafts where there are several."""
    runners = {"target": pair.target} | {"draft" + ".draft" * place: draft for place, draft in enumerate(pair.drafts)}
    return Header(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        argv=sys.argv[1:],
        versions={
            "python": platform.python_version(),
            **{package: version(package) for package in ("specctl", "torch", "transformers")},
        },
        devices={key: device_name(runner.device) for key, runner in runners.items()},
        profile=profile.model_dump(mode="json", exclude_none=True),
        suite={"name": suite.name, "sha256": suite.sha256, "count": len(suite.prompts)},
        sampling=profile.sampling.model_dump(mode="json"),
        entrants=list(entrants),
        repeats=repeats,
        lengths=list(lengths),
        oracle=oracle,
        drafts=list(drafts),
        engines={key: engine_name(runner) for key, runner in runners.items()},
        synthetic=any(getattr(model.config, "synthetic", False) for model in pair.models),
    )


def device_name(device: torch.device) -> str:
    """The device with the hardware behind it."""
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    return f"{device} ({platform.machine()}, {torch.get_num_threads()} threads)"
