"""Replayed rounds of hierarchies are those of live ones, at every level; when sampling, see `test_replay_law`."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from itertools import cycle
from typing import Any
from unittest.mock import patch

import pytest
import torch

from specctl.decoding import hierarchy
from specctl.decoding import round as one_round
from specctl.decoding.composition import Stage, compose
from specctl.decoding.loop import decode
from specctl.decoding.round import prefill
from specctl.decoding.sampling import Sampling
from specctl.errors import UsageError
from specctl.models.predictors.predictor_checkpoint import first_for
from specctl.models.running.eager import EagerPasses
from specctl.models.running.pair import Pair
from specctl.models.running.slot import Slot
from specctl.policies import POLICIES, Setting, StoppingPolicy, nested
from specctl.records import Round
from specctl.replay.bounds import oracle
from specctl.replay.play import Player, play, replay_levels, replayable
from specctl.replay.recording.collecting import Text, greedy_trace
from specctl.replay.trace_files import TRACES, TracedPrompt, TraceHeader, read_traces
from specctl.replay.traces import Trace
from tests.support.toys import (
    FAMILIES,
    WINDOW,
    noisy_copy,
    random_model,
    random_predictor,
    seeded,
)
from tests.support.traced import pair_of, shape, trace_of

LENGTH, DEPTH = 4 * WINDOW, 12
PROMPT = tuple(torch.randint(1, 64, (2 * WINDOW + 3,), generator=seeded(5)).tolist())
DRAFTING, VERIFYING, TARGET_VERIFYING = 2.0, 4.0, 16.0
Part = tuple[str, dict[str, object], bool]
"""A level's policy, its settings, and whether it pre-verifies once."""
FULL: list[Part] = [("self-verify", {"max_draft": 10}, False), ("self-verify", {"max_draft": 6}, False)]
HIERARCHIES: dict[str, list[Part]] = {
    "pre-verify once": [("constant", {"draft_length": 5}, True), ("constant", {"draft_length": 4}, False)],
    "pre-verify and self-verify once": [("constant", {"draft_length": 12}, True), FULL[1]],
    "full": FULL,
    "blocks of fixed length": [("constant", {"draft_length": 7}, False), ("constant", {"draft_length": 3}, False)],
    "SVIP over SpecDec++": [
        ("svip", {"c": 1.0, "threshold": 1.2, "max_draft": 12}, False),
        ("specdec++", {"threshold": 0.6, "min_draft": 1, "max_draft": 8}, False),
    ],
    "SpecDec++ over SVIP": [
        ("specdec++", {"threshold": 0.7, "min_draft": 1, "max_draft": 12}, False),
        ("svip", {"c": 1.0, "threshold": 1.2, "keep_trigger": False, "max_draft": 8}, False),
    ],
    "SpecDec++ over DISCO": [
        ("specdec++", {"threshold": 0.7, "min_draft": 1, "max_draft": 12}, False),
        ("disco", {"max_draft": 8}, False),
    ],
    "DISCO over SVIP": [
        ("disco", {"max_draft": 12}, False),
        ("svip", {"c": 1.0, "threshold": 1.2, "max_draft": 8}, False),
    ],
    "AdaEDL over the heuristic": [
        ("adaedl", {"threshold": 0.3, "eps": 0.3, "max_draft": 12}, False),
        ("heuristic", {"draft_length": 2, "max_draft": 8}, False),
    ],
    "cost-optimal twice": [("cost-optimal", {"max_draft": 12}, False), ("cost-optimal", {"max_draft": 5}, False)],
    "a middle that drops": [
        ("svip", {"c": 1.0, "threshold": 1.2, "keep_trigger": False, "max_draft": 12}, False),
        ("constant", {"draft_length": 4}, False),
    ],
    "nobody below": [("self-verify", {"max_draft": 10}, False), ("none", {}, False)],
}
FOUR: list[Part] = [
    ("svip", {"c": 1.0, "threshold": 1.2, "max_draft": 12}, False),
    ("self-verify", {"max_draft": 8}, False),
    ("constant", {"draft_length": 3}, False),
]
HEAD = random_predictor(32, depth=1, spread=0.15)


class SharedClock:
    """Time that passes as its readers say: each reading is later than the one before by the next of some seconds."""

    def __init__(self) -> None:
        self.now = 0.0

    def reader(self, *seconds: float) -> "SharedReader":
        return SharedReader(self, seconds)


class SharedReader:
    def __init__(self, clock: SharedClock, seconds: Sequence[float]) -> None:
        self._clock, self._seconds = clock, cycle(seconds)

    def __call__(self) -> float:
        self._clock.now += next(self._seconds)
        return self._clock.now


@contextmanager
def shared_clock() -> Iterator[None]:
    """A policy that learns from times plays alike live and in replay: a block takes as long as its inner rounds."""
    clock = SharedClock()
    inner = clock.reader(0.0, DRAFTING, VERIFYING)

    def inner_round(*args: Any, **settings: Any) -> Round:
        with patch.object(one_round, "working_seconds", inner):
            return one_round.verified_round(*args, **settings)

    with (
        patch.object(one_round, "working_seconds", clock.reader(0.0, 0.0, TARGET_VERIFYING)),
        patch.object(hierarchy, "verified_round", inner_round),
    ):
        yield


@pytest.fixture(autouse=True)
def steady_time() -> Iterator[None]:
    with shared_clock():
        yield


def policies(parts: Sequence[Part]) -> list[StoppingPolicy]:
    return [POLICIES[name](**settings) for name, settings, _ in parts]


def players(parts: Sequence[Part]) -> list[Player]:
    def inner(*_: int) -> tuple[float, float]:
        return DRAFTING, VERIFYING

    def top(*_: int) -> tuple[float, float]:
        return 0.0, TARGET_VERIFYING

    clocks = [top, *[inner] * (len(parts) - 1)]
    return [Player(policy, part[2], of) for policy, part, of in zip(policies(parts), parts, clocks, strict=True)]


def live(pair: Pair, parts: Sequence[Part], prompt: Sequence[int], limit: int, sampling: Sampling, seed: int = 0):
    stages = [
        Stage(runner, policy, once, first_for(policy.signals, named.values()))
        for runner, policy, (*_, once), named in zip(
            pair.drafts, policies(parts), parts, pair.named_predictors, strict=True
        )
    ]
    drafter = compose(stages)
    at_work = next((n for n, (name, *_) in enumerate(parts) if name == "none"), len(parts))
    with torch.inference_mode():
        for runner in (pair.target, *pair.drafts[:at_work]):
            runner.rollback(0)
        prefill(pair.target, drafter, prompt)
        return list(decode(pair.target, drafter, prompt, limit, sampling, pair.eos, seeded(seed)))


def said(pair: Pair, prompt: Sequence[int], limit: int, sampling: Sampling, seed: int = 0) -> list[int]:
    pair.target.rollback(0)
    with torch.inference_mode():
        alone = list(decode(pair.target, None, prompt, limit, sampling, pair.eos, seeded(seed)))
    return [token for played in alone for token in played.emitted]


@cache
def greedy(family: str, levels: int, eos: frozenset[int] = frozenset()) -> tuple[Pair, Trace]:
    drafts = [Slot(EagerPasses(noisy_copy(family, 0.01 * level), 64)) for level in range(1, levels + 1)]
    pair = pair_of(Slot(EagerPasses(random_model(family), 64)), *drafts, eos=eos, heads=[HEAD] * levels)
    return pair, trace_of(pair, PROMPT, said(pair, PROMPT, LENGTH, Sampling()), LENGTH, DEPTH, Sampling())


@pytest.mark.parametrize("name", HIERARCHIES)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.representatives(
    "llama-full",
    "llama-pre-verify once",
    "llama-a middle that drops",
    "llama-SpecDec++ over SVIP",
    "llama-cost-optimal twice",
    "llama-nobody below",
    "llama-DISCO over SVIP",
    slow=("llama", "qwen3-pre-verify once", "gemma2-a middle that drops", "mistral-full", "gpt-neox-DISCO over SVIP"),
)
def test_greedy_rounds_are_those_of_a_live_run(family: str, name: str) -> None:
    pair, trace = greedy(family, 2)
    found = [shape(played) for played in play(players(HIERARCHIES[name]), trace, pair.eos)]
    assert found == [shape(played) for played in live(pair, HIERARCHIES[name], PROMPT, LENGTH, Sampling())]


@pytest.mark.slow
def test_so_are_those_of_four_models() -> None:
    pair, trace = greedy("llama", 3)
    found = [shape(played) for played in play(players(FOUR), trace, pair.eos)]
    assert found == [shape(played) for played in live(pair, FOUR, PROMPT, LENGTH, Sampling())]
    assert any(inner.inner for played in play(players(FOUR), trace, pair.eos) for inner in played.inner)


@pytest.mark.parametrize("family", ["llama", "gpt-neox"])
@pytest.mark.representatives(slow=("gpt-neox",))
def test_so_are_those_of_a_sequence_that_ends(family: str) -> None:
    """With an end of sequence among the target's own tokens, and one that only a draft proposes."""
    _, whole = greedy(family, 2)
    assert whole.draft.along is not None
    assert whole.draft.below is not None
    assert whole.draft.below.along is not None
    ends = {
        whole.tokens[-2],
        whole.draft.along.tokens[whole.draft.accepted.index(False)],
        whole.draft.below.along.tokens[whole.draft.below.accepted.index(False)],
    }
    for token in ends:
        pair, trace = greedy(family, 2, frozenset({token}))
        for parts in HIERARCHIES.values():
            found = [shape(played) for played in play(players(parts), trace, pair.eos)]
            assert found == [shape(played) for played in live(pair, parts, PROMPT, LENGTH, Sampling())]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.representatives("llama", "gemma2")
def test_the_traces_hold_refusals_below_the_path_and_below_branches(family: str) -> None:
    """Or the identity above would not have looked at what comes after them."""
    _, trace = greedy(family, 2)
    assert trace.draft.below is not None
    assert {True, False} <= set(trace.draft.below.accepted)
    assert any(draft.branches for draft in trace.draft.branches_below)


def test_a_draft_that_was_idle_does_not_read_after_another_text() -> None:
    pair, trace = greedy("llama", 2)
    alone: list[Part] = [FULL[0], ("none", {}, False)]
    live(pair, FULL, PROMPT[::-1], LENGTH, Sampling())  # leaves its text in every cache
    live(pair, alone, PROMPT, LENGTH, Sampling())
    assert trace_of(pair, PROMPT, trace.tokens, LENGTH, DEPTH, Sampling()) == trace


def test_levels_are_read_back_from_a_file(tmp_path) -> None:
    _, trace = greedy("llama", 3)
    path = tmp_path / "t.jsonl"
    with path.open("w", encoding="utf-8") as stream:
        TRACES.append(stream, TraceHeader(DEPTH, [], ["entropy"], {}))
        TRACES.append(stream, TracedPrompt("p", {}, [trace]))
    assert read_traces(path).traces == [trace]


def test_a_deeper_block_than_recorded_is_refused() -> None:
    pair, trace = greedy("llama", 2)
    for long in (DEPTH + 2, LENGTH):
        parts: list[Part] = [("constant", {"draft_length": long}, False), ("constant", {"draft_length": 3}, False)]
        with pytest.raises(UsageError, match="not recorded for drafts of"):
            list(play(players(parts), trace, pair.eos))


def test_columns_add_up() -> None:
    pair, trace = greedy("llama", 3)
    (found,) = replay_levels(players(FOUR), [trace], pair.eos)
    assert len(found.top.starts) + sum(found.top.accepted) == len(trace.tokens)
    _, middle, lowest = found.levels
    # All that goes up was drafted below or is the verifying draft's own.
    assert sum(middle.accepted) + len(middle.starts) == sum(found.top.drafted)
    assert sum(lowest.accepted) + len(lowest.starts) == sum(middle.drafted)


def test_nobody_takes_fewer_passes_than_one_who_knows_where_models_disagree() -> None:
    pair, trace = greedy("llama", 2)
    best = oracle(trace, 2)
    assert best.top.drafted == best.top.accepted
    assert sum(best.levels[1].drafted) + len(best.levels[1].starts) == sum(best.top.drafted)
    for parts in HIERARCHIES.values():
        (found,) = replay_levels(players(parts), [trace], pair.eos)
        assert len(best.top.starts) <= len(found.top.starts)


def test_what_a_trace_cannot_replay_is_known() -> None:
    dropping, full = (
        nested([Setting.of({"name": name, **settings}) for name, settings, _ in parts])
        for parts in (HIERARCHIES["a middle that drops"], FULL)
    )
    assert not replayable(dropping, sampled=True)
    assert replayable(dropping, sampled=False)
    assert replayable(full, sampled=True)
    assert replayable(replace(dropping, below=None), sampled=True)


def test_the_bound_on_signals_reads_the_first_draft_alone() -> None:
    target, *drafts = (Slot(EagerPasses(noisy_copy("llama", noise), 64)) for noise in (0.0, 0.3, 0.6))
    text = Text("p", "c", [*PROMPT], [*PROMPT[:LENGTH]], LENGTH)
    assert greedy_trace(pair_of(target, *drafts), text) == greedy_trace(pair_of(target, drafts[0]), text)
