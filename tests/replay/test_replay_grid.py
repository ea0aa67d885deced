"""Replayed rounds of a draft head, whose tokens depend on where a round began, are those of a live run.

When sampling, see `test_replay_law`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from test_replay import CASES, DRAFTING, VERIFYING, clock

from specctl.analysis.readings import read_traces as read_verdicts
from specctl.decoding import round as one_round
from specctl.decoding.draft_tokens import CHUNK
from specctl.decoding.sampling import Sampling
from specctl.errors import UsageError
from specctl.models.draft_heads.block import MarkovKind
from specctl.models.draft_heads.block_runner import BlockPasses
from specctl.models.draft_heads.chain_runner import ChainPasses
from specctl.models.draft_heads.head_layers import LayerShape
from specctl.models.passes.fixed_buffers import PIECE
from specctl.models.running.eager import EagerPasses
from specctl.models.running.pair import Pair
from specctl.models.running.slot import Slot
from specctl.policies import NONE, POLICIES, Setting
from specctl.records import StopReason
from specctl.replay.bounds import best_stopping, oracle, play_best
from specctl.replay.costs import CostTable
from specctl.replay.play import replay, rounds
from specctl.replay.recording import head_recording
from specctl.replay.trace_files import TRACES, TracedPrompt, TraceHeader, read_traces
from specctl.replay.traces import Recorded, TokenChances, Trace, recorded_by_place
from tests.support.toy_heads import random_block, random_eagle3, random_glide
from tests.support.toys import (
    StateTable,
    TableRunner,
    Ticks,
    ToyDraftHead,
    random_model,
    random_predictor,
    related_table,
    table,
    toy_head,
)
from tests.support.traced import live, pair_of, shape, trace_of

pytestmark = pytest.mark.crossed

VOCABULARY, LENGTH, DEPTH = 12, 48, 12
PROMPT = (3, 1, 4, 1, 5)
NO_EOS: frozenset[int] = frozenset()
GREEDY, PLAIN = Sampling(), Sampling(temperature=1.0)
SIGNALS = ("entropy", "top_prob", "token_prob", "accept_prob")


@pytest.fixture(autouse=True)
def steady_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_round, "working_seconds", Ticks(DRAFTING, VERIFYING, 0.0))


def toy_pair(eos: frozenset[int], longest: int | None) -> Pair:
    target = table(8, spread=2.0, vocabulary=VOCABULARY)
    draft = ToyDraftHead(related_table(target, 9, noise=0.5), 10, noise=0.6, longest=longest)
    return pair_of(StateTable(target), draft, eos=eos, heads=[toy_head(target, 5)])


def chain_pair(eos: frozenset[int], _: int | None) -> Pair:
    """A real head: its rounds are recorded side by side."""
    head = random_eagle3(layers=(0, 1), states=6, vocabulary=6, tokens=[0, 2, 3, 5], seed=5)
    acceptance = random_predictor(8, seed=5, spread=0.5)
    target = table(21, spread=1.0, vocabulary=6)
    return pair_of(TableRunner(target), Slot(ChainPasses(head, 6)), eos=eos, heads=[acceptance])


def model_pair(eos: frozenset[int], _: int | None) -> Pair:
    """A real head on a real target, which it hardly ever guesses right."""
    shape_of_layer = LayerShape(hidden_size=16, intermediate_size=24, heads=2, kv_heads=1, head_dim=8)
    head = random_eagle3(layers=(0, 1, -1), states=32, vocabulary=64, shape=shape_of_layer, spread=0.5)
    target = Slot(EagerPasses(random_model("llama"), 64))
    return pair_of(target, Slot(ChainPasses(head, 64)), eos=eos, heads=[random_predictor(16, spread=0.2)])


def crossing_pair(eos: frozenset[int], _: int | None) -> Pair:
    """A head that attends to what the verifier cached, and reads the first token of a text too."""
    head = random_glide(vocabulary=6, depth=2, seed=5)
    heads = [random_predictor(8, seed=5, spread=0.5)]
    return pair_of(TableRunner(table(21, spread=1.0, vocabulary=6)), Slot(ChainPasses(head, 6)), eos=eos, heads=heads)


def block_pair(eos: frozenset[int], _: int | None, markov: MarkovKind | None = None) -> Pair:
    """A head that drafts a block in one pass."""
    shape_of_layer = LayerShape(hidden_size=6, intermediate_size=8, heads=1, kv_heads=1, head_dim=4)
    head = random_block(block_size=5, vocabulary=6, tokens=[0, 2, 3, 5], markov=markov, shape=shape_of_layer, seed=2)
    runner = Slot(BlockPasses(head, 6, capacity=16))
    return pair_of(
        TableRunner(table(21, spread=1.0, vocabulary=6)), runner, eos=eos, heads=[random_predictor(6, spread=0.5)]
    )


def foreseeing_pair(eos: frozenset[int], longest: int | None) -> Pair:
    """And that predicts which tokens will be accepted before they are drawn."""
    return block_pair(eos, longest, "gated")


def remembering_pair(eos: frozenset[int], longest: int | None) -> Pair:
    """And whose rows remember all tokens of the block."""
    return block_pair(eos, longest, "rnn")


PAIRS: dict[str, Callable[[frozenset[int], int | None], Pair]] = {
    "toy": toy_pair,
    "chain": chain_pair,
    "crossing": crossing_pair,
    "model": model_pair,
    "block": block_pair,
    "foreseeing": foreseeing_pair,
    "remembering": remembering_pair,
}
SIDE_BY_SIDE = ("chain", "crossing", "block", "foreseeing", "remembering")
FORESEEING = ("foreseeing", "remembering")
OFTEN_RIGHT = ("toy", "chain")


def said(pair: Pair, prompt: Sequence[int] = PROMPT, sampling: Sampling = GREEDY, seed: int = 0) -> list[int]:
    return [token for played in live(pair, NONE, prompt, LENGTH, sampling, seed) for token in played.emitted]


@cache
def greedy(
    kind: str, eos: frozenset[int] = NO_EOS, longest: int | None = None, prompt: tuple[int, ...] = PROMPT
) -> tuple[Pair, Trace]:
    pair = PAIRS[kind](eos, longest)
    pair.target.watch(pair.drafts[0].layers)  # type: ignore[attr-defined]
    return pair, trace_of(pair, prompt, said(pair, prompt), LENGTH, DEPTH, Sampling())


def grid_of(trace: Trace) -> Recorded:
    assert trace.draft.along is None
    return trace.draft


def assert_rounds_are_live(
    pair: Pair,
    trace: Trace,
    prompt: Sequence[int] = PROMPT,
    cases: Sequence[tuple[str, dict[str, object]]] = CASES,
) -> None:
    for name, settings in cases:
        found = [shape(played) for played in rounds(POLICIES[name](**settings), trace, pair.eos, clock)]
        setting = Setting.of({"name": name, **settings})
        assert found == [shape(played) for played in live(pair, setting, prompt, LENGTH, Sampling())], name


@pytest.mark.parametrize(("name", "settings"), CASES, ids=str)
@pytest.mark.parametrize("kind", PAIRS)
@pytest.mark.representatives(
    "chain-constant", "chain-cost-optimal", "block-svip", "toy", slow=("model-constant", "crossing-svip")
)
def test_greedy_rounds_are_those_of_a_live_run(kind: str, name: str, settings: dict[str, object]) -> None:
    pair, trace = greedy(kind)
    found = [shape(played) for played in rounds(POLICIES[name](**settings), trace, pair.eos, clock)]
    setting = Setting.of({"name": name, **settings})
    assert found == [shape(played) for played in live(pair, setting, PROMPT, LENGTH, Sampling())]


@pytest.mark.parametrize("kind", PAIRS)
@pytest.mark.representatives("block", slow=("model", "toy"))
def test_so_are_those_after_a_prompt_of_one_token(kind: str) -> None:
    """One setting of each policy: what differs is where the head's own cache begins."""
    pair, trace = greedy(kind, prompt=PROMPT[:1])
    assert_rounds_are_live(pair, trace, PROMPT[:1], list(dict(CASES).items()))


@pytest.mark.parametrize("threshold", [0.2, 0.5, 0.8])
def test_so_are_those_of_a_head_that_foresees_what_is_accepted(threshold: float) -> None:
    pair, trace = greedy("foreseeing")
    played = list(rounds(POLICIES["confidence"](threshold=threshold), trace, pair.eos, clock))
    setting = Setting.of({"name": "confidence", "threshold": threshold})
    assert list(map(shape, played)) == list(map(shape, live(pair, setting, PROMPT, LENGTH, Sampling())))
    assert any(one.stop is StopReason.POLICY for one in played)


def test_so_are_those_of_a_head_that_drafts_a_few_tokens_at_most() -> None:
    pair, trace = greedy("toy", longest=3)
    assert max(map(len, grid_of(trace).branches)) == 3
    assert_rounds_are_live(pair, trace)


@pytest.mark.parametrize("kind", OFTEN_RIGHT)
def test_so_are_those_of_a_sequence_that_ends(kind: str) -> None:
    """With an end of sequence among the target's own tokens, and one that only the draft proposes."""
    _, whole = greedy(kind)
    drafted = grid_of(whole)
    rejected = next(
        row.tokens[run]
        for row, run in zip(drafted.branches, drafted.accepted_runs, strict=False)
        if 0 < run < len(row.tokens)
    )
    for token in {whole.tokens[-2], rejected}:
        pair, trace = greedy(kind, frozenset({token}))
        assert_rounds_are_live(pair, trace)


def judged_tokens(draft: Recorded) -> Iterator[tuple[int, int, int, bool]]:
    """Start, position, token and verdict of each judged token."""
    for start, judged in enumerate(draft.judged()):
        for number, (token, fine) in enumerate(zip(judged.steps.tokens, judged.accepted, strict=True)):
            yield start, start + number, token, fine


@pytest.mark.parametrize("kind", OFTEN_RIGHT)
def test_what_is_drafted_depends_on_where_the_round_began(kind: str) -> None:
    """Or a trace without starts would have done. It also has long runs, and long rows behind rejected tokens."""
    _, trace = greedy(kind)
    drafted = grid_of(trace)
    by_position: dict[int, set[bool]] = {}
    for _, position, _, fine in judged_tokens(drafted):
        by_position.setdefault(position, set()).add(fine)
    assert {True, False} in by_position.values()
    assert max(drafted.accepted_runs) > 2
    assert any(not run and len(row) == DEPTH for row, run in zip(drafted.branches, drafted.accepted_runs, strict=False))


def test_a_trace_that_forgets_where_rounds_began_is_caught() -> None:
    """Or the identity above might see nothing."""
    pair, trace = greedy("toy")
    drafted = grid_of(trace)
    along = drafted.branches[0][:1]
    for row in drafted.branches[1:]:
        along += row[:1]
    accepted = [run > 0 for run in drafted.accepted_runs[: len(along)]]
    branches = {place: drafted.branches[place][1:] for place, fine in enumerate(accepted) if not fine}
    forgetful = replace(trace, draft=recorded_by_place(accepted, along, branches))
    settings = {"draft_length": 4}
    found = [shape(played) for played in rounds(POLICIES["constant"](**settings), forgetful, pair.eos, clock)]
    assert found != [
        shape(played) for played in live(pair, Setting.of({"name": "constant", **settings}), PROMPT, LENGTH, Sampling())
    ]


def recorded_one_by_one(monkeypatch: pytest.MonkeyPatch, record: Callable[[], Trace]) -> Recorded:
    with monkeypatch.context() as patched:
        patched.setattr(head_recording, "ManyAtOnce", head_recording.OneByOne)
        return grid_of(record())


@pytest.mark.parametrize("length", [1, 5, PIECE + 40])
@pytest.mark.parametrize("kind", SIDE_BY_SIDE)
@pytest.mark.representatives("remembering-1", "block-552", slow=("crossing-5", "chain-552"))
def test_side_by_side_a_head_drafts_as_from_one_start_after_another(
    kind: str, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text is longer than the starts of one pass, and the prompt longer than one piece.

    Rounds that propose an end of sequence leave those beside them early.
    """
    prompt = tuple(place * place % 5 % 4 for place in range(length))
    pair = PAIRS[kind](NO_EOS, None)
    with torch.inference_mode():
        pair.target.watch(pair.drafts[0].layers)  # type: ignore[attr-defined]
        text = said(pair, prompt) + said(pair, prompt)

    ending = replace(pair, eos=frozenset({5}))

    def record() -> Trace:
        return trace_of(ending, prompt, text, len(text), DEPTH, Sampling())

    found = grid_of(record())
    assert len(found.branches) > CHUNK
    expected = recorded_one_by_one(monkeypatch, record)
    assert (found.accepted_runs, found.longest) == (expected.accepted_runs, expected.longest)
    for one, other in zip(found.branches, expected.branches, strict=True):
        assert one.tokens == other.tokens
        for name in (*SIGNALS, "next_accept_prob"):
            assert getattr(one, name) == pytest.approx(getattr(other, name), abs=1e-3)
    assert all((row.next_accept_prob is not None) == (kind in FORESEEING) for row in found.branches if row.tokens)


@pytest.mark.parametrize("kind", SIDE_BY_SIDE)
@pytest.mark.representatives("remembering", "block")
def test_when_sampling_too(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their verdicts come from the same coins; what is drawn behind a rejected token is not compared."""
    pair = PAIRS[kind](NO_EOS, None)
    pair.target.watch(pair.drafts[0].layers)  # type: ignore[attr-defined]
    text = said(pair, sampling=PLAIN)

    def record() -> Trace:
        return trace_of(pair, PROMPT, text, LENGTH, DEPTH, PLAIN, seed=1)

    found, expected = grid_of(record()), recorded_one_by_one(monkeypatch, record)
    assert found.accepted_runs == expected.accepted_runs
    assert isinstance(found.chances, TokenChances)
    assert isinstance(expected.chances, TokenChances)
    assert {len(chances) for chances in found.chances.branches} > {1, 2}
    both = zip(found.chances.branches, expected.chances.branches, strict=True)
    for run, (one, other) in zip(found.accepted_runs[:-1], both, strict=True):
        assert one[:run] == pytest.approx(other[:run], abs=1e-4)


def test_distributions_may_be_forgotten_before_they_are_read() -> None:
    """As where rounds that are left out reach beyond what was read."""
    pair = toy_pair(NO_EOS, None)
    text = [token % VOCABULARY for token in range(3 * CHUNK)]
    found, expected = (head_recording.ReadText(pair.target, (0,), PROMPT, text, PLAIN) for _ in range(2))
    with torch.inference_mode():
        whole = expected.probs([*range(len(text))])
        for position in (0, 3, CHUNK - 1, CHUNK + 1, 2 * CHUNK):
            found.forget(position)
            assert torch.equal(found.probs([position]), whole[position : position + 1])
            found.forget(position + 1)


def test_grids_are_read_back_from_a_file(tmp_path: Path) -> None:
    pair, trace = greedy("toy", longest=3)
    text = said(pair, sampling=PLAIN)
    sampled = trace_of(pair, PROMPT, text, LENGTH, DEPTH, PLAIN)
    _, foreseeing = greedy("foreseeing")
    path = tmp_path / "t.jsonl"
    with path.open("w", encoding="utf-8") as stream:
        TRACES.append(stream, TraceHeader(DEPTH, [], ["entropy"], {}))
        TRACES.append(stream, TracedPrompt("p", {}, [trace, sampled, foreseeing]))
    assert read_traces(path).traces == [trace, sampled, foreseeing]


@pytest.mark.parametrize("kind", ["toy", "foreseeing"])
def test_such_a_file_is_analysed(kind: str, tmp_path: Path) -> None:
    _, trace = greedy(kind)
    path = tmp_path / "t.jsonl"
    with path.open("w", encoding="utf-8") as stream:
        TRACES.append(stream, TraceHeader(DEPTH, [], list(SIGNALS), {}))
        TRACES.append(stream, TracedPrompt("p", {}, [trace]))
    judged = [found for found in trace.draft.judged() if found.accepted]
    found = read_verdicts([path])
    assert found.accepted.tolist() == [outcome for one in judged for outcome in one.outcomes]
    assert found.run.tolist() == [sum(one.accepted) - place for one in judged for place in range(len(one.accepted))]


def test_a_longer_draft_than_recorded_is_refused() -> None:
    pair, trace = greedy("toy")
    with pytest.raises(UsageError, match="not recorded for drafts of"):
        list(rounds(POLICIES["constant"](draft_length=DEPTH + 2), trace, pair.eos))


def test_another_head_has_its_own_word() -> None:
    pair, trace = greedy("toy")
    named = {**pair.named_predictors[0], "other": toy_head(table(8, vocabulary=VOCABULARY), 77)}
    both = trace_of(replace(pair, named_predictors=(named,)), PROMPT, trace.tokens, LENGTH, DEPTH, Sampling())
    other = trace_of(
        replace(pair, named_predictors=({"other": named["other"], "disco": named["disco"]},)),
        PROMPT,
        trace.tokens,
        LENGTH,
        DEPTH,
        Sampling(),
    )
    start = next(start for start, run in enumerate(grid_of(trace).accepted_runs) if run)
    for index in (1, 2, 3):
        assert both.draft.step(start, index) == trace.draft.step(start, index)
        assert both.of_predictor("other").draft.step(start, index) == other.draft.step(start, index)
    assert both.of_predictor("other").draft.step(start, 2) != trace.draft.step(start, 2)
    assert trace.of_predictor("its own").draft is trace.draft


def fewest_passes(trace: Trace) -> int:
    """Of all rounds without a rejected token, by search from the front."""
    reached, passes = {0}, 0
    while not any(start >= len(trace.tokens) for start in reached):
        passes += 1
        reached = {
            start + length + 1
            for start in reached
            for length in range(min(trace.draft.accepted_runs[start], max(0, trace.limit - start - 1)) + 1)
        }
    return passes


@pytest.mark.exhaustive
def test_the_oracle_takes_the_fewest_passes_that_there_can_be() -> None:
    pair, _ = greedy("toy")
    saved = 0
    for seed in range(20):
        text = said(pair, sampling=PLAIN, seed=seed)
        trace = trace_of(pair, PROMPT, text, LENGTH, DEPTH, PLAIN, seed)
        best = oracle(trace)
        assert len(best.top.starts) == fewest_passes(trace)
        assert best.top.drafted == best.top.accepted
        assert all(
            one <= trace.draft.accepted_runs[start]
            for start, one in zip(best.top.starts, best.top.drafted, strict=True)
        )
        assert sum(best.top.drafted) + len(best.top.starts) == LENGTH
        start, greedily = 0, 0
        while start < LENGTH:
            start, greedily = start + min(trace.draft.accepted_runs[start], LENGTH - start - 1) + 1, greedily + 1
        saved += greedily - len(best.top.starts)
    assert saved > 0, "to draft as long as one can is no worse in any of these traces"


def test_nobody_takes_fewer_passes_than_one_who_knows_where_the_target_disagrees() -> None:
    pair, trace = greedy("toy")
    best = len(oracle(trace).top.starts)
    assert best <= min(
        len(replay(POLICIES[name](**settings), [trace], pair.eos)[0].top.starts) for name, settings in CASES
    )


@pytest.mark.exhaustive
def test_the_signal_bound_is_not_slower_than_fixed_lengths() -> None:
    """And it knows that a token's chances fall with its number in the round."""
    pair, _ = greedy("toy")
    traces = [
        trace_of(pair, PROMPT, said(pair, sampling=PLAIN, seed=seed), LENGTH, DEPTH, PLAIN, seed) for seed in range(20)
    ]
    costs = CostTable.flat(1.0, 6.0, DEPTH)
    bound = costs.milliseconds(play_best(traces, costs, NO_EOS, longest=DEPTH), {"entropy"})
    fixed = [
        costs.milliseconds(replay(POLICIES["constant"](draft_length=length), traces, NO_EOS), {"entropy"})
        for length in range(1, 6)
    ]
    assert bound <= min(fixed)
    assert best_stopping(traces, costs, longest=DEPTH).weights[3] < 0


def test_a_block_that_costs_the_same_at_any_length_is_drafted_whole_or_not_at_all() -> None:
    pair, _ = greedy("toy", longest=4)
    traces = [
        trace_of(pair, PROMPT, said(pair, sampling=PLAIN, seed=seed), LENGTH, DEPTH, PLAIN, seed) for seed in range(5)
    ]
    lengths = np.arange(5.0)

    def costs(block: float) -> CostTable:
        draft = np.where(lengths > 0, block, 0.0)[None]
        return CostTable(np.zeros(1), lengths, draft, np.full((1, 5), 6.0), {}, 0.0)

    cheap = replay(best_stopping(traces, costs(1.0)), traces, NO_EOS)
    assert {drafted for one in cheap for drafted in one.top.drafted[:-4]} == {4}
    assert best_stopping(traces, costs(40.0)).draft_limit() == 0


@pytest.mark.parametrize("middles", [1, 2])
def test_a_draft_head_below_another_draft_is_refused(middles: int) -> None:
    pair, _ = greedy("toy")
    drafts = *[TableRunner(table(1, vocabulary=VOCABULARY))] * middles, pair.drafts[0]
    below = replace(pair, drafts=drafts, named_predictors=({},) * len(drafts))
    with pytest.raises(UsageError, match="what that draft had read when the round began"):
        trace_of(below, PROMPT, [1, 2], LENGTH, DEPTH, GREEDY)
