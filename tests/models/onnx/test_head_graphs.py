"""A draft head's graphs: they compute what its network computes, or torch runs it."""

import shutil
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from specctl.models.draft_heads.block import BlockHead
from specctl.models.draft_heads.chain import ChainHead
from specctl.models.draft_heads.eagle3 import Eagle3Head
from specctl.models.onnx.graph import HostMemory
from specctl.models.onnx.store import key_of_head
from specctl.models.onnx_heads.runners import PASS, REMEMBER, OnnxChainPasses
from specctl.models.running.one_function import apart
from specctl.models.running.slot import Slot
from tests.support.onnx_heads import (
    EVERY_OTHER,
    HEADS,
    KINDS,
    LAYERS,
    SHAPE,
    VOCABULARY,
    onnx_head,
    sure_head,
    torch_runner,
)
from tests.support.onnx_models import graphs, needs_onnx
from tests.support.toy_heads import random_block, random_eagle3
from tests.support.toys import seeded

pytestmark = needs_onnx

ROUNDING = 1e-5
TEXT: list[int] = torch.randint(0, VOCABULARY, (700,), generator=seeded(5)).tolist()


@cache
def head_of(kind: str) -> ChainHead | BlockHead:
    with torch.inference_mode(False):
        return HEADS[kind]()


def pair_of(kind: str) -> tuple[Slot, Slot]:
    """Runners of a head by graphs and by torch."""
    head = head_of(kind)
    return sure_head(head), torch_runner(head)


def shown(runners: tuple[Slot, ...], start: int, count: int) -> None:
    """Show them the states of places from ``start`` on, which depend on the place alone."""
    layers, width = runners[0].layers, runners[0].state_size
    states = {layer: torch.randn(len(TEXT), width, generator=seeded(layer + 2)) for layer in layers}
    for runner in runners:
        runner.observe_states(start, {layer: rows[start : start + count] for layer, rows in states.items()})


def off(runners: tuple[Slot, ...], tokens: list[int]) -> float:
    """How far what they compute of the last of some tokens is apart."""
    mine, theirs = (runner.extend(tokens, keep=1, hidden=True) for runner in runners)
    assert mine.hidden is not None
    assert theirs.hidden is not None
    assert torch.equal(mine.logits.isinf(), theirs.logits.isinf())
    return max(apart(mine.logits, theirs.logits), apart(mine.hidden, theirs.hidden))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.representatives("eagle3", slow=("dflash",))
def test_every_kind_of_head_computes_what_its_network_computes(kind: str) -> None:
    """Over prompts of several passes, of one token, and where places were not observed."""
    runners = pair_of(kind)
    assert [runner.engine for runner in runners] == ["onnx", "static"]
    for observed, length in ((619, 620), (0, 1), (0, 3), (1, 2), (5, 9), (40, 41)):
        for runner in runners:
            runner.rollback(0)
        shown(runners, 0, observed)
        assert off(runners, TEXT[:length]) < ROUNDING
        for place in range(length, length + min(3, (runners[0].longest or 4) - 1)):
            assert off(runners, TEXT[place : place + 1]) < ROUNDING
    # Of the last text two places go, and come again with others behind them.
    for runner in runners:
        runner.rollback(38)
    assert [runner.length for runner in runners] == [38, 38]
    shown(runners, 38, 6)
    assert [runner.observed for runner in runners] == [44, 44]
    assert off(runners, TEXT[38:45]) < ROUNDING


def test_a_block_is_few_nodes() -> None:
    """Heads are normed where they lie, the block's width is a number, and one node rotates the keys that are kept."""
    import onnx_ir as ir

    head = head_of("dspark")
    sure_head(head)
    folder = Path(graphs(), key_of_head(head, head.borrowed))
    kinds = {file: Counter(node.op_type for node in ir.load(folder / file).graph) for file in (PASS, REMEMBER)}
    assert kinds[PASS]["GroupQueryAttention"] == 2
    assert not {"Transpose", "Shape"} & kinds[PASS].keys()
    assert kinds[REMEMBER]["RotaryEmbedding"] == 2
    assert not {"Cos", "Sin", "Neg", "Slice"} & kinds[REMEMBER].keys()


@pytest.mark.parametrize("kind", ["dspark", "gated", "rnn"])
@pytest.mark.representatives(slow=("dspark",))
def test_a_block_foresees_what_its_network_foresees(kind: str) -> None:
    runners = pair_of(kind)
    shown(runners, 0, 20)
    tokens = TEXT[:21]
    for place in range(21, 25):
        off(runners, tokens)
        tokens = TEXT[place : place + 1]
        mine, theirs = (runner.foresee(torch.tensor(tokens[0])) for runner in runners if runner.foresee is not None)
        assert float(mine) == pytest.approx(float(theirs), abs=ROUNDING)
    assert float(mine) == 0, "nothing is behind the last row"
    with pytest.raises(ValueError, match="the block drafts 4 tokens"):
        off(runners, tokens)


def test_logits_of_several_tokens_of_a_text() -> None:
    runners = pair_of("eagle3")
    shown(runners, 0, 12)
    mine, theirs = (runner.extend(TEXT[:14], keep=14, hidden=True) for runner in runners)
    assert apart(mine.logits, theirs.logits) < ROUNDING
    assert mine.hidden is not None
    assert mine.hidden.shape == (14, 32)
    assert runners[0].extend(TEXT[14:16], keep=0).logits.shape == (0, VOCABULARY)


def test_where_memory_runs_out_the_next_text_has_the_buffers_that_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    runners = pair_of("eagle3")
    mine = runners[0].passes
    assert isinstance(mine, OnnxChainPasses)
    before, zeros = mine._pass.capacity, HostMemory.zeros

    def full(memory: HostMemory, shape: Sequence[int], dtype: str) -> Any:
        if len(shape) == 4 and shape[2] > before:
            raise MemoryError
        return zeros(memory, shape, dtype)

    with monkeypatch.context() as patched:
        patched.setattr(HostMemory, "zeros", full)
        shown(runners[:1], 0, before + 9)
        with pytest.raises(MemoryError):
            runners[0].extend(TEXT[: before + 10], keep=0)
    assert mine._pass.capacity == before, "a pass would write beyond the buffers"
    runners[0].rollback(0)
    shown(runners, 0, before + 9)
    assert off(runners, TEXT[: before + 10]) < ROUNDING


def narrow(head_dim: int) -> ChainHead:
    shape = type(SHAPE)(hidden_size=32, intermediate_size=48, heads=2, kv_heads=1, head_dim=head_dim)
    return random_eagle3(layers=LAYERS, states=32, vocabulary=VOCABULARY, shape=shape)


class Stumbling(Eagle3Head):
    """A head that cannot be traced."""

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        raise KeyError(ids.shape)


def stumbling() -> ChainHead:
    head = narrow(16)
    head.__class__ = Stumbling
    return head


@pytest.mark.parametrize(
    ("head", "line"),
    [
        (lambda: stumbling(), "it cannot be exported (KeyError: torch.Size([1, 2]))"),
        (lambda: narrow(4), "its heads have a size of 4, and onnxruntime wants multiples of 8"),
        (
            lambda: narrow(16).bfloat16(),
            "onnxruntime runs draft heads in float32 on a CPU, and it is in bfloat16 on cpu",
        ),
    ],
    ids=["a stumbling one", "small heads", "bfloat16"],
)
def test_what_onnxruntime_cannot_run(head: Any, line: str) -> None:
    heard: list[str] = []
    assert onnx_head(head(), notice=heard.append) is None
    assert heard == [f"it runs on torch: {line}"]


def test_graphs_that_compute_something_else_are_not_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Here those of a head with other weights."""
    from specctl.models.onnx_heads import engine

    sure_head(head_of("eagle3"))
    made = graphs() / key_of_head(head_of("eagle3"), [])
    monkeypatch.setattr(engine, "_write", lambda _, folder: shutil.copytree(made, folder, dirs_exist_ok=True))
    monkeypatch.setattr("specctl.models.onnx.engine.cache_folder", lambda: tmp_path)
    other = random_eagle3(
        layers=LAYERS, states=32, vocabulary=VOCABULARY, tokens=EVERY_OTHER, shape=SHAPE, spread=0.3, seed=9
    )
    heard: list[str] = []
    assert onnx_head(other, notice=heard.append) is None
    (line,) = heard
    assert line.startswith("it runs on torch: what onnxruntime computes differs by ")
    assert line.endswith(" of the logits' spread, and rounding explains 0.001")
    assert not list(tmp_path.glob("*/manifest.json"))


def test_other_weights_are_other_graphs() -> None:
    """Those of the verifier that a head computes with, too."""
    head = head_of("eagle1")
    known = key_of_head(head, head.borrowed)
    assert known == key_of_head(head, head.borrowed)
    weight = next(head.borrowed[0].parameters())
    weight[0, 0] += 1
    assert known != key_of_head(head, head.borrowed)
    weight[0, 0] -= 1
    others = [random_block(block_size=size, layers=LAYERS, vocabulary=VOCABULARY, shape=SHAPE) for size in (4, 5)]
    assert len({key_of_head(other, other.borrowed) for other in others}) == 2


def test_a_short_run_uses_what_is_there_and_makes_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from specctl.models.onnx.engine import LONG_RUN
    from specctl.models.onnx_heads import engine

    head = head_of("eagle3")
    sure_head(head)
    short: dict[str, Any] = {"engine": "auto", "expected_tokens": LONG_RUN - 1}
    again = onnx_head(head, **short)
    assert again is not None
    assert again.preparing_seconds is None
    for module in ("onnx.engine", "onnx_heads.engine"):
        monkeypatch.setattr(f"specctl.models.{module}.cache_folder", lambda: tmp_path)
    assert onnx_head(head, **short) is None

    def noted(*_: Any) -> None:
        raise OSError("it is made now")

    monkeypatch.setattr(engine, "_write", noted)
    heard: list[str] = []
    assert onnx_head(head, engine="auto", expected_tokens=LONG_RUN, notice=heard.append) is None
    assert heard[-1].endswith("(it is made now)")
