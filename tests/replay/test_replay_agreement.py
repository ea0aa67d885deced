"""Agreement with a lookup as a signal: by hand, under rollback, live and in replay."""

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice

import pytest
from test_replay_chains import DEPTH, DRAFTING, GREEDY, LENGTH, PROMPTS, VERIFYING, clock, described, greedy_pair
from test_replay_law import BLOCK, PLAIN, HeadToy, Toy, traces

from specctl.decoding import round as one_round
from specctl.decoding.composition import build_drafter, readable
from specctl.decoding.lookup import LONGEST, SHORTEST, Agreement
from specctl.decoding.sampling import Sampling
from specctl.errors import ProfileError, UsageError
from specctl.policies import Setting, estimators
from specctl.policies.cost_optimal import CostOptimal
from specctl.policies.estimators import AgreementCurve
from specctl.policies.setting import TreeSize
from specctl.records import DraftStep
from specctl.replay.play import play, players_of
from specctl.replay.traces import with_agreement
from tests.support.toys import Ticks
from tests.support.traced import live_with

AGREEING = Setting.of({"name": "cost-optimal", "max_draft": DEPTH, "use_agreement": True})
WITHOUT = Setting.of({"name": "cost-optimal", "max_draft": DEPTH})


def signals(agreement: Agreement, text: Sequence[int], drafted: Sequence[int]) -> list[float]:
    agreement.begin(text)
    return [agreement.of(token) for token in drafted]


def test_a_worked_example() -> None:
    found = signals(Agreement(), [1, 2, 3, 4, 5, 9, 1, 2], [3, 4, 8, 3, 4])
    # "1 2" was followed by 3; "1 2 3" by 4; "1 2 3 4" by 5 and not by 8; 8 and then "8 3" are new.
    assert found == [2 / 4, 3 / 4, -4 / 4, 0, 0]
    assert signals(Agreement(), [1, 1], [1]) == [0.0], "a match of one token tells nothing"
    assert signals(Agreement(), [], [1, 2, 1, 2]) == [0, 0, 0, 0]


def by_hand(text: Sequence[int], token: int) -> float:
    for size in range(min(LONGEST, len(text)), SHORTEST - 1, -1):
        for end in range(len(text) - 1, size - 1, -1):
            if text[end - size : end] == text[-size:]:
                return size / LONGEST * (1 if text[end] == token else -1)
    return 0.0


def test_what_was_drafted_in_vain_is_forgotten() -> None:
    chance = random.Random(0)
    agreement, text = Agreement(), [0, 1]
    for _ in range(200):
        drafted = chance.choices(range(3), k=chance.randrange(6))
        expected = [by_hand([*text, *drafted[:place]], token) for place, token in enumerate(drafted)]
        assert signals(agreement, text, drafted) == expected
        text += [*drafted[: chance.randrange(len(drafted) + 1)], chance.randrange(3)]
        if chance.random() < 0.1:
            del text[chance.randrange(1, len(text)) :]
            agreement.rollback(len(text))


def of(agreement: float) -> DraftStep:
    return DraftStep(1, 3, agreement=agreement)


@pytest.mark.parametrize("informative", [True, False])
def test_it_is_believed_while_it_predicts_better(informative: bool) -> None:
    chance, curve, believed = random.Random(3), AgreementCurve(), 0
    for _ in range(600):
        agreement = chance.choice([-1.0, -0.5, 0.5, 1.0])
        accepted = chance.random() < (0.5 + 0.4 * agreement if informative else 0.5)
        curve.learn(float(accepted), 0.5, of(agreement))
        believed += curve.corrected(0.5, of(agreement)) != 0.5
    assert believed > 550 if informative else believed == 0
    if informative:
        assert curve.corrected(0.5, of(-1.0)) < 0.25 < 0.75 < curve.corrected(0.5, of(1.0))
        for _ in range(600):  # and no longer, once it says the contrary of what comes
            agreement = chance.choice([-1.0, 1.0])
            curve.learn(float(chance.random() < 0.5), 0.5, of(agreement))
        assert curve.corrected(0.5, of(1.0)) == pytest.approx(0.5, abs=0.1)


@pytest.mark.usefixtures("drafts_at_will")
@pytest.mark.parametrize("believed", [True, False])
def test_greedy_rounds_are_those_of_a_live_run(believed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_round, "working_seconds", Ticks(DRAFTING, VERIFYING, 0.0))
    if believed:
        monkeypatch.setattr(estimators, "MARGIN", float("-inf"))
    pair, known = greedy_pair()
    drafter = build_drafter(pair, AGREEING)
    assert drafter is not None
    players, without = players_of(AGREEING, [clock]), players_of(WITHOUT, [clock])
    seen, same = set(), True
    for prompt, trace in zip(PROMPTS, known, strict=True):
        expected = live_with(pair, drafter, prompt, LENGTH, GREEDY)
        found = list(play(players, trace, frozenset()))
        assert [*map(described, found)] == [*map(described, expected)]
        agreements = [[step.agreement for step in one.steps] for one in found]
        assert agreements == [[step.agreement for step in one.steps] for one in expected]
        seen |= {value for some in agreements for value in some}
        same &= [*map(described, play(without, trace, frozenset()))] == [*map(described, found)]
    assert {-1.0, 1.0} <= seen
    assert same != believed, "decisions are others, if and only if it is believed"


def test_what_cannot_have_the_signal_says_so() -> None:
    pair, (trace, *_) = greedy_pair()
    with pytest.raises(UsageError, match="lacks the prompts"):
        list(play(players_of(AGREEING, [clock]), replace(trace, prompt_ids=[]), frozenset()))
    with pytest.raises(ProfileError, match="one draft writes"):
        build_drafter(pair, replace(AGREEING, tree=TreeSize(4, 2)))
    with pytest.raises(ValueError, match="exclude each other"):
        CostOptimal(use_agreement=True, use_head=True)


@pytest.mark.parametrize(
    ("toy", "sampling"), [(Toy(1, 2, 4), PLAIN), (Toy(1, 2, 4, ends=False), BLOCK), (HeadToy(1, 2, 4), BLOCK)]
)
def test_every_step_of_every_round_has_it(toy: Toy, sampling: Sampling) -> None:
    """Whether rounds share their tokens or each has its own; and only where it is asked for."""
    seen = set()
    prompt = [1, 0, 1, 1, 0, 0, 0, 1, 0, 1, 1]  # in which all that is drafted occurred before
    for recorded, _ in islice(traces(toy, sampling), 60):
        trace = replace(recorded, prompt_ids=prompt, prompt_tokens=len(prompt))
        found = with_agreement(trace)
        for start in range(len(trace.tokens)):
            tail = found.tails[start]
            count = found.shared[start] + (0 if tail is None else len(found.branches[tail]))
            steps = [found.step(start, index) for index in range(1, count + 1)]
            text = [*trace.prompt_ids, *trace.tokens[:start]]
            expected = signals(Agreement(), text, [step.token for step in steps])
            assert [step.agreement for step in steps] == expected
            seen |= {*expected}
        assert trace.draft.step(0, 1).agreement is None
    assert len(seen) > 2
    assert "agreement" in readable(toy.pair())
