"""Runs every candidate on every prompt, interleaved, and emits each result as soon as it is known."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType

import torch

from specctl.decoding.answers import Answerer
from specctl.decoding.composition import build_drafter
from specctl.decoding.prompt_format import PromptFormat
from specctl.decoding.session import Session
from specctl.errors import RecordError
from specctl.models.running.pair import Pair
from specctl.models.running.passes import Passes
from specctl.observing.pass_times import WIDTHS, PassMeter
from specctl.observing.results import (
    BASELINE,
    Candidate,
    Difference,
    Failed,
    Run,
    RunDifference,
    RunSet,
    Skipped,
    compare,
)
from specctl.peers.assisted import AssistedPeer
from specctl.peers.engines import MOVING
from specctl.peers.process import MeasuredPeer, PeerError
from specctl.profile.schema import SamplingTable
from specctl.prompts.suites import SuitePrompt
from specctl.text_engine.dispatch import in_order
from specctl.text_engine.engine import Writer, whole
from specctl.text_engine.here import HereEngine, Rows
from specctl.text_engine.hub import Hub

WARM_UP_TOKENS = 16
PROMPTS_BETWEEN_COSTS = 10
Emit = Callable[[object], None]
AT_ONCE = 4
"""Prompts per row in a candidate's turn. With fewer, rows whose prompts ended early would stay idle for much of the
time.
"""


def turns(prompts: int, batch: int) -> list[range]:
    """The indices of the prompts in each candidate's turn."""
    size = 1 if batch == 1 else AT_ONCE * batch
    return [range(first, min(first + size, prompts)) for first in range(0, prompts, size)]


@dataclass(frozen=True, slots=True)
class _Lane:
    """A candidate's engine for prompts."""

    candidate: Candidate
    answerer: Answerer
    peer: AssistedPeer | MeasuredPeer | None
    engine: HereEngine


class RoundRobin:
    """Runs the candidates of a results file on prompts, in turn.

    Args:
        pair: loaded models.
        results: the header, and the runs that an earlier benchmark finished; new runs are added.
        prompts: of the suite.
        settings: the sampling table in force.
        prompt_format: turns prompts into ids.
        emit: called with each record of the results file as soon as it is known.
        peers: the loaded peers in separate processes, by label.
        passes: of `passes_of`, so that candidates, and peers that can, run several prompts at once; None for one by
            one.
    """

    def __init__(
        self,
        pair: Pair,
        results: RunSet,
        prompts: Sequence[SuitePrompt],
        settings: SamplingTable,
        prompt_format: PromptFormat,
        emit: Emit,
        peers: Mapping[str, MeasuredPeer] = MappingProxyType({}),
        passes: Sequence[Passes] | None = None,
    ) -> None:
        self._pair, self._results, self._prompts, self._settings = pair, results, prompts, settings
        self._format, self._emit, self._peers = prompt_format, emit, peers
        self._failed: set[str] = set()
        self._passes, self._batch = passes, 1 if passes is None else passes[-1].slots
        self._lanes = [self._lane(candidate) for candidate in results.header.candidates]
        settings_ = [one.setting for one in results.header.candidates if one.setting is not None]
        longest = max(one.longest_draft for one in settings_)
        simulated = WIDTHS[-1] if results.header.oracle else 0  # the fastest draft length may be any number
        self._meter = PassMeter(pair, context=128, widest=max(longest + 1, simulated))

    def _lane(self, candidate: Candidate) -> _Lane:
        if candidate.setting is None:
            peer = self._peers.get(candidate.label)
            return self._peer_lane(candidate, peer or AssistedPeer(self._pair, candidate.name))
        pair, setting = self._pair if candidate.engine is None else self._pair.eagerly(), candidate.setting

        def answerer(pair: Pair) -> Answerer:
            session = Session(pair, build_drafter(pair, setting, drafts=candidate.drafts))
            return Answerer(session, self._format, self._settings)

        alone = answerer(pair)
        engine = HereEngine(self._writer(candidate, alone))
        if self._passes is not None and pair is self._pair:
            rows = Rows.over(pair, self._passes, lambda row, _: self._writer(candidate, answerer(row)))
            engine = HereEngine(None, rows)
        return _Lane(candidate, alone, None, engine)

    def _peer_lane(self, candidate: Candidate, peer: AssistedPeer | MeasuredPeer) -> _Lane:
        def answerer(peer: AssistedPeer | MeasuredPeer) -> Answerer:
            return Answerer(peer, self._format, self._settings)

        def writer(peer: AssistedPeer | MeasuredPeer) -> Writer:
            return self._writer(candidate, answerer(peer), peer)

        engine = HereEngine(writer(peer))
        if self._batch > 1 and isinstance(peer, MeasuredPeer) and peer.batches:
            hub = Hub[Run | Skipped]([peer])
            rows = [writer(peer.row(hub.asker(peer))) for _ in range(self._batch)]
            engine = HereEngine(None, Rows(hub, rows))
        return _Lane(candidate, answerer(peer), peer, engine)

    def _writer(
        self, candidate: Candidate, answerer: Answerer, peer: AssistedPeer | MeasuredPeer | None = None
    ) -> Writer:
        """The writer that runs a candidate on a prompt, given its index, a repeat and a token limit."""
        return whole(lambda asked: self._run(candidate, answerer, peer, *asked))

    def run(self, before: Callable[[str, str], None] = lambda *_: None) -> Iterator[Run]:
        """Yield runs as they finish, except those of an earlier benchmark.

        The candidates' order rotates with each prompt, so that a slowing machine slows all of them equally. A prompt
        that a candidate cannot run, for example because it is too long for the models, is skipped for all candidates
        and recorded as `Skipped`. A peer that fails is recorded as `Failed` and does not run again.

        Args:
            before: called before each run with the candidate's label and the prompt's id.
        """
        done = {run.key for run in self._results.runs}
        expected = (
            len(self._prompts) * len(self._lanes) * len(self._results.header.lengths) * self._results.header.repeats
        )
        if len(done) >= expected:
            self._compare_all()  # an earlier benchmark may have stopped between the last run and its comparison
            return
        self.begin()
        for repeat in range(self._results.header.repeats):
            for numbers in turns(len(self._prompts), self._batch):
                yield from self.run_prompts(numbers, repeat, done, before)
                if (numbers[-1] + 1) // PROMPTS_BETWEEN_COSTS > numbers[0] // PROMPTS_BETWEEN_COSTS:
                    self.measure_costs()
        self.measure_costs()

    def begin(self) -> None:
        """Warm every candidate up, and measure costs."""
        for number in range(len(self._prompts)):
            if all(self._warm(lane, number) for lane in self._lanes):
                break
        self.measure_costs()

    def run_prompts(
        self,
        numbers: Sequence[int],
        repeat: int,
        done: Collection[tuple[str, str, int, int]],
        before: Callable[[str, str], None] = lambda *_: None,
    ) -> Iterator[Run]:
        """Yield the missing runs of some prompts, as `run` does.

        Args:
            numbers: consecutive indices of prompts, from 0.
            repeat: the repeat, from 0.
            done: the `Run.key` of each finished run of these prompts; others may be included.
            before: see `run`.
        """
        results = self._results
        turn = (numbers[0] // len(numbers) + repeat) % len(self._lanes)
        for length in results.header.lengths:
            for lane in self._lanes[turn:] + self._lanes[:turn]:
                label = lane.candidate.label
                left = [n for n in numbers if (label, self._prompts[n].id, repeat, length) not in done]
                for run in self._outcomes(lane, left, repeat, length, before):
                    self._add(run)
                    if isinstance(run, Run):
                        yield run
            for number in numbers:
                if self._prompts[number].id not in results.skipped:
                    self._compare(self._prompts[number], repeat, length)

    def _outcomes(
        self, lane: _Lane, numbers: Sequence[int], repeat: int, length: int, before: Callable[[str, str], None]
    ) -> Iterator[Run | Skipped]:
        """The outcomes of a candidate's prompts, up to the first failure of a peer."""
        label = lane.candidate.label

        def tasks() -> Iterator[tuple[int, tuple[int, int, int]]]:
            for number in numbers:
                if self._prompts[number].id not in self._results.skipped:
                    before(label, self._prompts[number].id)
                    yield number, (number, repeat, length)

        if label in self._failed:
            return
        try:
            yield from (found for _, found in in_order(lane.engine, tasks()))
        except PeerError as error:
            self._fail(lane, error)

    def measure_costs(self) -> None:
        """Measure and emit the times of bare passes."""
        self._add(self._meter.measure())

    def _compare_all(self) -> None:
        for repeat in range(self._results.header.repeats):
            for prompt in self._prompts:
                for length in self._results.header.lengths:
                    self._compare(prompt, repeat, length)

    def _warm(self, lane: _Lane, number: int) -> bool:
        """Warm a candidate up with a prompt, and other rows with the next prompts; returns whether it could run one.

        The same prompt in all rows would teach a policy that rows accept and reject together.
        """
        numbers = [(number + row) % len(self._prompts) for row in range(self._batch)]
        # Run all to the end: unfinished rows would continue in the next lane's passes.
        found = [*self._outcomes(lane, numbers, 0, WARM_UP_TOKENS, lambda *_: None)]
        return not found or not all(isinstance(one, Skipped) for one in found)

    def _fail(self, lane: _Lane, error: PeerError) -> None:
        lane.engine.close()
        self._failed.add(lane.candidate.label)
        self._add(Failed(lane.candidate.label, error.message))

    def _add(self, record: object) -> None:
        self._results.add(record)
        self._emit(record)

    def _run(
        self,
        candidate: Candidate,
        answerer: Answerer,
        peer: AssistedPeer | MeasuredPeer | None,
        number: int,
        repeat: int,
        length: int,
    ) -> Run | Skipped:
        """Raises PeerError where a peer fails."""
        prompt = self._prompts[number]
        settings = self._settings.model_copy(update={"max_new_tokens": length})
        # The seed depends on prompt and repeat only, so every candidate draws the same random numbers.
        record = prompt.record(number + repeat * len(self._prompts) + 1)
        if peer is not None:
            peer.passes.clear()
        assisted = peer if isinstance(peer, AssistedPeer) else None
        if assisted is not None:
            assisted.thresholds.clear()
        try:
            completions = replace(answerer, settings=settings).answer(record)
        except RecordError as error:
            return Skipped(prompt.id, error.message)
        turns = [completion.summary for completion in completions]
        if peer is not None:
            turns = [
                replace(turn, target_forwards=target, draft_forwards=draft)
                for turn, (target, draft) in zip(turns, peer.passes, strict=True)
            ]
        run = Run(candidate.label, prompt.id, prompt.category, repeat, length, tuple(turns))
        if assisted is None or candidate.name not in MOVING:
            return run
        return replace(run, thresholds=tuple(assisted.thresholds))

    def _compare(self, prompt: SuitePrompt, repeat: int, length: int) -> None:
        """Emit where greedy runs of a prompt first differ from the baseline's, with the gap of the target's logits."""
        if self._settings.temperature:
            return
        here = [
            run for run in self._results.runs if (run.prompt, run.repeat, run.length) == (prompt.id, repeat, length)
        ]
        for run, difference in compare(replace(self._results, runs=here)):
            if difference is not None and run.difference is None:
                baseline = next(other for other in here if other.candidate == BASELINE)
                gap = self._gap(prompt, baseline, difference)
                self._add(RunDifference(**{**asdict(difference), "gap": gap}, run=run.key))

    def _gap(self, prompt: SuitePrompt, baseline: Run, difference: Difference) -> float | None:
        ids = self.prompt_ids(prompt, baseline)[difference.turn]
        text = [*ids, *baseline.turns[difference.turn].tokens[: difference.position]]
        with torch.inference_mode():
            self._pair.target.begin(len(ids))
            self._pair.target.rollback(0)
            top = self._pair.target.extend(text, keep=1).logits[0].float().topk(2).values
        return float(top[0] - top[1])

    def prompt_ids(self, prompt: SuitePrompt, run: Run) -> list[list[int]]:
        """The prompt ids of each turn of a run."""
        answers = [turn.text for turn in run.turns]
        return [self._lanes[0].answerer.prompt_ids(prompt.record(1), answers[:turn]) for turn in range(len(answers))]
