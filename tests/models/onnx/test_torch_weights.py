"""Which models keep their weights in torch beside those of onnxruntime."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from specctl.decoding.composition import build_drafter
from specctl.decoding.session import Session
from specctl.models.draft_heads.file_layout import Verifier, write_head
from specctl.models.draft_heads.head_layers import LayerShape
from specctl.models.loading.assembly import load_pair
from specctl.models.onnx import engine
from specctl.models.onnx.engine import LONG_RUN
from specctl.models.onnx.store import EAGER, ONNX
from specctl.models.running.engines import EngineSettings
from specctl.models.running.pair import Pair
from specctl.profile.schema import Profile
from tests.support.onnx_models import needs_onnx, small_pair
from tests.support.toy_heads import random_eagle3, random_glide

pytestmark = needs_onnx


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Graphs are kept from test to test, since making one takes seconds."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def unexpected(notice: str) -> None:
    assert "of the parameters of the target" in notice


def kept(pair: Pair) -> list[bool]:
    """For each model whether torch has its weights."""
    return [not any(weight.is_meta for weight in model.state_dict().values()) for model in pair.models]


def written(pair: Pair, profile: Profile, drafts: bool = True) -> tuple[int, ...]:
    assert profile.draft is not None
    drafter = build_drafter(pair, profile.draft.setting) if drafts else None
    table = profile.sampling.model_copy(update={"max_new_tokens": 24})
    return Session(pair, drafter).generate([1, 2, 3, 4], table).tokens


def test_they_go_unless_a_check_reads_them(tmp_path: Path) -> None:
    profile = small_pair(tmp_path)
    whole, bare = (load_pair(profile, torch_weights=wanted) for wanted in (True, False))
    assert (kept(whole), kept(bare)) == ([True, True], [False, False])
    text = written(bare, profile)
    assert len(text) > 2
    assert text == written(whole, profile) == written(bare, profile, drafts=False)
    again = load_pair(profile.model_copy(update={"check": True}), torch_weights=False)
    assert kept(again) == [True, False]
    assert written(again, profile) == text


def test_a_target_reads_trees_without_them(tmp_path: Path) -> None:
    profile = small_pair(tmp_path)
    assert profile.draft is not None
    profile = profile.model_copy(update={"draft": profile.draft.model_copy(update={"tree": 8})})
    bare = load_pair(profile, torch_weights=False, engines=EngineSettings.of(profile, notice=unexpected))
    assert kept(bare) == [False, False]
    assert bare.target.no_trees is None
    assert written(bare, profile) == written(bare, profile, drafts=False)


@pytest.mark.parametrize("kind", ["eagle3", "glide"])
@pytest.mark.representatives(slow=("eagle3",))
def test_a_draft_head_keeps_those_of_the_model_it_reads(tmp_path: Path, kind: str) -> None:
    """GliDe computes with them too."""
    shape = LayerShape(hidden_size=32, intermediate_size=48, heads=2, kv_heads=1, head_dim=16)
    profile = small_pair(tmp_path)
    if kind == "glide":
        target = load_pair(profile).models[0]
        write_head(tmp_path / "head", random_glide(target, vocabulary=258, shape=shape, spread=0.2), Verifier("it"))
    else:
        head = random_eagle3(layers=(0,), states=64, vocabulary=258, shape=shape, spread=0.2)
        write_head(tmp_path / "head", head, Verifier(str(tmp_path / "target")))
    assert profile.draft is not None
    profile = profile.model_copy(
        update={"draft": profile.draft.model_copy(update={"model": str(tmp_path / "head"), "head": None})}
    )
    pair = load_pair(profile, torch_weights=False)
    assert [runner.engine for runner in (pair.target, *pair.drafts)] == ["onnx", "onnx"]
    assert kept(pair) == [True]
    assert written(pair, profile) == written(pair, profile, drafts=False)


@pytest.mark.parametrize("faster", [EAGER, ONNX])
def test_what_torch_runs_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, faster: str) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # which keeps what was faster too
    monkeypatch.setattr(engine, "milliseconds", lambda runner, _: 1.0 if runner.engine == faster else 2.0)
    profile = small_pair(tmp_path).model_copy(update={"engine": "auto"})
    pair = load_pair(profile, torch_weights=False, engines=EngineSettings.of(profile, LONG_RUN))
    assert pair.target.engine == faster
    assert kept(pair) == [faster == EAGER] * 2
    with torch.inference_mode():
        assert pair.target.extend([1, 2, 3], keep=1).logits.isfinite().all()
