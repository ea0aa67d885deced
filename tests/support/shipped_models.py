"""Reading what ships with the package takes long, and nearly every command does it: here it is done once a process."""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import pytest
from torch import nn
from transformers import GenerationConfig, PreTrainedConfig

from specctl.models.loading import model as loading
from specctl.models.placing import memory, placement
from specctl.profile.schema import model_path


@contextmanager
def read_once() -> Iterator[None]:
    """Of each model there is one on no device, which says what it needs, and one with weights; pairs have copies."""
    read, skeleton, shipped = loading._read, placement.skeleton, model_path("target").parent
    models: dict[str, Any] = {}
    skeletons: dict[str, Any] = {}

    def copy_of(checkpoint: Any, placement: Any, quantization: Any, trust_remote_code: bool) -> Any:
        if quantization is not None or checkpoint.folder.parent != shipped:
            return read(checkpoint, placement, quantization, trust_remote_code)
        key = f"{checkpoint.folder} {placement}"
        if key not in models:
            models[key] = read(checkpoint, placement, None, trust_remote_code)
        return copied(models[key], {})

    def skeleton_of(checkpoint: Any, trust_remote_code: bool = False, config: Any = None) -> Any:
        if checkpoint.folder.parent != shipped:
            return skeleton(checkpoint, trust_remote_code, config)
        key = str(checkpoint.folder)
        if key not in skeletons:
            skeletons[key] = skeleton(checkpoint, trust_remote_code, config)
        return skeletons[key]

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(loading, "_read", copy_of)
        for module in (placement, memory):
            monkeypatch.setattr(module, "skeleton", skeleton_of)
        yield


def copied(module: Any, known: dict[int, Any]) -> Any:
    """As `deepcopy`, which looks at every attribute of every layer, for a network without hooks.

    Args:
        module: what to copy.
        known: copies by the originals' ``id``.
    """
    if id(module) not in known:
        new = known[id(module)] = module.__new__(type(module))
        for name, value in vars(module).items():
            if isinstance(value, (PreTrainedConfig, GenerationConfig)):
                value = known.setdefault(id(value), deepcopy(value))
            elif isinstance(value, (dict, set)):
                value = value.copy()
            new.__dict__[name] = value
        for weights in (new._parameters, new._buffers):
            for name, weight in weights.items():
                weights[name] = _copied_weight(weight, known)
        for name, child in new._modules.items():
            new._modules[name] = child if child is None else copied(child, known)
    return known[id(module)]


def _copied_weight(weight: Any, known: dict[int, Any]) -> Any:
    if weight is None:
        return None
    if id(weight) not in known:
        values = weight.detach().clone()
        trained = isinstance(weight, nn.Parameter)
        known[id(weight)] = nn.Parameter(values, requires_grad=weight.requires_grad) if trained else values
    return known[id(weight)]
