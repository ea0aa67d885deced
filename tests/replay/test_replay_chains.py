"""Chains of a lookup and a model on traces: the rounds of a live run, also in law."""

from collections.abc import Hashable
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from test_replay_law import BLOCK, EXACT, PLAIN, HeadToy, Toy, first_two, traces

from specctl.decoding import chained as chains
from specctl.decoding import round as one_round
from specctl.decoding.chained import Chaining
from specctl.decoding.composition import build_drafter
from specctl.decoding.sampling import Sampling
from specctl.errors import UsageError
from specctl.models.running.eager import EagerPasses
from specctl.models.running.pair import Pair
from specctl.models.running.slot import Slot
from specctl.policies import Setting
from specctl.policies.source_choice import SourceChoice
from specctl.records import Round
from specctl.replay.costs import CostTable, Level, columns
from specctl.replay.play import Player, play, players_of, replay_levels
from specctl.replay.traces import TokenChances, Trace
from tests.support.enumeration import DRAFTING, VERIFYING, largest_difference, law_of, walk
from tests.support.toys import Ticks, noisy_copy, random_model, round_of
from tests.support.traced import greedy_traces, live, live_with, pair_of, shape

GREEDY = Sampling()
PROMPTS = ([3, 4, 3, 4, 5, 3, 4], [7, 7, 7, 1, 7, 7])
LENGTH, DEPTH = 60, 12
SETTINGS = [
    Setting.of({"name": "constant", "draft_length": 3}),
    Setting.of({"name": "svip", "c": 1.0, "threshold": 1.2, "max_draft": 12}),
    Setting.of({"name": "cost-optimal", "max_draft": 12}),
]


def chained(setting: Setting) -> Setting:
    return replace(setting, lookup=True)


def clock(*_: int | None) -> tuple[float, float]:
    return DRAFTING, VERIFYING


@cache
def greedy_pair() -> tuple[Pair, list[Trace]]:
    pair = pair_of(Slot(EagerPasses(random_model("llama"), 64)), Slot(EagerPasses(noisy_copy("llama"), 64)))
    return pair, greedy_traces(pair, PROMPTS, LENGTH, DEPTH)


def described(played: Round) -> tuple[object, ...]:
    return (*shape(played), played.copied, played.context, tuple(step.token for step in played.steps))


@pytest.mark.usefixtures("drafts_at_will")
@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.policy)
@pytest.mark.parametrize("rare", [0.0, 0.3], ids=["always", "at-times"])
@pytest.mark.representatives("always-svip", "always-cost-optimal", "at-times-svip")
def test_greedy_rounds_are_those_of_a_live_run(setting: Setting, rare: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of texts in turn, so that what was learned of the first counts in the second."""
    monkeypatch.setattr(chains, "RARE", rare)
    monkeypatch.setattr(chains, "QUICK", float("inf"))
    monkeypatch.setattr(one_round, "working_seconds", Ticks(DRAFTING, VERIFYING, 0.0))
    pair, known = greedy_pair()
    drafter = build_drafter(pair, chained(setting))
    assert drafter is not None
    players = players_of(chained(setting), [clock])
    seen = set()
    for prompt, trace in zip(PROMPTS, known, strict=True):
        expected = live_with(pair, drafter, prompt, LENGTH, GREEDY)
        assert [*map(described, play(players, trace, frozenset()))] == [*map(described, expected)]
        seen |= {(one.copied == one.drafted, one.summary.accepted_copies > 0) for one in expected if one.copied}
    assert {copies for copies, _ in seen} == {True, False} or rare
    assert any(accepted for _, accepted in seen) or setting.policy == "cost-optimal"  # its own drafts leave little


SHORT = Setting.of({"name": "constant", "draft_length": 1})
SVIP = Setting.of({"name": "svip", "c": 1.0, "threshold": 0.8})
CASES = {
    "token": (Toy(1, 2, 4, ends=False), PLAIN, SHORT),
    "block": (Toy(1, 2, 4, ends=False), BLOCK, SHORT),
    "svip in blocks": (Toy(1, 2, 4, ends=False), BLOCK, SVIP),
    "three tokens and an end": (Toy(1, 3, 3), PLAIN, SHORT),
    "head in blocks": (HeadToy(1, 2, 4), BLOCK, SHORT),
}


def laws(toy: Toy, sampling: Sampling, setting: Setting, *, as_chain: bool) -> float:
    """How far replayed rounds are from live ones of a chain; replayed as one, or as if the model drafted alone."""
    pair = toy.pair()
    prompt = (1, 1)

    def lived() -> Hashable:
        found = live(pair, chained(setting), prompt, toy.limit, sampling)
        return first_two(found), tuple(played.copied for played in found[:2])

    def replayed(trace: Trace) -> Hashable:
        found = list(
            play([Player(setting.build(), clock=clock, chaining=Chaining() if as_chain else None)], trace, pair.eos)
        )
        return first_two(found), tuple(played.copied for played in found[:2])

    expected = law_of(walk(lived))
    assert any(copied for _, copies in expected for copied in copies)  # type: ignore[attr-defined]
    return largest_difference(law_of((replayed(trace), chance) for trace, chance in traces(toy, sampling)), expected)


@pytest.mark.usefixtures("drafts_at_will")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.representatives("token")
def test_sampled_rounds_have_the_law_of_live_ones(case: str) -> None:
    assert laws(*CASES[case], as_chain=True) < EXACT


def test_rounds_without_the_copies_are_caught() -> None:
    """Or the comparison above might see nothing."""
    assert laws(*CASES["token"], as_chain=False) > 1000 * EXACT


def test_a_copy_costs_the_wider_pass_alone() -> None:
    pair, (trace, _) = greedy_pair()
    (played,) = replay_levels(players_of(chained(SETTINGS[0]), [clock]), [trace], pair.eos)
    assert sum(played.top.copied) > 0
    costs = CostTable.flat(1.0, 10.0, 80, per_token_ms=0.5)
    own = sum(played.top.drafted) - sum(played.top.copied)
    expected = own + 10.0 * len(played.top.starts) + 0.5 * sum(played.top.drafted)
    assert costs.milliseconds([played], ()) == pytest.approx(expected)
    assert np.array(played.top.copied).max() <= np.array(played.top.drafted).max()
    summaries = [replace(round_of(2, 3), copied=2), replace(round_of(0, 0))]
    assert columns(summaries)[0].copied == [2, 0]
    assert columns(summaries[1:])[0].copied == []


def test_a_model_reads_the_prompt_at_once_and_accepted_copies_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 5 tokens that it reads each takes 1 ms: five copies in the first round, and five behind its token."""
    costs = replace(CostTable.flat(0.0, 0.0, 80), catch_up_ms={100: 100.0})
    copies = Level([0, 6, 13, 15], [5, 6, 1, 1], [5, 6, 1, 1], copied=[5, 5, 0, 0])
    assert costs.rounds_ms([copies], prompt_tokens=50) == pytest.approx(6.0 + 5.0)
    pair, (_, trace) = greedy_pair()
    seen: list[int] = []

    def noting(*asked: int | None) -> tuple[float, float]:
        seen.append(asked[2] or 0)
        return DRAFTING, VERIFYING

    monkeypatch.setattr(SourceChoice, "_worth_of_model", lambda *_: 0.2)  # little, so that the first round is a copy
    found = replay_levels(players_of(chained(SETTINGS[0]), [noting]), [trace], pair.eos)
    assert found[0].top.copied[0] == found[0].top.drafted[0] > 0
    assert 0 < sum(seen) == pytest.approx(costs.milliseconds(found, ()))


def test_of_no_tokens_nothing_is_told() -> None:
    """As of a round that is copied as a whole; or of fewer than rounds share."""
    chances = TokenChances([0.5, 0.25], [[0.1, 0.2, 0.3]])
    assert chances.of_round(0, 2, 0, 0) == ()
    assert chances.of_round(0, 2, 0, 1) == (0.5,)
    assert chances.of_round(0, 2, 0, 3) == (0.5, 0.25, 0.1)


def test_a_trace_without_prompts_says_so() -> None:
    _, (trace, _) = greedy_pair()
    players = players_of(chained(SETTINGS[0]), [None])
    with pytest.raises(UsageError, match="lacks the prompts"):
        list(play(players, replace(trace, prompt_ids=[]), frozenset()))
    assert list(play(players_of(SETTINGS[0], [None]), replace(trace, prompt_ids=[]), frozenset()))


def test_the_prompt_is_read_before_the_answer_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    begin, lengths = Chaining.begin, list[int]()
    monkeypatch.setattr(Chaining, "begin", lambda one: (lengths.append(one.length), begin(one))[1])
    _, (trace, _) = greedy_pair()
    list(play(players_of(chained(SETTINGS[0]), [None]), trace, frozenset()))
    assert lengths == [trace.prompt_tokens - 1]
