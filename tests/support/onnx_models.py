"""Random models run by onnxruntime, whose graphs are exported once for all tests."""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from specctl.models.running.engines import EngineSettings
from specctl.profile import resolve
from specctl.profile.schema import Profile
from tests.support.checkpoints import llama_config, save_model

if TYPE_CHECKING:
    import onnx_ir as ir

    from specctl.models.draft_heads.block import BlockHead
    from specctl.models.draft_heads.chain import ChainHead
    from specctl.models.running.slot import Slot

missing = [name for name in ("onnxruntime", "onnx", "onnxscript") if find_spec(name) is None]
needs_onnx = pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)} (the extra onnx)")


@contextmanager
def exported_once(folder: Path) -> Iterator[None]:
    """What torch exports of a model or a draft head is kept in a folder, for it takes seconds: fusing, rounding,
    checking and keeping its graphs take milliseconds, and happen in every test. Processes share the folder.

    Models of one structure share an export, and each puts its own weights into it.
    """
    import onnx_ir as ir

    from specctl.models.onnx import export
    from specctl.models.onnx.store import Store
    from specctl.models.onnx.weights import LoadedWeights, Weight
    from specctl.models.onnx_heads import engine

    usual, usual_of_head, store = export.exported, engine.graphs_of, Store(folder)

    def shared(key: str, modules: Sequence[nn.Module], make: Callable[[], dict[str, ir.Model]]) -> dict[str, ir.Model]:
        def write(path: Path) -> None:
            for name, graph in make().items():
                graph.metadata_props[OWN] = json.dumps(_own_weights(graph, modules))
                ir.save(graph, path.with_name(name), external_data=f"{name}.bin")

        with store.alone(key, lambda: None):
            path = store.find(key) or store.put(key, write)
            found = {file.name: ir.load(file) for file in path.parent.glob("*.onnx")}
        weights, sources = _weights_of(modules), [LoadedWeights(module) for module in modules]
        for graph in found.values():
            ir.external_data.load_to_model(graph)
            for name, own in json.loads(graph.metadata_props.pop(OWN)).items():
                value, numbers = graph.graph.initializers[name], weights[own].detach().numpy()
                place, _, parameter = own.partition(" ")
                value.const_value = (
                    ir.tensor(numbers, name=name)
                    if numbers.ndim < 2
                    else Weight(sources[int(place)], [parameter], numbers.shape, ir.DataType.FLOAT)
                )
        return found

    def exported(model: PreTrainedModel, weights: Any = None, *, trees: bool = False) -> ir.Model:
        if weights is not None:  # they have no memory to know them by
            return usual(model, weights, trees=trees)
        (graph,) = shared(
            structure_of([model], trees), [model], lambda: {"model.onnx": usual(model, weights, trees=trees)}
        ).values()
        return graph

    def graphs_of(head: "ChainHead | BlockHead") -> dict[str, ir.Model]:
        modules = [head, *head.borrowed]
        return shared(structure_of(modules, "head"), modules, lambda: usual_of_head(head))

    with pytest.MonkeyPatch.context() as monkeypatch:
        _torchs_operations_listed_once(monkeypatch)
        monkeypatch.setattr(export, "exported", exported)
        monkeypatch.setattr(engine, "graphs_of", graphs_of)
        yield


def _torchs_operations_listed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch lists all operations that it can export anew for each export, which takes half a second."""
    with suppress(ImportError):
        from torch.onnx._internal.exporter._registration import ONNXRegistry

        monkeypatch.setattr(ONNXRegistry, "from_torchlib", staticmethod(cache(ONNXRegistry.from_torchlib)))


OWN = "own weights"
"""Where a kept export has the names of its weights in the model, by their names in the graph."""
UNTOLD = ("_name_or_path", "transformers_version", "architectures", "dtype")
"""Of a configuration, what decides nothing; each parameter has its own dtype."""


def structure_of(modules: Sequence[nn.Module], *more: object) -> str:
    """A name for all that decides what torch exports of modules, but for the values of their weights."""
    found = hashlib.sha256(repr(more).encode())
    for module in modules:
        for name, part in module.named_modules():
            config, kind = getattr(part, "config", None), type(part)
            told = config.to_dict() | dict.fromkeys(UNTOLD) if hasattr(config, "to_dict") else config
            found.update(f"{name} {kind.__module__} {kind.__qualname__} {part.extra_repr()} {told}".encode())
        for name, weight in module.named_parameters():
            found.update(f"{name} {weight.dtype} {tuple(weight.shape)}".encode())
        for name, buffer in module.named_buffers():
            found.update(f"{name} {buffer.dtype} {buffer.tolist()}".encode())
    return found.hexdigest()[:32]


def _weights_of(modules: Sequence[nn.Module]) -> dict[str, torch.Tensor]:
    return {
        f"{place} {name}": weight
        for place, module in enumerate(modules)
        for name, weight in module.named_parameters(remove_duplicate=False)
    }


def _own_weights(graph: "ir.Model", modules: Sequence[nn.Module]) -> dict[str, str]:
    """A graph's weights that are a model's, known by their memory; the others are made of its configuration."""
    places = {weight.data_ptr(): name for name, weight in _weights_of(modules).items()}
    found = {name: places.get(_place(value.const_value)) for name, value in graph.graph.initializers.items()}
    return {name: own for name, own in found.items() if own is not None}


def _place(tensor: Any) -> int | None:
    if hasattr(tensor, "source"):  # a `Weight`
        return int(tensor.array().ctypes.data)
    return tensor.raw.data_ptr() if isinstance(getattr(tensor, "raw", None), torch.Tensor) else None


@cache
def _folder() -> "TemporaryDirectory[str]":
    return TemporaryDirectory()


def onnx_runner(model: PreTrainedModel, vocabulary: int, quantize: str | None = None, **settings: Any) -> "Slot | None":
    """A new runner; None where the model cannot have one."""
    from specctl.models.onnx.engine import build_onnx_runner

    with patch.dict(os.environ, {"XDG_CACHE_HOME": _folder().name}):
        return build_onnx_runner(model, vocabulary, "it", EngineSettings(engine="onnx", **settings), quantize)


def sure_runner(model: PreTrainedModel, vocabulary: int, **settings: Any) -> "Slot":
    """As `onnx_runner`, for a model that must have one."""

    def refuse(line: str) -> None:
        raise AssertionError(line)

    runner = onnx_runner(model, vocabulary, notice=refuse, **settings)
    assert runner is not None
    return runner


@cache
def one_layer(head_dim: int = 16, seed: int = 0, **settings: Any) -> PreTrainedModel:
    """A random Llama of one layer and a context of 80 tokens: modules that take the same share its export."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    sizes |= {"num_hidden_layers": 1, "vocab_size": 64, "head_dim": head_dim, "max_position_embeddings": 80}
    with torch.inference_mode(False), torch.random.fork_rng(devices=[]):  # it is exported, whichever test asks first
        torch.manual_seed(seed)
        return LlamaForCausalLM(LlamaConfig(**sizes, **settings)).eval()


def graphs() -> Path:
    """Where the graphs are."""
    return Path(_folder().name) / "specctl" / "onnx"


def small_config() -> LlamaConfig:
    """Of the models of `small_pair`."""
    return llama_config(hidden_size=64, num_attention_heads=4, num_hidden_layers=1)


def small_pair(folder: Path, *settings: str) -> Profile:
    """The profile of two small models on disk that onnxruntime runs."""
    for name in ("target", "draft"):
        save_model(folder / name, small_config())
    models = [f"{name}.model={folder / name}" for name in ("target", "draft")]
    return resolve("embedded", overrides=[*models, "engine=onnx", *settings]).profile
