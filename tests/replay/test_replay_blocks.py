"""Rounds verified as blocks, replayed: those of a live run that draws alike. Their law is for `test_replay_law`."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_replay import DEPTH, DRAFTING, HEAD, LENGTH, PROMPT, SAMPLED, VERIFYING, clock
from test_replay_grid import PAIRS, toy_pair

from specctl.decoding import round as one_round
from specctl.decoding.draft import Draft
from specctl.decoding.logits import device, host
from specctl.decoding.logits.host import passing
from specctl.decoding.logits.logits import Verdict, array, kept_in_turn
from specctl.decoding.sampling import Sampling
from specctl.models.passes.draft_vocabulary import DraftVocabulary
from specctl.models.passes.forward import Forward
from specctl.models.running.eager import EagerPasses
from specctl.models.running.pair import Pair
from specctl.models.running.slot import Slot
from specctl.outputs import Outputs
from specctl.policies import NONE, POLICIES, Setting
from specctl.records import ExtraToken
from specctl.replay.bounds import best_stopping, oracle
from specctl.replay.costs import CostTable
from specctl.replay.play import replay, rounds
from specctl.replay.trace_files import TRACES, TracedPrompt, TraceHeader, read_traces
from specctl.replay.traces import Trace
from tests.support.toys import Ticks, noisy_copy, random_model
from tests.support.traced import live, pair_of, shape, trace_of

pytestmark = pytest.mark.usefixtures("drafts_at_will")

BLOCK = Sampling(temperature=1.0, verification="block")
NO_EOS: frozenset[int] = frozenset()
START = (3, 1, 4, 1, 5)
"""A prompt for toys of few tokens."""


@pytest.fixture(autouse=True)
def steady_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_round, "working_seconds", Ticks(DRAFTING, VERIFYING, 0.0))


def drafts_of_a_model() -> Pair:
    return pair_of(
        Slot(EagerPasses(random_model("llama"), 64)), Slot(EagerPasses(noisy_copy("llama"), 64)), heads=[HEAD]
    )


KINDS: dict[str, Callable[[], Pair]] = {
    "a draft model": drafts_of_a_model,
    "toy": lambda: toy_pair(NO_EOS, None),
    **{kind: (lambda kind=kind: PAIRS[kind](NO_EOS, None)) for kind in ("chain", "foreseeing", "remembering")},  # type: ignore[misc]
}
SOME = [case for case in SAMPLED if case[0] in ("constant", "svip", "specdec++", "cost-optimal")]


def recorded(pair: Pair, seed: int, sampling: Sampling = BLOCK) -> Trace:
    prompt = PROMPT if pair.target.engine == "eager" else START
    text = [token for played in live(pair, NONE, prompt, LENGTH, sampling, seed) for token in played.emitted]
    return trace_of(pair, prompt, text, LENGTH, DEPTH, sampling, seed)


class FromTrace:
    """Chance as a trace has it. How probable each verdict is is computed by the live rule from the models' numbers."""

    def __init__(self, trace: Trace, vocabulary: DraftVocabulary | None) -> None:
        self._trace, self._start, self._index = trace, 0, 0
        self._vocabulary = vocabulary
        self.judged = 0

    def draw(self, *_: object) -> list[int]:
        self._index += 1
        token = self._trace.draft.step(self._start, self._index).token
        return [token if self._vocabulary is None else int(self._vocabulary.columns([token])[0])]

    def judge(self, block: Draft, forward: Forward, sampling: Sampling, _: object) -> tuple[Verdict, None]:
        count, start = len(block.tokens), self._start
        accepted = min(count, self._trace.draft.accepted_runs[start])
        kind = ExtraToken.BONUS if accepted == count else ExtraToken.CORRECTION
        self._start, self._index = start + accepted + 1, 0
        chances: tuple[float, ...] = ()
        if count:
            assert block.probs is not None
            assert block.vocabulary is self._vocabulary
            laws = block.probs if block.vocabulary is None else block.vocabulary.widened(block.probs, 0.0)
            target, draft = array(sampling.probs(forward.logits)), array(laws)
            places = range(count)
            numbers = target[places, block.tokens], draft[places, block.tokens], draft, target
            judged = accepted + (accepted < count)
            chances = tuple(kept_in_turn(passing(*numbers)[1])[:judged])
            known = self._trace.draft.verified_chances(start, count, judged)
            assert known == pytest.approx(chances, abs=2e-4)
            chances = known or ()
            self.judged += 1
        return Verdict(accepted, self._trace.tokens[self._start - 1], kind, chances), None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.representatives("a draft model", "foreseeing", "toy")
def test_replayed_blocks_are_those_of_a_live_run_that_draws_alike(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The models run; only chance is taken from the trace, which knows the chances of every block of any length."""
    pair = KINDS[kind]()
    trace = recorded(pair, 3)
    assert any(trace.draft.accepted_runs)
    prompt = PROMPT if pair.target.engine == "eager" else START
    for name, settings in SOME:
        chance = FromTrace(trace, pair.drafts[0].draft_vocabulary)
        found = [shape(played) for played in rounds(POLICIES[name](**settings), trace, NO_EOS, clock)]
        with monkeypatch.context() as patched:
            patched.setattr(host, "picked", chance.draw)
            patched.setattr(device, "pick", lambda *_, draw=chance.draw: torch.tensor(draw()))  # not on the host
            patched.setattr(one_round, "judge", chance.judge)
            played = live(pair, Setting.of({"name": name, **settings}), prompt, LENGTH, BLOCK)
        assert found == [shape(one) for one in played]
        assert chance.judged > 3


def test_greedy_traces_know_no_blocks() -> None:
    pair = drafts_of_a_model()
    one, other = (recorded(pair, 0, Sampling(verification=each)) for each in ("token", "block"))
    assert one == other


def test_rounds_share_what_is_not_kept() -> None:
    """A trace would else be as large as one for every start."""
    trace = recorded(drafts_of_a_model(), 1)
    ends = [tail for tail in trace.draft.tails if tail is not None]
    assert len(set(ends)) == len(trace.draft.branches) < len(ends)
    assert max(map(len, trace.draft.branches)) > 4


def test_what_the_draft_drafts_alone_may_be_read_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of one branch, one after another: as many tokens as in one group, and every round has all of them."""
    pair = drafts_of_a_model()
    whole = recorded(pair, 1)
    for module in ("sequence_recording", "head_recording"):
        monkeypatch.setattr(f"specctl.replay.recording.{module}.HELD", 1)
    parts = recorded(pair, 1)
    assert (parts.draft.accepted_runs, parts.draft.tails) == (whole.draft.accepted_runs, whole.draft.tails)
    assert list(map(len, parts.draft.branches)) == list(map(len, whole.draft.branches))


@pytest.mark.parametrize("kind", ["a draft model", "toy"])
def test_block_traces_survive_a_file(kind: str, tmp_path: Path) -> None:
    trace = recorded(KINDS[kind](), 2)
    header = TraceHeader(DEPTH, [], ["entropy"], {"sampling": {"temperature": 1.0}}, verification="block")
    with Outputs() as outputs:
        write = TRACES.writing(outputs.file("trace", tmp_path / "t.jsonl"), header)
        write(TracedPrompt("p", {}, [trace]))
    read = read_traces(tmp_path / "t.jsonl")
    assert read.verification == "block"
    assert read.traces == [trace]
    assert (read.traces[0].draft.along is None) == (kind != "a draft model")


def test_another_head_has_its_own_word_in_blocks() -> None:
    pair = drafts_of_a_model()
    head = next(iter(pair.named_predictors[0].values()))
    trace = recorded(replace(pair, named_predictors=({"own": head, "other": head},)), 4)
    assert trace.of_predictor("own").draft is trace.draft
    other = trace.of_predictor("other")
    assert other.draft is not trace.draft
    assert [other.draft.step(0, index) for index in (1, 2, 3)] == [trace.draft.step(0, index) for index in (1, 2, 3)]


@pytest.mark.parametrize("kind", ["a draft model", "toy"])
def test_bounds_are_those_of_blocks(kind: str) -> None:
    trace = recorded(KINDS[kind](), 5)
    best = oracle(trace)
    assert best.top.drafted == best.top.accepted
    runs = trace.draft.accepted_runs
    assert all(drafted <= runs[start] for start, drafted in zip(best.top.starts, best.top.drafted, strict=True))
    for name, settings in SAMPLED:
        assert len(best.top.starts) <= len(replay(POLICIES[name](**settings), [trace], NO_EOS)[0].top.starts)
    costs = CostTable.flat(1.0, 8.0, DEPTH)
    rule = best_stopping([trace], costs, longest=DEPTH)
    assert 0 <= rule.limit <= DEPTH
    for judged in trace.draft.judged():
        assert all(0 <= outcome <= 1 for outcome in judged.outcomes)
        assert len(judged.outcomes) == len(judged.accepted) == len(judged.steps)
        # What was kept was possible.
        assert all(outcome > 0 for outcome, kept in zip(judged.outcomes, judged.accepted, strict=True) if kept)


def test_recording_does_not_disturb_the_runners() -> None:
    """A branch that the target read leaves nothing behind."""
    pair = drafts_of_a_model()
    one = recorded(pair, 6)
    again = recorded(pair, 6)
    assert one == again
