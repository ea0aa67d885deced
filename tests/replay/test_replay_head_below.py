"""Replayed rounds of a draft head below a middle draft are those of a live run, at both levels, for every policy.

When sampling, see `test_replay_law`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from test_replay_hierarchy import HIERARCHIES, Part, live, players, said, shared_clock
from toy_heads import random_block, random_eagle3, random_glide
from toys import (
    STOPPING,
    WITHOUT_FORESIGHT,
    Script,
    StateTable,
    TableRunner,
    ToyDraftHead,
    random_head,
    related_table,
    table,
    toy_head,
)
from traced import pair_of, shape, trace_of

from specctl.decoding.sampling import Sampling
from specctl.errors import UsageError
from specctl.models.draft_heads.block_runner import BlockRunner
from specctl.models.draft_heads.layers import LayerShape
from specctl.models.draft_heads.markov import MarkovKind
from specctl.models.draft_heads.runner import HeadRunner
from specctl.models.running.pair import Pair
from specctl.policies import POLICIES
from specctl.records import Round
from specctl.replay import starts
from specctl.replay.grid import DraftGrid
from specctl.replay.oracle import oracle
from specctl.replay.play import play
from specctl.replay.trace_files import TRACES, TracedPrompt, TraceHeader, read_traces
from specctl.replay.traces import DraftAlong, Trace

LENGTH, DEPTH = 40, 12
PROMPT = (3, 1, 4, 1, 5)
GREEDY, PLAIN = Sampling(), Sampling(temperature=1.0)
NO_EOS: frozenset[int] = frozenset()
DFLASH = LayerShape(hidden_size=6, intermediate_size=8, heads=1, kv_heads=1, head_dim=4)


def toy_pair(eos: frozenset[int]) -> Pair:
    target = table(8, spread=2.0, vocabulary=12)
    middle = related_table(target, 9, noise=0.8)
    draft = ToyDraftHead(related_table(middle, 5, noise=0.5), 10, noise=0.6)
    return pair_of(TableRunner(target), StateTable(middle), draft, eos=eos, heads=[toy_head(middle, 5)] * 2)


def chain_pair(eos: frozenset[int]) -> Pair:
    """A real head: its rounds are recorded side by side."""
    target = table(21, spread=1.0, vocabulary=6)
    middle = related_table(target, 3, noise=0.15)
    head = random_eagle3(layers=(0, 1), states=6, vocabulary=6, tokens=[0, 2, 3, 5], seed=5)
    heads = [toy_head(middle, 5), random_head(8, seed=5, spread=0.5)]
    return pair_of(TableRunner(target), TableRunner(middle), HeadRunner(head, 6), eos=eos, heads=heads)


def crossing_pair(eos: frozenset[int]) -> Pair:
    """A head that attends to what the middle model cached."""
    target = table(21, spread=1.0, vocabulary=6)
    middle = related_table(target, 3, noise=0.15)
    head = random_glide(vocabulary=6, depth=2, seed=5)
    heads = [toy_head(middle, 5), random_head(8, seed=5, spread=0.5)]
    return pair_of(TableRunner(target), TableRunner(middle), HeadRunner(head, 6), eos=eos, heads=heads)


def block_pair(eos: frozenset[int], markov: MarkovKind | None = None) -> Pair:
    target = table(21, spread=1.0, vocabulary=6)
    middle = related_table(target, 3, noise=0.15)
    head = random_block(block_size=5, vocabulary=6, tokens=[0, 2, 3, 5], markov=markov, shape=DFLASH, seed=2)
    heads = [toy_head(middle, 5), random_head(6, spread=0.5)]
    runner = BlockRunner(head, 6, capacity=16)
    return pair_of(TableRunner(target), TableRunner(middle), runner, eos=eos, heads=heads)


def foreseeing_pair(eos: frozenset[int]) -> Pair:
    return block_pair(eos, "gated")


PAIRS: dict[str, Callable[[frozenset[int]], Pair]] = {
    "toy": toy_pair,
    "chain": chain_pair,
    "crossing": crossing_pair,
    "block": block_pair,
    "foreseeing": foreseeing_pair,
}
LIMITS: dict[str, dict[str, object]] = {
    name: {"draft_length": 4}
    if name == "constant"
    else {"draft_length": 2, "max_draft": 8}
    if name == "heuristic"
    else {"max_draft": 8}
    for name in WITHOUT_FORESIGHT
    if name != "none"
}
SHORT: list[Part] = [("constant", {"draft_length": 3}, False), ("constant", {"draft_length": 2}, False)]
CASES = {
    **HIERARCHIES,
    **{f"{name} at both": [(name, {**LIMITS[name], **STOPPING.get(name, {})}, False)] * 2 for name in LIMITS},
    "short blocks": SHORT,
}


@pytest.fixture(autouse=True)
def steady_time() -> Iterator[None]:
    with shared_clock():
        yield


@cache
def greedy(kind: str, eos: frozenset[int] = NO_EOS, prompt: tuple[int, ...] = PROMPT) -> tuple[Pair, Trace]:
    pair = PAIRS[kind](eos)
    pair.drafts[0].watch(pair.drafts[1].layers)  # type: ignore[attr-defined]
    return pair, trace_of(pair, prompt, said(pair, prompt, LENGTH, GREEDY), LENGTH, DEPTH, GREEDY)


def assert_rounds_are_live(pair: Pair, trace: Trace, parts: list[Part], prompt: Sequence[int] = PROMPT) -> list[Round]:
    found = list(play(players(parts), trace, pair.eos))
    assert list(map(shape, found)) == [shape(played) for played in live(pair, parts, prompt, LENGTH, GREEDY)]
    return found


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("kind", PAIRS)
def test_greedy_rounds_are_those_of_a_live_run(kind: str, name: str) -> None:
    assert_rounds_are_live(*greedy(kind), CASES[name])


@pytest.mark.parametrize("kind", PAIRS)
def test_so_are_those_after_a_prompt_of_one_token(kind: str) -> None:
    pair, trace = greedy(kind, prompt=PROMPT[:1])
    for name in ("full", "a middle that drops", "short blocks"):
        assert_rounds_are_live(pair, trace, CASES[name], PROMPT[:1])


@pytest.mark.parametrize("kind", ["toy", "chain"])
def test_so_are_those_of_a_sequence_that_ends(kind: str) -> None:
    """With an end of sequence among the target's own tokens, and one that only a draft proposes."""
    _, whole = greedy(kind)
    drafted, below = whole.draft, below_of(whole)
    assert isinstance(drafted, DraftAlong)
    rejected = next(row.tokens[run] for row, run in zip(below.rows, below.runs, strict=True) if run < len(row))
    for token in {whole.tokens[-2], drafted.along.tokens[drafted.accepted.index(False)], rejected}:
        pair, trace = greedy(kind, frozenset({token}))
        for parts in HIERARCHIES.values():
            assert_rounds_are_live(pair, trace, parts)


@pytest.mark.parametrize("threshold", [0.2, 0.5])
def test_so_are_those_of_a_head_that_foresees_what_is_accepted(threshold: float) -> None:
    parts: list[Part] = [("constant", {"draft_length": 7}, False), ("confidence", {"threshold": threshold}, False)]
    played = assert_rounds_are_live(*greedy("foreseeing"), parts)
    assert any(inner.stop == "policy" for one in played for inner in one.inner)


def below_of(trace: Trace) -> DraftGrid:
    assert isinstance(trace.draft, DraftAlong)
    assert isinstance(trace.draft.below, DraftGrid)
    return trace.draft.below


@pytest.mark.parametrize("kind", PAIRS)
def test_what_the_head_drafts_where_a_place_lacks_is_told_apart(kind: str) -> None:
    """Or the identity above might see nothing: rounds begin late, and then draft otherwise."""
    pair, trace = greedy(kind)
    below = below_of(trace)
    forgetful = replace(trace, draft=replace(trace.draft, below=replace(below, late=replace(below, late=None))))
    right, wrong = (
        [inner.steps for one in play(players(SHORT), some, pair.eos) for inner in one.inner]
        for some in (trace, forgetful)
    )
    assert right != wrong


@pytest.mark.parametrize("kind", PAIRS)
def test_so_are_those_after_blocks_without_tokens(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The middle model reads what it lacks before the head drafts, if that is more than a place."""
    monkeypatch.setitem(POLICIES, "script", lambda lengths: Script(*lengths))
    parts: list[Part] = [("script", {"lengths": (3, 0, 2, 0, 0)}, False), ("constant", {"draft_length": 3}, False)]
    played = assert_rounds_are_live(*greedy(kind), parts)
    assert [one.drafted for one in played[:5]] == [3, 0, 2, 0, 0]


def test_the_traces_hold_refusals_on_branches() -> None:
    """And accepted tokens there, and rows that go on from the text into a branch."""
    _, trace = greedy("toy")
    assert isinstance(trace.draft, DraftAlong)
    on_branches = [run for branch in trace.draft.branches_below.values() for run in branch.accepted_runs[:-1]]
    assert 0 in on_branches
    assert max(on_branches) > 1
    rejected = [place for place, fine in enumerate(trace.draft.accepted) if not fine]
    runs = below_of(trace).runs
    assert any(
        start + runs[start] > next(place for place in rejected if place >= start) for start in range(rejected[-1])
    )


@pytest.mark.parametrize("sampling", [GREEDY, PLAIN], ids=["greedy", "T=1"])
def test_side_by_side_a_head_drafts_as_from_one_start_after_another(
    sampling: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Late or not. What is drawn behind a rejected token is not compared."""
    pair, _ = greedy("chain")
    text = said(pair, PROMPT, LENGTH, sampling, 3)

    def record() -> tuple[DraftGrid, ...]:
        trace = trace_of(pair, PROMPT, text, LENGTH, DEPTH, sampling)
        assert isinstance(trace.draft, DraftAlong)
        return below_of(trace), below_of(trace).begun_late, *trace.draft.branches_below.values()

    found = record()
    monkeypatch.setattr(starts, "ManyAtOnce", starts.OneByOne)
    for one, other in zip(found, record(), strict=True):
        assert one.runs == other.runs
        for some, same, run in zip(one.rows, other.rows, one.runs, strict=True):
            known = len(some) if sampling.greedy else run
            assert some.tokens[:known] == same.tokens[:known]
            for name in ("entropy", "top_prob", "token_prob", "accept_prob"):
                assert getattr(some, name)[:known] == pytest.approx(getattr(same, name)[:known], abs=1e-3)


def test_they_are_read_back_from_a_file(tmp_path: Path) -> None:
    traces = [greedy(kind)[1] for kind in PAIRS]
    path = tmp_path / "t.jsonl"
    with path.open("w", encoding="utf-8") as stream:
        TRACES.append(stream, TraceHeader(DEPTH, [], ["entropy"], {}))
        TRACES.append(stream, TracedPrompt("p", {}, traces))
    assert read_traces(path).traces == traces


def test_nobody_takes_fewer_passes_than_one_who_knows_where_models_disagree() -> None:
    pair, trace = greedy("toy")
    best = oracle(trace, 2)
    (middle,) = best.inner
    assert best.drafted == best.accepted
    assert middle.drafted == middle.accepted
    assert sum(middle.drafted) + len(middle.starts) == sum(best.drafted)
    for parts in CASES.values():
        assert len(best.starts) <= len(list(play(players(parts), trace, pair.eos)))


def test_a_deeper_block_than_recorded_is_refused() -> None:
    pair, trace = greedy("toy")
    parts: list[Part] = [("constant", {"draft_length": DEPTH + 2}, False), ("constant", {"draft_length": 3}, False)]
    with pytest.raises(UsageError, match="not recorded for drafts of"):
        list(play(players(parts), trace, pair.eos))


def test_a_draft_head_below_two_drafts_is_refused() -> None:
    pair, _ = greedy("toy")
    four = replace(pair, drafts=(TableRunner(table(1)), *pair.drafts), named_heads=({}, {}, {}))
    with pytest.raises(UsageError, match="more than three models with a draft head"):
        trace_of(four, PROMPT, [1, 2], LENGTH, DEPTH, GREEDY)
