"""Replayed rounds are those of a live run: the very same when greedy, and when sampling once chance is the same.

That chance has the law of a live run is for `test_replay_law`.
"""

from functools import cache

import pytest
import torch
from tiers import OTHERS

from specctl.decoding import round as one_round
from specctl.decoding.draft import Draft
from specctl.decoding.logits import host
from specctl.decoding.logits.logits import Verdict
from specctl.decoding.sampling import Sampling
from specctl.errors import UsageError
from specctl.models.running.eager import EagerPasses
from specctl.models.running.pair import Pair
from specctl.models.running.slot import Slot
from specctl.models.running.static import StaticPasses
from specctl.policies import NONE, POLICIES, Setting
from specctl.records import ExtraToken
from specctl.replay.bounds import oracle
from specctl.replay.play import replay, rounds
from specctl.replay.traces import Trace
from tests.support.few_tokens import trimmed
from tests.support.toys import (
    FAMILIES,
    WINDOW,
    Ticks,
    noisy_copy,
    random_model,
    random_predictor,
    seeded,
)
from tests.support.traced import live, pair_of, shape, trace_of

pytestmark = pytest.mark.crossed

LENGTH, DEPTH = 4 * WINDOW, 12
PROMPT = tuple(torch.randint(1, 64, (2 * WINDOW + 3,), generator=seeded(5)).tolist())
SETTINGS: dict[str, list[dict[str, object]]] = {
    "none": [{}],
    "constant": [{"draft_length": length} for length in (1, 4, 12)],
    "heuristic": [{"max_draft": 12}, {"draft_length": 1, "max_draft": 12}],
    "max-confidence": [
        {"threshold": 0.5, "eps": 0.3, "max_draft": 12},
        {"threshold": 0.3, "adapt": False, "keep_trigger": False},
    ],
    "svip": [
        {"c": 1.0, "threshold": 1.2, "max_draft": 12},
        {"c": 1.0, "threshold": 1.0, "keep_trigger": False, "max_draft": 9},
    ],
    "adaedl": [{"threshold": 0.3, "eps": 0.3, "max_draft": 12}, {"keep_trigger": False}],
    "self-verify": [{"max_draft": 12}],
    "specdec++": [{"threshold": h, "min_draft": low, "max_draft": 12} for h in (0.3, 0.6, 0.8) for low in (1, 3)],
    "bandit": [
        {"max_draft": 12},
        {"arms": ("svip:c=1.0,threshold=1.2", "constant:draft_length=3", "specdec++"), "max_draft": 12},
    ],
    "disco": [{"threshold": c, "max_draft": 12} for c in (0.45, 0.5, 0.55)],
    "cost-optimal": [{"max_draft": 12}, {"max_draft": 5, "carry_over": False}],
}
# Every round takes these seconds, so that a policy that learns from times plays alike live and in replay.
DRAFTING, VERIFYING = 2.0, 4.0
HEAD = random_predictor(32, depth=1, spread=0.15)
CASES = [(name, settings) for name, cases in SETTINGS.items() for settings in cases]
FEW = {name: settings for name, settings in CASES if name not in OTHERS or name == "specdec++"}
"""One setting of each policy that reads something of its own kind."""


def clock(*_: int) -> tuple[float, float]:
    return DRAFTING, VERIFYING


@pytest.fixture(autouse=True)
def steady_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_round, "working_seconds", Ticks(DRAFTING, VERIFYING, 0.0))


@cache
def greedy_pair(family: str, eos: frozenset[int]) -> tuple[Pair, Trace]:
    pair = pair_of(
        Slot(EagerPasses(random_model(family), 64)), Slot(EagerPasses(noisy_copy(family), 64)), eos=eos, heads=[HEAD]
    )
    said = [token for played in live(pair, NONE, PROMPT, LENGTH, Sampling()) for token in played.emitted]
    return pair, trace_of(pair, PROMPT, said, LENGTH, DEPTH, Sampling())


@pytest.mark.parametrize(("name", "settings"), CASES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.representatives("llama", "gemma2-svip")
def test_greedy_rounds_are_those_of_a_live_run(family: str, name: str, settings: dict[str, object]) -> None:
    pair, trace = greedy_pair(family, frozenset())
    found = [shape(played) for played in rounds(POLICIES[name](**settings), trace, pair.eos, clock)]
    setting = Setting.of({"name": name, **settings})
    assert found == [shape(played) for played in live(pair, setting, PROMPT, LENGTH, Sampling())]


@pytest.mark.parametrize("family", ["llama", "gpt-neox"])
@pytest.mark.representatives("llama")
def test_so_are_those_of_a_sequence_that_ends(family: str) -> None:
    """With an end of sequence among the target's own tokens, and one that only the draft proposes."""
    _, whole = greedy_pair(family, frozenset())
    rejected = next(position for position, accepted in enumerate(whole.draft.accepted) if not accepted)
    ends = {whole.tokens[-2], whole.draft.along.tokens[rejected]}
    for eos in (frozenset({token}) for token in ends):
        pair, trace = greedy_pair(family, eos)
        for name, settings in FEW.items():
            found = [shape(played) for played in rounds(POLICIES[name](**settings), trace, eos, clock)]
            assert found == [
                shape(played)
                for played in live(pair, Setting.of({"name": name, **settings}), PROMPT, LENGTH, Sampling())
            ]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.representatives("llama", "gemma2")
def test_the_traces_hold_refusals_and_long_branches(family: str) -> None:
    """Or the identity above would not have looked at what comes after a refusal."""
    _, trace = greedy_pair(family, frozenset())
    assert any(trace.draft.accepted)
    assert max(map(len, trace.draft.branches)) == DEPTH - 1


def test_a_runner_without_shared_branches_leaves_the_same_trace() -> None:
    _, expected = greedy_pair("llama", frozenset())
    pair = pair_of(
        Slot(StaticPasses(random_model("llama"), 64)), Slot(StaticPasses(noisy_copy("llama"), 64)), heads=[HEAD]
    )
    found = trace_of(pair, PROMPT, expected.tokens, LENGTH, DEPTH, Sampling())
    assert (found.draft.accepted, found.draft.along.tokens) == (expected.draft.accepted, expected.draft.along.tokens)
    assert found.draft.tails == expected.draft.tails
    for branch, other in zip(found.draft.branches, expected.draft.branches, strict=True):
        assert branch.tokens == other.tokens
        assert branch.accept_prob == pytest.approx(other.accept_prob, abs=1e-4)


@pytest.mark.parametrize("engine", [EagerPasses, StaticPasses])
def test_a_trace_begins_anew_whatever_the_models_have_cached(engine: type[EagerPasses | StaticPasses]) -> None:
    """A draft that took no part in the run still has an earlier text."""
    _, written = greedy_pair("llama", frozenset())
    pair = pair_of(Slot(engine(random_model("llama"), 64)), Slot(engine(noisy_copy("llama"), 64)), heads=[HEAD])
    expected = trace_of(pair, PROMPT, written.tokens, LENGTH, DEPTH, Sampling())
    with torch.inference_mode():
        for runner in (pair.target, *pair.drafts):
            runner.rollback(0)
            runner.extend([9, 8, 7, 6], keep=0)
    assert trace_of(pair, PROMPT, written.tokens, LENGTH, DEPTH, Sampling()) == expected


def test_a_longer_draft_than_recorded_is_refused() -> None:
    pair, trace = greedy_pair("llama", frozenset())
    with pytest.raises(UsageError, match="not recorded for drafts of"):
        list(rounds(POLICIES["constant"](draft_length=DEPTH + 2), trace, pair.eos))


def test_columns_add_up() -> None:
    pair, trace = greedy_pair("llama", frozenset())
    (found,) = replay(POLICIES["constant"](), [trace], pair.eos)
    assert len(found.top.starts) + sum(found.top.accepted) == len(trace.tokens)
    assert found.top.starts[0] == 0
    assert all(accepted <= drafted for accepted, drafted in zip(found.top.accepted, found.top.drafted, strict=True))


def test_the_oracle_takes_one_pass_more_than_there_are_disagreements() -> None:
    pair, trace = greedy_pair("llama", frozenset())
    disagreements = [position for position, accepted in enumerate(trace.draft.accepted) if not accepted]
    best = oracle(trace)
    # A disagreement at the very last position ends the last pass and needs none of its own.
    assert len(best.top.starts) == len(disagreements) + (disagreements[-1] != len(trace.tokens) - 1)
    assert best.top.drafted == best.top.accepted
    assert len(best.top.starts) <= min(
        len(replay(POLICIES[name](**settings), [trace], pair.eos)[0].top.starts) for name, settings in CASES
    )


SAMPLED = [
    ("constant", {"draft_length": 3}),
    ("heuristic", {"draft_length": 2, "max_draft": 6}),
    ("max-confidence", {"threshold": 0.5, "eps": 0.2, "max_draft": 5}),
    ("svip", {"c": 1.0, "threshold": 1.0, "max_draft": 6}),
    ("adaedl", {"threshold": 0.4, "max_draft": 6}),
    ("self-verify", {"max_draft": 6}),
    ("specdec++", {"threshold": 0.6, "min_draft": 1, "max_draft": 6}),
    ("disco", {"max_draft": 6}),
    ("cost-optimal", {"max_draft": 6, "cost_ratio": 0.4, "carry_over": False}),
]
PLAIN = Sampling(temperature=1.0)


class FromTrace:
    """Chance as a trace has it: what is drawn, and which drafts are kept."""

    def __init__(self, trace: Trace) -> None:
        self._trace, self._start, self._index = trace, 0, 0

    def draw(self, *_: object) -> list[int]:
        self._index += 1
        return [self._trace.draft.step(self._start, self._index).token]

    def judge(self, block: Draft, *_: object) -> tuple[Verdict, None]:
        accepted = min(len(block.tokens), self._trace.draft.accepted_runs[self._start])
        kind = ExtraToken.BONUS if accepted == len(block.tokens) else ExtraToken.CORRECTION
        self._start, self._index = self._start + accepted + 1, 0
        assert self._trace.draft.chances is not None
        first = self._start - accepted - 1
        chances = tuple(self._trace.draft.chances.along[first : first + accepted + (kind is ExtraToken.CORRECTION)])
        return Verdict(accepted, self._trace.tokens[self._start - 1], kind, chances), None


@pytest.mark.parametrize(("name", "settings"), SAMPLED, ids=str)
@pytest.mark.representatives("svip", "cost-optimal")
def test_sampled_rounds_are_those_of_a_live_run_that_draws_alike(
    name: str, settings: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The models run; only chance is taken from the trace."""
    target, draft = Slot(EagerPasses(random_model("llama"), 64)), Slot(EagerPasses(noisy_copy("llama"), 64))
    pair = pair_of(target, draft, heads=[HEAD])
    for seed in range(5):
        said = [token for r in live(pair, NONE, PROMPT, LENGTH, PLAIN, seed) for token in r.emitted]
        trace = trace_of(pair, PROMPT, said, LENGTH, DEPTH, PLAIN, seed)
        chance = FromTrace(trace)
        found = [shape(played) for played in rounds(POLICIES[name](**settings), trace, frozenset(), clock)]
        with monkeypatch.context() as patched:
            patched.setattr(host, "picked", chance.draw)
            patched.setattr(one_round, "judge", chance.judge)
            assert found == [
                shape(played) for played in live(pair, Setting.of({"name": name, **settings}), PROMPT, LENGTH, PLAIN)
            ]


def test_so_are_those_of_a_draft_that_writes_few_tokens() -> None:
    draft = Slot(EagerPasses(trimmed("llama", range(1, 64, 3)), 64))
    pair = pair_of(Slot(EagerPasses(random_model("llama"), 64)), draft, eos=frozenset(), heads=[HEAD])
    said = [token for played in live(pair, NONE, PROMPT, LENGTH, Sampling()) for token in played.emitted]
    trace = trace_of(pair, PROMPT, said, LENGTH, DEPTH, Sampling())
    assert {token % 3 for token in trace.draft.along.tokens} == {1}
    assert any(trace.draft.accepted)
    for name, settings in FEW.items():
        found = [shape(played) for played in rounds(POLICIES[name](**settings), trace, pair.eos, clock)]
        setting = Setting.of({"name": name, **settings})
        assert found == [shape(played) for played in live(pair, setting, PROMPT, LENGTH, Sampling())]
