"""Random models run by onnxruntime, whose graphs are exported once for all tests."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest
import torch
from checkpoints import llama_config, save_model
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from specctl.models.running.engines import EngineSettings
from specctl.profile import resolve
from specctl.profile.schema import Profile

if TYPE_CHECKING:
    import onnx_ir as ir

    from specctl.models.draft_heads.block import BlockHead
    from specctl.models.draft_heads.chain import ChainHead
    from specctl.models.onnx.onnx_runner import OnnxRunner

missing = [name for name in ("onnxruntime", "onnx", "onnxscript") if find_spec(name) is None]
needs_onnx = pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)} (specctl[onnx])")


@contextmanager
def exported_once(folder: Path) -> Iterator[None]:
    """What torch exports of a model or a draft head is kept in a folder, for it takes seconds: fusing, rounding,
    checking and keeping its graphs take milliseconds, and happen in every test. Processes share the folder."""
    import onnx_ir as ir

    from specctl.models.onnx import export
    from specctl.models.onnx.store import Store, key_of, key_of_head
    from specctl.models.onnx_heads import head_engine

    usual, usual_of_head, store = export.exported, head_engine.graphs_of, Store(folder)

    def exported(model: PreTrainedModel, *, trees: bool = False) -> "ir.Model":
        def write(path: Path) -> None:
            ir.save(usual(model, trees=trees), path, external_data="weights.bin")

        key = key_of(model, None, trees=trees)
        with store.alone(key, lambda: None):
            return ir.load(store.find(key) or store.put(key, write))

    def graphs_of(head: "ChainHead | BlockHead") -> "dict[str, ir.Model]":
        def write(path: Path) -> None:
            for name, graph in usual_of_head(head).items():
                ir.save(graph, path.with_name(name), external_data=f"{name}.bin")

        key = key_of_head(head, head.borrowed)
        with store.alone(key, lambda: None):
            path = store.find(key) or store.put(key, write)
            return {file.name: ir.load(file) for file in path.parent.glob("*.onnx")}

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(export, "exported", exported)
        monkeypatch.setattr(head_engine, "graphs_of", graphs_of)
        yield


@cache
def _folder() -> "TemporaryDirectory[str]":
    return TemporaryDirectory()


def onnx_runner(
    model: PreTrainedModel, vocabulary: int, quantize: str | None = None, **settings: Any
) -> "OnnxRunner | None":
    """A new runner; None where the model cannot have one."""
    from specctl.models.onnx.onnx_engine import build_onnx_runner

    with patch.dict(os.environ, {"XDG_CACHE_HOME": _folder().name}):
        return build_onnx_runner(model, vocabulary, "it", EngineSettings(engine="onnx", **settings), quantize)


def sure_runner(model: PreTrainedModel, vocabulary: int, **settings: Any) -> "OnnxRunner":
    """As `onnx_runner`, for a model that must have one."""

    def refuse(line: str) -> None:
        raise AssertionError(line)

    runner = onnx_runner(model, vocabulary, notice=refuse, **settings)
    assert runner is not None
    return runner


@cache
def one_layer(head_dim: int = 16, **settings: Any) -> PreTrainedModel:
    """A random Llama of one layer and a context of 80 tokens: modules that take the same share its export."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    sizes |= {"num_hidden_layers": 1, "vocab_size": 64, "head_dim": head_dim, "max_position_embeddings": 80}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LlamaForCausalLM(LlamaConfig(**sizes, **settings)).eval()


def graphs() -> Path:
    """Where the graphs are."""
    return Path(_folder().name) / "specctl" / "onnx"


def small_pair(folder: Path, *settings: str) -> Profile:
    """The profile of two small models on disk that onnxruntime runs."""
    config = llama_config(hidden_size=64, num_attention_heads=4, num_hidden_layers=1)
    for name in ("target", "draft"):
        save_model(folder / name, config)
    models = [f"{name}.model={folder / name}" for name in ("target", "draft")]
    return resolve("embedded", overrides=[*models, "engine=onnx", *settings]).profile
