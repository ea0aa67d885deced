"""`CostOptimal` for several texts whose drafts wait for each other: one learner, and one decision for all of them."""

from collections.abc import Callable, Iterable, Sequence
from copy import copy, deepcopy
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar

from specctl.policies.base import Rule, Signal, StoppingPolicy
from specctl.policies.draft_account import DraftAllowance
from specctl.policies.drafting import TextRead
from specctl.policies.estimators import RunningLine, kept
from specctl.policies.round_times import COST_MEMORY, FEW, RoundTimes
from specctl.records import DraftStep, Round

if TYPE_CHECKING:
    from specctl.policies.cost_optimal import CostOptimal

Row = TypeVar("Row")


class JointRest(Generic[Row]):
    """Rounds in which rows neither ask nor tell, since none of them drafts: all begin and end in the same rounds.

    Args:
        allowance: says how many these rounds are, and is told of each once.
    """

    def __init__(self, allowance: DraftAllowance) -> None:
        self._allowance = allowance
        self._may: set[Row] = set()
        self._rows: set[Row] = set()
        self._told = 0  # rounds of the rest

    def __bool__(self) -> bool:
        """Whether any row rests."""
        return bool(self._rows)

    def offer(self, rows: Iterable[Row]) -> None:
        """These rows, about which something was decided, may rest after the round that begins, and no others."""
        self._may = {*rows}

    def begin(self, row: Row) -> int:
        """For how many rounds a row rests from now on; 0 where it may not."""
        if row not in self._may:
            return 0
        self._may.remove(row)
        if not self._rows:
            self._told = 0
        self._rows.add(row)
        return self._allowance.asleep

    def end(self, row: Row, rounds: int) -> None:
        """So many rounds of a row's rest are over: all of them, as are the others', or its text has ended."""
        if row not in self._rows:
            return
        self._rows.remove(row)
        if rounds > self._told:
            self._allowance.doze(rounds - self._told)
            self._told = rounds
        if not self._allowance.asleep:
            self._rows.clear()

    def leave(self, row: Row) -> None:
        """Another text begins in a row."""
        self._may.discard(row)
        self._rows.discard(row)


CROWDED = 8
"""After so many rounds in a row in each of which a text began, times are learned from the rows that went on."""


class JointCostOptimal:
    """Decides with which set S of rows drafting goes on.

    It is the one that maximises

        sum of g_i over S - rho (d(|S|) + v(N + |S|) - v(N)),

    and drafting ends where no set is above 0. Here g_i is the probability that the next token of row i and all before
    it are accepted, rho the batch's tokens/s, d(n) the time of a draft pass over n rows and v(N) that of a verification
    of N tokens. What a set costs depends on its size alone, so the best one of each size has the rows with the largest
    gains, and one scan over these finds S. With one row it is the rule of `CostOptimal`, which learns from each
    round at once.

    Acceptance is learned from all rows. What a round takes is learned as in `CostOptimal`, of all rows together: a
    step is a draft pass over all of them, and a token to verify is one of each. d(n) is then a line whose share that
    grows with n is learned from how times change with the number of rows that still draft. Rounds of few rows and of
    many, as at the end of a run, take different times: each class of numbers of rows, up to a power of 2, has its own.

    Args:
        policy: a new one; it holds what is learned.
    """

    def __init__(self, policy: "CostOptimal") -> None:
        self.shared = policy
        self.ended: list[Ended] = []
        self._round: set[CostOptimalRow] = set()  # those of which the verification that comes reads a token
        self._drafted = 0
        self._late = False  # whether a draft of the round began after others
        self.rest: JointRest[CostOptimalRow] = JointRest(policy._allowance)
        self._due: set[CostOptimalRow] = set()  # those of which the end of a round is still to be told
        self._begun = 0  # rounds in a row in which texts began
        self.passes_over = False  # whether the round is not learned from
        self._pass = RunningLine(COST_MEMORY)  # seconds of a draft pass, by its rows
        self._most = 1  # rows of a round so far
        self._times = {0: policy._times}  # by class

    def row(self, ask: "Callable[[CostOptimalRow], int]") -> "CostOptimalRow":
        """As in `Joint`."""
        return CostOptimalRow(self, ask)

    def run(self, rows: "Sequence[CostOptimalRow]", /) -> list[int]:
        """As in `Joint`."""
        if self.rest:  # a text that begins meanwhile waits for the others
            return [0] * len(rows)
        starts = {row for row in rows if not row.drafted}
        if starts and (self.ended or starts >= self._round):
            chosen = self._begin(rows)
        else:  # a text that begins while others draft or wait for their verification has its round with them
            self._round.update(rows)
            self._late |= bool(starts)
            chosen = self._worth(rows)
        self._due |= starts
        self._drafted += len(chosen)
        limit = self.shared._limit
        self.rest.offer(() if limit or not self.shared._allowance.asleep else rows)
        return [limit if row in chosen else 0 for row in rows]

    def tell(self, row: "CostOptimalRow", ended: "Ended") -> None:
        """A row's round is over; of one that nothing was decided about, since others rested, nothing is learned."""
        if row in self._due:
            self._due.remove(row)
            self.ended.append(ended)

    def _begin(self, rows: "Sequence[CostOptimalRow]") -> "set[CostOptimalRow]":
        """The rows that draft in a round that begins."""
        shared, ended, self.ended, late = self.shared, self.ended, [], self._late
        self._round, self._drafted = {*rows}, sum(row.drafted for row in rows)
        self._late = self._drafted > 0
        if ended:
            if shared._allowance.asleep and not any(each.begins or each.round.steps for each in ended):
                shared._allowance.doze()
                return set()
            self._play(len(ended))
            if self.passes_over and any(each.round.steps for each in ended):
                self._pass_over([each.round for each in ended])
            else:
                self._learn(ended, late=late)
        self._play(len(rows))
        self.passes_over = shared._allowance.passed < shared._allowance.every - 1
        if len(rows) == 1:
            shared._last_token = rows[0].own._last_token
            shared._decide(rows[0].unread)
            return set(rows)
        chosen, times = self._worth(rows), shared._times
        first = sum(row.gain for row in chosen) / len(chosen) if chosen else 0.0
        pays = bool(chosen) and shared._drafts.pays(first, times.price, times.entry)
        unread = sum(row.unread for row in rows) // len(rows)
        shared._limit = min(shared.max_draft, shared._allowance.longest(pays, unread))
        return chosen if pays else set(rows)

    def _play(self, count: int) -> None:
        """Decide by the times of rounds of so many rows, and learn these.

        What a class takes is taken to be what the nearest one does, until its own rounds were timed.
        """
        shared, class_, known = self.shared, (count - 1).bit_length(), self._times
        self._most = max(self._most, count)
        if class_ not in known:
            several = [each for each in known if each]
            near = min(several, key=lambda each: abs(each - class_), default=None)
            known[class_] = RoundTimes(shared.cost_ratio) if near is None else deepcopy(known[near])
            known[class_].read_several()
        shared._times = shared._allowance.times = known[class_]
        shared._allowance.part = count / self._most

    def _worth(self, rows: "Sequence[CostOptimalRow]") -> "set[CostOptimalRow]":
        """The rows with which drafting goes on."""
        shared, count = self.shared, len(self._round)
        if count == 1:
            (row,) = rows
            return {row} if shared._goes_on(row.drafted, row.gain, row.own._following) else set()
        ordered = sorted(rows, key=lambda row: -row.gain)
        further, drafted, gains, best, size = shared._times.further, self._drafted / count, 0.0, 0.0, 0
        for number, row in enumerate(ordered, start=1):
            gains += row.gain
            value = gains - count * further(drafted, number / count, self._share(number, count))
            if value > best:
                best, size = value, number
        return set(ordered[:size])

    def _share(self, rows: int, count: int) -> float:
        """What a draft pass over some rows takes, as a share of one over all."""
        if rows == count or not self._pass.known:
            return 1.0
        return self._pass.at(rows) / (self._pass.at(count) or 1.0)

    def _learn(self, ended: "Sequence[Ended]", *, late: bool) -> None:
        """Learn from a round of the batch: in the mean over its rows, but for times, which are those of all.

        Where a draft began after others, how many rows had a pass is not known.
        """
        shared, rows, rounds = self.shared, len(ended), [each.round for each in ended]
        total, passes = sum(len(round_.steps) for round_ in rounds), max(len(round_.steps) for round_ in rounds)
        unread = sum(each.unread for each in ended) // rows
        if passes and rows > 1 and unread <= FEW and not late:
            self._pass.learn(total / passes, sum(each.draft_seconds for each in rounds) / passes)
        steps = self._steps(rounds)
        shared._allowance.idle += not total
        if not self._learn_times(ended, steps, unread):
            shared._times.pass_over(total > 0)
        shared._allowance.book(steps, total / rows, sum(map(kept, rounds)) / rows, unread)

    def _pass_over(self, rounds: "Sequence[Round]") -> None:
        """A round with drafts of which the balance alone is kept."""
        shared, rows = self.shared, len(rounds)
        width = sum(len(round_.steps) for round_ in rounds) / rows
        shared._allowance.pass_over(self._steps(rounds), width, sum(map(kept, rounds)) / rows)
        shared._times.pass_over(drafted=True)

    def _steps(self, rounds: "Sequence[Round]") -> float:
        """What the draft passes of a round take, in passes over all its rows."""
        lengths = [len(round_.steps) for round_ in rounds]
        if len(lengths) == 1:
            return lengths[0]
        taking_part = (sum(length >= place for length in lengths) for place in range(1, max(lengths) + 1))
        return sum(self._share(each, len(lengths)) for each in taking_part)

    def _learn_times(self, ended: "Sequence[Ended]", steps: float, unread: int) -> bool:
        """Learn what a round takes that so many draft steps were made in; whether it tells that.

        A text's first round reads the prompt too, and with it all others wait. So such rounds are left out while there
        are others. Where texts begin all the time, times are learned from the shares of the rows that went on. Shares
        are by tokens, and so too small where a pass reads a prompt's tokens for the time of few.
        """
        on = [each for each in ended if not each.begins]
        self._begun = 0 if len(on) == len(ended) else self._begun + 1
        if not on or 0 < self._begun <= CROWDED:
            return False
        shared, count, rounds = self.shared, len(on), [each.round for each in on]
        width = sum(len(round_.steps) for round_ in rounds) / count
        drafting, verifying = (
            len(ended) / count * sum(phase)
            for phase in zip(*((each.draft_seconds, each.verify_seconds) for each in rounds), strict=True)
        )
        if not verifying or (steps and not width):  # none but those that begin has drafted
            return False
        shared._times.learn_phases(steps, width, drafting, verifying, sum(each.emitted for each in on) / count, unread)
        for round_ in rounds:
            if round_.steps:
                shared._drafts.learn(round_)
        return True


class Ended(NamedTuple):
    """A round of one row.

    Attributes:
        round: that ended.
        emitted: tokens that it added.
        unread: tokens of the text that its draft had to read first.
        begins: whether it was its text's first.
    """

    round: Round
    emitted: int
    unread: int
    begins: bool


class CostOptimalRow:
    """The `StoppingPolicy` of one text of a batch.

    Attributes:
        joint: decides for all rows.
        own: a policy with the text's own state, which shares all that is learned.
        drafted: tokens of the draft so far.
        gain: the probability that the next token and all before it are accepted.
        unread: tokens of the text that the next draft has to read first.
    """

    keep_trigger = True
    drafts = True
    size = 1.0

    def __init__(self, joint: JointCostOptimal, ask: "Callable[[CostOptimalRow], int]") -> None:
        self.own = copy(joint.shared)
        self.joint, self._ask = joint, ask
        self._begins = True
        self.forget()

    @property
    def signals(self) -> frozenset[Signal]:
        return self.own.signals

    @property
    def current_threshold(self) -> float | None:
        return self.joint.shared.current_threshold

    def forget(self) -> None:
        """As in `JointRow`."""
        self._limit: int | None = None
        self.joint._due.discard(self)
        self.joint.rest.leave(self)
        self.reset()

    def reset(self) -> None:
        # A limit that was asked for with the prompt holds for the first round.
        self.own._last_token, self.own._read, self._begins = None, TextRead(), True
        self.drafted, self.gain, self.unread = 0, 0.0, 0

    def draft_limit(self) -> int:
        if self._limit is None:
            self.drafted, self.gain = 0, self.own.first_gain()
            self._limit = self._ask(self)
        return self._limit

    def should_stop(self, step: DraftStep) -> bool:
        own = self.own
        own.look(step)
        if step.index >= self.draft_limit():
            return False
        self.drafted, self.gain = step.index, own._survival * own._following
        return not self._ask(self)

    def observe(self, round_: Round) -> None:
        own, joint = self.own, self.joint
        if round_.steps and joint.shared._allowance.idle:
            joint.shared.wake()
        emitted, unread = own._read_on(round_) if joint.passes_over else own.learn_text(round_)
        joint.tell(self, Ended(round_, emitted, unread, self._begins))
        self.unread, self._limit, self._begins = own._read.missing(round_.context + emitted), None, False

    def rests(self) -> int:
        rounds = self.joint.rest.begin(self)
        if rounds:
            self._limit = 0  # and so it asks nobody
        return rounds

    def rested(self, rounds: int) -> None:
        self._limit = None
        self.own._last_token, self.unread = None, self.unread + rounds  # each of them added a token
        self.joint.rest.end(self, rounds)


class JointRow(StoppingPolicy, Protocol):
    """The policy of one text of a batch, which asks in the middle of its `draft_limit` and `should_stop`.

    Attributes:
        joint: whom it asks.
        size: 1, its part in the time of an answer to several.
    """

    @property
    def joint(self) -> "Joint": ...

    @property
    def size(self) -> float: ...

    def forget(self) -> None:
        """Forget the text, and a limit that was asked for: the next text's prompt comes first, and then `reset`."""


class Joint(Protocol):
    """Decides how far each text of a batch drafts, once all that draft have asked.

    A batch's drafts wait for each other: a pass takes its time whoever takes part in it, and all are verified together.
    So what one more token costs depends on the others.
    """

    def row(self, ask: Callable[[Any], int]) -> JointRow:
        """The policy of one more text.

        Args:
            ask: called with that policy; waits for `run`, of which it gives the answer to it.
        """

    def run(self, rows: Sequence[Any], /) -> list[int]:
        """For each row that asks the most tokens that it drafts from here on, 0 for none."""


def joint_of(policy: StoppingPolicy) -> Joint | None:
    """What decides for a batch in the place of a policy for each row; None if each row's decides for itself."""
    return policy.joint() if isinstance(policy, Rule) else None
