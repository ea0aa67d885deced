"""Texts for which one policy decides together: each has the target's law, and greedily its own text."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import count, product
from math import prod

import pytest
from test_hub import DRAFT, ENDS, GREEDY, PLAIN, PROMPTS, TARGET, TableRows, greedy_alone

from specctl.decoding import drafters
from specctl.decoding import round as round_
from specctl.decoding.chained import ChainedDrafter
from specctl.decoding.drafters import ModelDrafter
from specctl.decoding.loop import decode
from specctl.decoding.round import prefill
from specctl.decoding.sampling import Sampling
from specctl.models.running.slot import Slot
from specctl.policies import Setting, estimators
from specctl.policies.cost_optimal import CostOptimal, CostOptimalBatch
from specctl.policies.estimators import AgreementCurve
from specctl.text_engine.hub import Decisions, Hub
from tests.support.enumeration import largest_difference, law_of, walk
from tests.support.toys import law

pytestmark = pytest.mark.usefixtures("drafts_at_will", "inference_mode", "even_times")

COST_OPTIMAL = Setting.of({"name": "cost-optimal", "max_draft": 3})


@pytest.fixture
def even_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that goes on by a millisecond when it is read, so that `cost-optimal` always decides the same."""
    read = count()
    for module in (round_, drafters):
        monkeypatch.setattr(module, "working_seconds", lambda: next(read) / 1000)


class Counted(Decisions):
    """Decisions that remember what was decided."""

    def __init__(self) -> None:
        super().__init__()
        self.limits: list[list[int]] = []

    def run(self, rows):  # type: ignore[no-untyped-def]
        self.limits.append(super().run(rows))
        return self.limits[-1]


def written(
    limit: int, sampling: Sampling, setting: Setting = COST_OPTIMAL
) -> tuple[tuple[tuple[int, ...], ...], list[list[int]]]:
    """What three texts write, and what was decided about them."""
    draft, target = (TableRows(table, 3) for table in (DRAFT, TARGET))
    decisions = Counted()
    hub: Hub[tuple[int, ...]] = Hub([draft, decisions, target])

    def write(row: int) -> tuple[int, ...]:
        policy = decisions.policy(setting, row, hub.asker(decisions))
        verifier = Slot(target, row, hub.asker(target))
        model = ModelDrafter(Slot(draft, row, hub.asker(draft)), policy)
        drafter = ChainedDrafter(model) if setting.lookup else model
        prefill(verifier, drafter, PROMPTS[row])
        rounds = decode(verifier, drafter, PROMPTS[row], limit, sampling, ENDS, None)
        return tuple(token for played in rounds for token in played.emitted)

    for row in range(3):
        hub.begin(row, partial(write, row))
    found: dict[int, tuple[int, ...]] = {}
    while hub.busy:
        found |= dict(hub.advance())
    found |= dict(hub.advance())
    return tuple(found[row] for row in range(3)), decisions.limits


def test_three_texts_of_which_one_rule_decides_have_the_law_of_the_target_each() -> None:
    each = [law(TARGET, prompt, 2, PLAIN, ENDS) for prompt in PROMPTS]
    expected = {texts: prod(one[text] for one, text in zip(each, texts, strict=True)) for texts in product(*each)}
    assert largest_difference(law_of(walk(lambda: written(2, PLAIN)[0])), expected) < 3e-7


def test_greedy_texts_are_those_of_each_alone_and_all_are_asked_before_any_is_told() -> None:
    texts, limits = written(40, GREEDY)
    assert texts == tuple(greedy_alone(row, 40) for row in range(3))
    assert any(len(asked) == 3 for asked in limits)


def test_texts_in_chains_are_those_of_each_alone_and_each_row_decides_for_itself() -> None:
    texts, limits = written(40, GREEDY, replace(COST_OPTIMAL, lookup=True))
    assert texts == tuple(greedy_alone(row, 40) for row in range(3))
    assert limits == []


@pytest.mark.parametrize("margin", [float("inf"), float("-inf")])
def test_each_text_is_compared_with_a_lookup_in_itself(margin: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what that says of acceptance is learned from all of them."""
    monkeypatch.setattr(estimators, "MARGIN", margin)
    learned = []
    learn = AgreementCurve.learn
    monkeypatch.setattr(AgreementCurve, "learn", lambda curve, *seen: (learned.append(curve), learn(curve, *seen)))
    texts, limits = written(40, GREEDY, Setting.of({"name": "cost-optimal", "max_draft": 3, "use_agreement": True}))
    assert texts == tuple(greedy_alone(row, 40) for row in range(3))
    assert any(len(asked) == 3 for asked in limits)
    assert len(learned) > 10
    assert len({id(curve) for curve in learned}) == 1


def test_an_error_of_what_decides_for_all_is_no_slowness(monkeypatch: pytest.MonkeyPatch) -> None:
    """If each text asked again alone, it would be answered, and nobody would see that anything is wrong."""

    decide = CostOptimalBatch.run

    def fails_for_several(joint: CostOptimalBatch, rows: Sequence[CostOptimal]) -> list[int]:
        if len(rows) > 1:
            raise ZeroDivisionError
        return decide(joint, rows)  # type: ignore[arg-type]

    monkeypatch.setattr(CostOptimalBatch, "run", fails_for_several)
    with pytest.raises(ZeroDivisionError):
        written(4, GREEDY)
