"""Signals that a draft's graph tells are those that the host computes of its logits."""

from pathlib import Path

import numpy as np
import pytest

from specctl.decoding.composition import build_drafter
from specctl.decoding.logits.host import Softmax
from specctl.decoding.logits.token_sampler import TokenSampler
from specctl.decoding.sampling import Sampling
from specctl.decoding.session import Session
from specctl.models.loading.assembly import load_pair
from specctl.models.onnx.passes import OnnxPasses
from specctl.models.running.pair import Pair
from specctl.models.running.passes import Request
from specctl.models.running.slot import Slot
from specctl.profile import parse_policy
from specctl.profile.schema import PolicyTable, Profile
from specctl.records import Round
from tests.support.onnx_models import needs_onnx, small_pair

pytestmark = needs_onnx


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Pair, Profile]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    profile = small_pair(tmp_path)
    return load_pair(profile, torch_weights=False), profile


def draft_of(pair: Pair) -> Slot:
    (draft,) = pair.drafts
    assert isinstance(draft.passes, OnnxPasses)
    return draft


def rounds(made: tuple[Pair, Profile], policy: str, **sampling: object) -> tuple[Round, ...]:
    pair, profile = made
    assert profile.draft is not None
    draft = profile.draft.model_copy(update={"policy": PolicyTable(**parse_policy(policy))})
    session = Session(pair, build_drafter(pair, draft.setting))
    table = profile.sampling.model_copy(update={"max_new_tokens": 20, **sampling})
    return session.generate([5, 6, 7, 8], table).rounds


def test_they_are_the_hosts_whatever_the_pass_reads(made: tuple[Pair, Profile]) -> None:
    draft = draft_of(made[0])
    draft.wants_signals = True
    for tokens, keep in (([7], 1), ([8, 9], 1), ([3, 4, 5, 6], 3)):
        found = draft.extend(tokens, keep)
        assert found.signals is not None
        for row, entropy, top in zip(found.columns, *found.signals, strict=True):
            assert [entropy, top] == pytest.approx(
                Softmax(np.asarray(row)[None]).signals(0, 0, {"entropy", "top_prob"}), rel=1e-4
            )
    assert draft.extend([4], 0).signals is None
    found, draft.wants_signals = draft.extend([4], 1), False
    again = draft.extend([4], 1)
    assert (found.signals is None, again.signals is None) == (False, True)


def test_drafts_are_those_without_them(made: tuple[Pair, Profile], monkeypatch: pytest.MonkeyPatch) -> None:
    for policy in ("svip:threshold=1.5", "max-confidence:threshold=0.05"):
        with monkeypatch.context() as patched:
            patched.setattr(OnnxPasses, "_tells", lambda *_: False)
            without = rounds(made, policy)
        told = rounds(made, policy)
        assert [each.emitted for each in told] == [each.emitted for each in without]
        for one, other in zip(told, without, strict=True):
            for step, known in zip(one.steps, other.steps, strict=True):
                assert (step.entropy or 1.0) == pytest.approx(known.entropy or 1.0, rel=1e-4)
                assert (step.top_prob or 1.0) == pytest.approx(known.top_prob or 1.0, rel=1e-4)
                assert (step.token, step.entropy is None) == (known.token, known.entropy is None)


def test_those_of_several_texts_are_told_together(made: tuple[Pair, Profile]) -> None:
    draft = draft_of(made[0])
    passes, alone = draft.over(3), [draft.fresh() for _ in range(3)]
    reader = TokenSampler(Sampling(), frozenset({"entropy", "top_prob"}))
    for row, tokens in enumerate(([5, 6, 7], [8], [9, 10])):
        alone[row].extend(tokens, 0)
        passes.run([Request(row, 0, tokens, 0)])
    asked = [Request(row, alone[row].length, [row + 3], 1, reader=reader) for row in range(3)]
    assert all(found.signals is not None for found in passes.forward(asked))
    for row, (each, (numbers, probs)) in enumerate(zip(alone, passes.run(asked), strict=True)):
        ((untold, _),) = reader.read_rows([each.extend([row + 3], 1)], [None])
        assert numbers == pytest.approx(untold, rel=1e-4)
        assert (len(numbers), probs) == (3, None)


@pytest.mark.parametrize(
    ("policy", "sampling"),
    [
        ("constant", {}),
        ("svip", {"temperature": 1.0}),
        ("svip", {"repetition_penalty": 1.2}),
        ("cost-optimal:use_foresight=false", {"temperature": 0.5, "top_k": 4}),
    ],
)
def test_nothing_is_told_that_nobody_takes(
    made: tuple[Pair, Profile], policy: str, sampling: dict[str, object]
) -> None:
    """A draw takes the whole law, and rules about tokens change it behind the pass."""
    rounds(made, policy, **sampling)
    assert not draft_of(made[0]).wants_signals
