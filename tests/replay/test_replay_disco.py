"""What a DISCO head predicts depends on where a round began: replay computes it from what the trace holds."""

import json
from collections.abc import Hashable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from test_replay_hierarchy import HIERARCHIES, Part, greedy, live, players, policies
from test_replay_law import ALONE, EXACT, PLAIN, PROMPT, first_two, traces

from specctl.analysis.readings import read_traces as read_verdicts
from specctl.analysis.readings import verdicts
from specctl.models.predictors.disco_predictor import DiscoPredictor
from specctl.models.predictors.predictor_checkpoint import disco_predictors
from specctl.replay.play import Player, play
from specctl.replay.trace_files import TRACES, TracedPrompt, TraceHeader, read_traces
from specctl.replay.traces import Trace
from tests.support.enumeration import largest_difference, law_of, walk
from tests.support.toys import toy_disco

PARTS: Sequence[Part] = [("disco", {"threshold": 0.65}, False)]


def forgetful(head: DiscoPredictor) -> DiscoPredictor:
    """The head, but for it every token is the first of its round."""
    biases = zip(head.hidden_bias, head.hidden_weight, strict=True)
    return DiscoPredictor(
        tuple((*row[:-1], 0.0) for row in head.hidden_weight),
        tuple(bias + row[-1] for bias, row in biases),
        head.output_weight,
        head.output_bias,
    )


def test_a_replay_that_forgets_where_the_round_began_is_caught() -> None:
    toy = ALONE[1]
    pair = toy.pair()
    expected = law_of(walk(lambda: first_two(live(pair, PARTS, PROMPT, toy.limit, PLAIN))))

    def difference(head: DiscoPredictor) -> float:
        def replayed(trace: Trace) -> Hashable:
            return first_two(list(play([Player(policies(PARTS)[0])], trace.of_disco([head]), pair.eos)))

        return largest_difference(law_of((replayed(trace), p) for trace, p in traces(toy)), expected)

    (head,) = disco_predictors(pair.named_predictors[0]).values()
    assert difference(head) < EXACT
    assert difference(forgetful(head)) > 1e3 * EXACT


def test_a_trace_without_a_head_says_nothing_of_it() -> None:
    _, trace = greedy("llama", 2)
    bare = replace(trace, draft=replace(trace.draft, disco=None))
    assert trace.draft.step(0, 1).own_accept_prob is not None
    assert bare.draft.step(0, 1).own_accept_prob is None
    assert bare.of_disco([None, None]) is bare
    with pytest.raises(ValueError, match="did not compute"):
        list(play([Player(policies(PARTS)[0])], bare, frozenset()))


def test_a_file_keeps_the_heads_of_every_draft(tmp_path: Path) -> None:
    pair, trace = greedy("llama", 2)
    heads = [disco_predictors(named) for named in pair.named_predictors]
    path = tmp_path / "trace.jsonl"
    with path.open("w", encoding="utf-8") as stream:
        TRACES.append(stream, TraceHeader(40, [], ["own_accept_prob"], {}, disco=heads))
        TRACES.append(stream, TracedPrompt("p", {}, [trace]))
    header, line = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    assert [list(level) for level in header["disco"]] == [["disco"], ["disco"]]
    assert "disco" not in line["turns"][0]["draft"]
    whole = read_traces(path)
    (found,) = whole.of(["p"])
    assert found == trace
    for name in ("SpecDec++ over DISCO", "DISCO over SVIP"):
        parts = HIERARCHIES[name]
        assert list(play(players(parts), found, pair.eos)) == list(play(players(parts), trace, pair.eos))
    assert whole.of(["p"])[0].draft is found.draft, "its steps are computed once"
    (judged,) = trace.draft.judged()
    assert list(read_verdicts([path]).signals["own_accept_prob"]) == pytest.approx(judged.own_predictions)
    assert "own_accept_prob" not in (verdicts([replace(trace, draft=replace(trace.draft, disco=None))]) or 0).signals


def test_a_header_names_the_head_of_each_draft() -> None:
    first, second, below = (toy_disco(seed) for seed in range(3))
    header = TraceHeader(9, [], [], {}, ["a", "b"], disco=[{"a": first, "b": second}, {"c": below}])
    assert header.disco_of(None) == [first, below]
    assert header.disco_of("b") == [second, below]
    assert header.disco_of("a head on states") == [first, below]
    assert TraceHeader(9, [], [], {}).disco_of("a") == []
