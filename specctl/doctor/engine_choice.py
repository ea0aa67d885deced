"""Which engine will run a model, told from its modules before its weights are loaded."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from specctl.models.onnx.automatic import LONG_RUN
from specctl.models.onnx.engine_times import LARGEST, packages_there
from specctl.models.running import engines
from specctl.models.running.engines import EngineSettings, engine_on
from specctl.models.running.static import obstacle

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ONNX_IF_FASTER = "onnx or eager"


@dataclass(frozen=True, slots=True)
class EngineChoice:
    """An engine, or two of which the faster will be taken when the models are loaded, and why."""

    engine: str
    why: str


def engine_choice(
    model: "PreTrainedModel", settings: EngineSettings, devices: Sequence[str], weights: int, quantised: str | None
) -> EngineChoice:
    """The engine of a model, as `build_runner` would choose it.

    Args:
        model: its `skeleton`, in the dtype of its placement.
        settings: as for loading it; `EngineSettings.compile` may be "auto", and the run is taken to be short.
        devices: where its weights go.
        weights: their bytes.
        quantised: what quantises its weights as torch loads them, such as ``bitsandbytes``; None if nothing does.
    """
    if settings.engine == "eager":
        return EngineChoice("eager", "as set")
    if settings.engine == "onnx":
        return EngineChoice("onnx", "as set; what onnxruntime cannot run, torch does, with a note")
    device = torch.device(next((name for name in devices if name != "cpu"), "cpu"))
    why = _obstacle(model, devices, quantised)
    meant = engine_on(device, settings.engine)
    if meant == "auto" and settings.compile is not True:
        return _automatic(device.type, weights, quantised, why)
    if why is not None:
        return EngineChoice("eager", why)
    compiled = ", compiled" if settings.compile is True else ""
    if meant == "graph" and device.type != "cuda":
        return EngineChoice(f"static{compiled}", f"graphs need a CUDA device, and it is on {device.type}")
    if meant == "auto":
        return EngineChoice("static, compiled", "compile = true")
    return EngineChoice(f"{meant}{compiled}", "as set" if settings.engine == meant else "auto")


def head_choice(settings: EngineSettings, devices: Sequence[str]) -> EngineChoice:
    """The engine of a draft head, as `build_head_runner` would choose it."""
    meant = engine_on(torch.device(devices[0]), settings.engine)
    if meant == "graph" and devices[0].startswith("cuda"):
        return EngineChoice("graph", "as set" if settings.engine == meant else "auto")
    if settings.compile is True and settings.engine != "eager":
        return EngineChoice("static, compiled", "compile = true")
    return EngineChoice("static", "as of every draft head")


def _automatic(kind: str, weights: int, quantised: str | None, why: str | None) -> EngineChoice:
    if kind == "cpu" and packages_there() and quantised is None and weights <= LARGEST:
        long = f"onnx in runs of {LONG_RUN:,} tokens or more, or if its graph was made before"
        return EngineChoice(ONNX_IF_FASTER, f"auto: the faster here; {long}")
    if why is not None:
        return EngineChoice("eager", f"auto; {why}")
    if kind == "cuda":
        return EngineChoice("eager", f"auto; {engines.UNMEASURED}")
    return EngineChoice("eager", f"auto; static and compiled in runs of {engines.LONG_RUN:,} tokens or more")


def _obstacle(model: "PreTrainedModel", devices: Sequence[str], quantised: str | None) -> str | None:
    """Why it cannot run over fixed buffers, as the end of a sentence."""
    if len(devices) > 1:
        return "it is spread over several devices"
    if quantised == "bitsandbytes":
        return "its weights are quantised with bitsandbytes"
    return obstacle(model)
