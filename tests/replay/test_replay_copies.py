"""A lookup on traces: the rounds of a live run, also in law, alone and below a draft model."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import pytest
from test_replay_chains import DEPTH, GREEDY, LENGTH, PROMPTS, clock
from test_replay_law import BLOCK, EXACT, PLAIN, Toy, first_two, traces

from specctl.decoding import round as one_round
from specctl.decoding.composition import build_drafter, readable
from specctl.decoding.sampling import Sampling
from specctl.errors import UsageError
from specctl.models.running.eager import EagerPasses
from specctl.models.running.lookup import LookupPasses
from specctl.models.running.pair import Pair
from specctl.models.running.slot import Slot
from specctl.policies import Setting
from specctl.policies.source_choice import MatchRates
from specctl.records import Round
from specctl.replay.bounds import oracle
from specctl.replay.costs import CostTable
from specctl.replay.play import play, players_of, replay_levels, replay_together
from specctl.replay.recording.metering import measure
from specctl.replay.traces import Trace
from tests.support.enumeration import DRAFTING, VERIFYING, largest_difference, law_of, walk
from tests.support.toys import TableRunner, Ticks, noisy_copy, random_model, related_table, table
from tests.support.traced import greedy_traces, live, live_with, pair_of, shape, trace_of

SETTINGS = [
    Setting.of({"name": "constant", "draft_length": 3}),
    Setting.of({"name": "constant", "draft_length": 12}),
    Setting.of({"name": "heuristic", "draft_length": 2, "max_draft": 12}),
    Setting.of({"name": "confidence", "threshold": 0.45, "max_draft": 12}),
    Setting.of({"name": "cost-optimal", "use_foresight": True, "max_draft": 12}),
]
OVER = Setting.of({"name": "svip", "c": 1.0, "threshold": 1.2, "max_draft": 8})
COSTS = CostTable.flat(0.01, 10.0, 80, per_token_ms=0.5)


@cache
def known(eos: frozenset[int] = frozenset(), *, below: bool = False) -> tuple[Pair, list[Trace]]:
    """A pair whose lowest draft is a lookup, and the traces of its target's greedy texts."""
    models = [Slot(EagerPasses(noisy_copy("llama"), 64))] if below else []
    pair = pair_of(Slot(EagerPasses(random_model("llama"), 64)), *models, Slot(LookupPasses(64)), eos=eos)
    return pair, greedy_traces(pair, PROMPTS, LENGTH, DEPTH)


def described(played: Round) -> tuple[object, ...]:
    inner = tuple(map(described, played.inner))
    return (
        *shape(played),
        played.context,
        played.copied,
        tuple((one.token, one.next_accept_prob) for one in played.steps),
        inner,
    )


def assert_rounds_are_live(pair: Pair, texts: Sequence[Trace], setting: Setting) -> list[Round]:
    """Of texts in turn, so that what was learned of the first counts in the second; returns the live rounds."""
    drafter, players = build_drafter(pair, setting), players_of(setting, [clock] * len(setting.levels))
    every = []
    for trace in texts:
        expected = live_with(pair, drafter, trace.prompt_ids, LENGTH, GREEDY)
        assert [*map(described, play(players, trace, pair.eos))] == [*map(described, expected)]
        every += expected
    return every


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.label)
def test_greedy_rounds_are_those_of_a_live_run(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_round, "working_seconds", Ticks(DRAFTING, VERIFYING, 0.0))
    pair, texts = known()
    expected = assert_rounds_are_live(pair, texts, setting)
    assert any(played.accepted for played in expected)
    assert any(not played.fully_accepted for played in expected)


def test_so_are_those_of_a_text_that_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_round, "working_seconds", Ticks(DRAFTING, VERIFYING, 0.0))
    _, (whole, _) = known()
    accepted = next(start for start, run in enumerate(whole.draft.accepted_runs) if start > 20 and run > 1)
    pair, texts = known(frozenset({whole.tokens[accepted]}))
    assert len(texts[0].tokens) < LENGTH
    for setting in SETTINGS[:2]:
        assert_rounds_are_live(pair, texts, setting)


def test_so_are_those_of_a_lookup_below_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its copies follow what the model above has written in the round, and go when that is rejected."""
    monkeypatch.setattr(one_round, "working_seconds", Ticks(DRAFTING, VERIFYING, 0.0))
    pair, texts = known(below=True)
    for lowest in SETTINGS[:4]:
        expected = assert_rounds_are_live(pair, texts, replace(OVER, below=lowest))
        inner = [one for played in expected for one in played.inner]
        assert any(one.accepted for one in inner)
        assert any(not played.fully_accepted and played.steps for played in expected)
        assert_rounds_are_live(pair, texts, replace(SETTINGS[1], once=True, below=lowest))


def test_rates_that_are_not_learned_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the comparisons above might see nothing."""
    monkeypatch.setattr(one_round, "working_seconds", Ticks(DRAFTING, VERIFYING, 0.0))
    pair, texts = known()
    expected = [live_with(pair, build_drafter(pair, SETTINGS[3]), PROMPTS[0], LENGTH, GREEDY)]
    monkeypatch.setattr(MatchRates, "learn", lambda *_: None)
    found = [*play(players_of(SETTINGS[3], [clock]), texts[0], pair.eos)]
    assert [*map(described, found)] != [*map(described, expected[0])]


@dataclass(frozen=True)
class CopyToy(Toy):
    """The lowest draft is a lookup, below as many models as ``drafts`` says."""

    def pair(self) -> Pair:
        target = table(8, eos_logit=-1.0, spread=1.0, vocabulary=self.vocabulary)
        models = [TableRunner(related_table(target, 9, noise=0.8)) for _ in range(self.drafts)]
        return pair_of(TableRunner(target), *models, Slot(LookupPasses(self.vocabulary)), eos=self.eos)


def laws(toy: Toy, sampling: Sampling, setting: Setting) -> float:
    """How far replayed rounds are from live ones."""
    pair = toy.pair()

    def replayed(trace: Trace) -> Hashable:
        return first_two([*play(players_of(setting, [clock] * len(setting.levels)), trace, pair.eos)])

    expected = law_of(walk(lambda: first_two(live(pair, setting, (1, 1), toy.limit, sampling))))
    assert any(drafted for outcome in expected for drafted, *_ in outcome)  # type: ignore[attr-defined]
    return largest_difference(law_of((replayed(trace), chance) for trace, chance in traces(toy, sampling)), expected)


@pytest.mark.usefixtures("drafts_at_will")
@pytest.mark.parametrize("sampling", [PLAIN, BLOCK], ids=["token", "block"])
@pytest.mark.parametrize(
    "setting",
    [
        Setting.of({"name": "constant", "draft_length": 2}),
        Setting.of({"name": "confidence", "threshold": 0.4}),
        Setting.of({"name": "cost-optimal", "use_foresight": True, "cost_ratio": 0.5, "carry_over": False}),
    ],
    ids=lambda setting: setting.policy,
)
def test_sampled_rounds_have_the_law_of_live_ones(setting: Setting, sampling: Sampling) -> None:
    for toy in (CopyToy(0, 3, 3), CopyToy(0, 2, 5)):
        assert laws(toy, sampling, setting) < EXACT


def test_so_have_those_of_a_lookup_below_a_model() -> None:
    setting = Setting.of({"name": "constant", "draft_length": 3})
    for once in (True, False):
        assert laws(CopyToy(1, 2, 4), PLAIN, replace(setting, once=once, below=replace(setting, once=False))) < EXACT


def test_chances_are_those_of_live_rounds() -> None:
    """What the rates of matches learn from when sampling."""
    toy, setting = CopyToy(0, 3, 6), Setting.of({"name": "constant", "draft_length": 4})
    pair = toy.pair()
    for sampling in (PLAIN, BLOCK):
        for seed in range(20):
            expected = live(pair, setting, (1, 2, 1), toy.limit, sampling, seed)
            said = [token for played in expected for token in played.emitted]
            trace = trace_of(pair, (1, 2, 1), said, toy.limit, toy.limit, sampling)
            found = play(players_of(setting, [clock]), trace, pair.eos)
            assert [one.accepted for one in found] == [one.accepted for one in expected]
            found = play(players_of(setting, [clock]), trace, pair.eos)
            for one, other in zip(found, expected, strict=True):
                assert one.chances == pytest.approx(other.chances, abs=EXACT)


def test_the_oracle_copies_what_is_accepted() -> None:
    pair, texts = known()
    for trace in texts:
        bound = oracle(trace)
        assert sum(bound.top.drafted) == sum(bound.top.accepted) > 0
        for setting in SETTINGS:
            (played,) = replay_levels(players_of(setting, [clock]), [trace], pair.eos)
            assert len(bound.top.starts) <= len(played.top.starts)


def test_several_texts_are_replayed_together() -> None:
    pair, texts = known()
    costs = replace(COSTS, batches={2: CostTable.flat(0.02, 12.0, 80, per_token_ms=1.0)})
    for setting in SETTINGS[:4]:
        together = replay_together(setting, texts, 2, costs, pair.eos)
        alone = [replay_levels(players_of(setting, [clock]), [trace], pair.eos)[0] for trace in texts]
        assert sorted(together.replays, key=lambda one: one.trace.prompt_ids[0]) == alone
        assert together.draft_passes == 0
    assert replay_together(SETTINGS[4], texts, 2, costs, pair.eos).tokens == 2 * LENGTH


def test_rounds_of_a_lookup_are_timed() -> None:
    """A copy of any length costs the host alone; so does what it predicts."""
    pair, _ = known()
    signals = [frozenset({"next_accept_prob"}), frozenset({"entropy", "top_prob"})]
    costs = measure(pair, [1, 20], 9, signals, GREEDY, [0.1])  # type: ignore[arg-type]
    assert costs.contexts.tolist() == [2, 20]
    assert costs.signal_ms.keys() == {"next_accept_prob"}
    assert (costs.verify_ms > costs.draft_ms).all()
    assert not costs.catch_up_ms
    assert readable(pair) == {"next_accept_prob"}


def test_a_trace_without_prompts_says_so() -> None:
    for below in (False, True):
        pair, (trace, _) = known(below=below)
        setting = replace(OVER, below=SETTINGS[0]) if below else SETTINGS[0]
        with pytest.raises(UsageError, match="lacks the prompts"):
            list(play(players_of(setting, [clock] * len(setting.levels)), replace(trace, prompt_ids=[]), pair.eos))
