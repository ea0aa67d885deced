"""The drafts of a batch: each request's policy is asked after each of its tokens. No torch, no vLLM."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TypeVar, cast

from greenlet import getcurrent, greenlet

from specctl.policies import Setting, StoppingPolicy
from specctl.policies.base import joint_of
from specctl.policies.cost_optimal import CostOptimal
from specctl.records import DraftStep, ExtraToken, Round, StopReason

Answer = TypeVar("Answer")


@dataclass(slots=True)
class RequestDraft:
    """A request's policy and its draft, which is being made or verified.

    Attributes:
        policy: the request's own.
        steps: the tokens to verify.
        limit: the most of them.
        stop: why drafting ended; None while it goes on.
        rounds: verified so far.
        threshold: the policy's during the round.
    """

    policy: StoppingPolicy
    steps: list[DraftStep] = field(default_factory=list)
    limit: int = 0
    stop: StopReason | None = None
    rounds: int = 0
    threshold: float | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the target made of a request's draft.

    Attributes:
        emitted: the tokens that were added to the text: accepted ones and one of the target's own.
        verified: how many draft tokens were verified, fewer than drafted where the text ended or a grammar forbade one.
    """

    emitted: tuple[int, ...]
    verified: int


@dataclass(slots=True)
class Counts:
    """What was done so far: passes of the draft that drew tokens, rounds verified, tokens verified and accepted."""

    passes: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0


class BatchDrafts:
    """Stops the drafts of a batch that is drafted one token of every request at a time.

    A policy object belongs to one request; when that ends, the next one gets it with `reset`, as `carry_over` wants it.
    A policy with a joint form decides for all requests that ask in a step: a pass takes its time whoever takes part.

    Args:
        setting: the policy of every request.
    """

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._joint = joint_of(setting.build())
        self._requests: dict[str, RequestDraft] = {}
        self._idle: list[StoppingPolicy] = []
        self._rows: list[RequestDraft | None] = []
        self.counts = Counts()

    @property
    def tokens(self) -> list[list[int]]:
        """The draft of each row, empty for one without."""
        return [[step.token for step in row.steps] if row is not None else [] for row in self._rows]

    def knows(self, name: str) -> bool:
        """Whether a request has drafted before."""
        return name in self._requests

    def observe(
        self,
        names: Sequence[str],
        verdicts: Sequence[Verdict | None],
        live: Collection[str],
        seconds: tuple[float, float] = (0.0, 0.0),
    ) -> None:
        """Tell policies of the drafts that were verified.

        Args:
            names: of the requests, a row each.
            verdicts: of their last drafts; None for a row whose prompt is still being read.
            live: the requests that have not ended.
            seconds: that drafting and verifying them took; zeros where a prompt was read in the same pass.
        """
        for gone in [name for name in self._requests if name not in live]:
            policy = self._requests.pop(gone).policy
            if self._joint is not None:
                cast(CostOptimal, policy).forget()
            self._idle.append(policy)
        known = [
            (request, verdict)
            for name, verdict in zip(names, verdicts, strict=True)
            if verdict is not None and (request := self._requests.get(name)) is not None
        ]
        for request, verdict in known:
            self._observe(request, verdict, *(each / len(known) for each in seconds))

    def _observe(self, request: RequestDraft, verdict: Verdict, drafting: float, verifying: float) -> None:
        steps, accepted = tuple(request.steps[: verdict.verified]), len(verdict.emitted) - 1
        if [step.token for step in steps[:accepted]] != list(verdict.emitted[:accepted]):
            steps, accepted = (), 0  # vLLM has verified another draft, as it does at the end of its context
        kind = ExtraToken.BONUS if accepted == len(steps) else ExtraToken.CORRECTION
        round_ = Round(
            request.rounds,
            steps,
            accepted,
            verdict.emitted[-1],
            kind,
            request.stop,
            request.threshold,
            drafting,
            verifying,
            drafting + verifying,
        )
        request.policy.observe(round_)
        request.rounds += 1
        counts = self.counts
        counts.rounds, counts.drafted = counts.rounds + 1, counts.drafted + len(steps)
        counts.accepted += accepted

    def begin(self, names: Sequence[str | None], longest: int) -> int:
        """Begin the next drafts; the most tokens of any of them, 0 if none is wanted.

        Args:
            names: of the requests, a row each; None for a row that is not to draft.
            longest: the most tokens that there is room for.
        """
        self._rows = [None if name is None else self._requests.get(name) or self._admit(name) for name in names]
        rows = [row for row in self._rows if row is not None]
        for row, limit in zip(rows, self._asked([row.policy.draft_limit for row in rows]), strict=True):
            row.steps, row.limit = [], min(limit, longest)
            row.threshold = row.policy.current_threshold
            row.stop = None if row.limit else StopReason.MAX_DRAFT
        return max((row.limit for row in rows), default=0)

    def step(self, tokens: Sequence[int], signals: Sequence[Sequence[float]]) -> bool:
        """Take one more token of every row, and ask the policies of those that draft; whether any of them goes on.

        Args:
            tokens: drawn, one of each row.
            signals: of each row its draft entropy in nats and its top probability.
        """
        self.counts.passes += 1
        drawn = [
            (row, DraftStep(len(row.steps) + 1, token, entropy=entropy, top_prob=top))
            for row, token, (entropy, top) in zip(self._rows, tokens, signals, strict=True)
            if row is not None and row.stop is None
        ]
        questions = [_stops(row.policy, step) for row, step in drawn]
        for (row, step), stops in zip(drawn, self._asked(questions), strict=True):
            if not stops or row.policy.keep_trigger:
                row.steps.append(step)
            if stops:
                row.stop = StopReason.POLICY
            elif len(row.steps) == row.limit:
                row.stop = StopReason.MAX_DRAFT
        return any(row is not None and row.stop is None for row in self._rows)

    def _admit(self, name: str) -> RequestDraft:
        if self._idle:
            policy = self._idle.pop()
        else:
            policy = self._setting.build() if self._joint is None else self._joint.text(_ask)
        policy.reset()
        self._requests[name] = found = RequestDraft(policy)
        return found

    def _asked(self, questions: Sequence[Callable[[], Answer]]) -> list[Answer]:
        """The policies' answers; where they ask a joint policy first, it answers once all of them have asked."""
        if self._joint is None:
            return [question() for question in questions]
        runs = [greenlet(question) for question in questions]
        found = [run.switch() for run in runs]
        waiting = [place for place, run in enumerate(runs) if not run.dead]
        if waiting:
            for place, most in zip(waiting, self._joint.run([found[place] for place in waiting]), strict=True):
                found[place] = runs[place].switch(most)
        return found


def _ask(row: CostOptimal) -> int:
    """Hand a joint policy's row to `BatchDrafts._asked`, and wait there for the answer to it."""
    answer: int = getcurrent().parent.switch(row)
    return answer


def _stops(policy: StoppingPolicy, step: DraftStep) -> Callable[[], bool]:
    return lambda: policy.should_stop(step)
