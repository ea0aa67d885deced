"""Several texts at once: each is written by its own loop, and what they ask of a model is read in one pass."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar, cast

from greenlet import GreenletExit, getcurrent, greenlet

from specctl.errors import out_of_memory
from specctl.models.passes.inference import in_inference_mode
from specctl.models.passes.preparation_time import OwnClock, working_seconds
from specctl.policies import Setting, StoppingPolicy
from specctl.policies.base import joint_of
from specctl.policies.cost_optimal import CostOptimalText, JointCostOptimal


class Request(Protocol):
    """What a text asks for.

    Attributes:
        size: in what proportion to those it is answered with it shares the time of the answers.
    """

    @property
    def size(self) -> float: ...


T = TypeVar("T")
Asked = TypeVar("Asked", bound=Request, contravariant=True)
Given = TypeVar("Given", covariant=True)


class CrowdedError(Exception):
    """There is not enough memory to answer all texts at once; what they asked for can still be answered."""


class Shared(Protocol[Asked, Given]):
    """What several texts are given at once: the passes of a model (`Passes`), or a decision about all of them."""

    def run(self, requests: Sequence[Asked], /) -> Sequence[Given]:
        """An answer to each, at most one of a text; an exception is raised in that text alone.

        If it raises one itself, each request is answered alone: answering again must give the same.
        """


@dataclass(slots=True, eq=False)
class _Text(Generic[T]):
    """A text that is being written."""

    row: int  # whose caches it has
    run: greenlet  # what writes it, up to where it waits for a pass
    clock: float = 0.0  # seconds of its own work and of its shares of passes, as `working_seconds` returns them to it


@dataclass(slots=True)
class Hub(Generic[T]):
    """Runs every text until it waits, and then does once what all need that wait for the same.

    A text's loop knows nothing of the others: it is a greenlet, and what `asker` gives switches to the hub until the
    answer is there. What is first in the order comes first, so that a verification waits for the last text that
    drafts. The time of answers is shared out by the requests' sizes: each text's clock goes on by its own work and its
    shares alone, so that the times of all rounds add up to the time of the run, and no text takes waiting for others
    for its own price.
    """

    order: Sequence[Shared[Any, Any]]  # what is shared, a draft's passes before those of what verifies it
    # called with each row in which a text begins, before it asks for anything
    begins: Callable[[int], None] = lambda _: None
    _asked: list[list[tuple[_Text[T], Request]]] = field(init=False, repr=False)
    _texts: dict[greenlet, _Text[T]] = field(init=False, repr=False, default_factory=dict)
    _ended: list[tuple[int, T]] = field(init=False, repr=False, default_factory=list)

    def __post_init__(self) -> None:
        self._asked = [[] for _ in self.order]

    def asker(self, shared: Shared[Asked, Given]) -> Callable[[Asked], Given]:
        """What a text calls with a request to something in the order, and waits for its answer."""
        number = next(number for number, each in enumerate(self.order) if each is shared)

        def ask(request: Asked) -> Given:
            text = self._texts[getcurrent()]
            self._asked[number].append((text, request))
            found: Given = text.run.parent.switch()
            return found

        return ask

    @property
    def busy(self) -> set[int]:
        """The rows whose texts are being written."""
        return {text.row for text in self._texts.values()}

    @in_inference_mode
    def begin(self, row: int, write: Callable[[], T]) -> None:
        """Start a text in a row that is not busy, and run it until it waits; raises what ``write`` raises."""

        def work() -> None:
            found = write()  # before the list is looked up, which `advance` replaces
            self._ended.append((row, found))

        self.begins(row)
        text: _Text[T] = _Text(row, greenlet(work))
        self._texts[text.run] = text
        self._resume(text)

    # Here, since a text that leaves the mode would leave it for all.
    @in_inference_mode
    def advance(self) -> list[tuple[int, T]]:
        """Answer those who wait for the first thing in the order, if any text waits, and go on with them.

        Returns:
            The rows whose texts have ended since the last call, with what they gave.

        Raises:
            CrowdedError: memory ran out while several texts were being written.
            Exception: whatever a text's own loop raises.
        """
        number = next((number for number, waiting in enumerate(self._asked) if waiting), None)
        if number is not None:
            shared, asked = self.order[number], self._asked[number]
            self._asked[number] = []
            began = working_seconds()
            try:
                found: Sequence[Any] = shared.run([request for _, request in asked])
            except Exception as error:
                if len(self._texts) > 1 and out_of_memory(error):
                    self._asked[number] = asked
                    raise CrowdedError from error
                # the error is raised in the text that failed
                found = [_alone(shared, request) for _, request in asked]
            each = (working_seconds() - began) / sum(request.size for _, request in asked)
            for (text, request), answer in zip(asked, found, strict=True):
                text.clock += each * request.size
                self._resume(text, answer)
        ended, self._ended = self._ended, []
        return ended

    @in_inference_mode  # as the text was, which leaves the mode that it began in
    def give_up(self, row: int) -> None:
        """End the text of a row before its end; the row is free then."""
        for waiting in self._asked:
            waiting[:] = [(text, request) for text, request in waiting if text.row != row]
        for text in [text for text in self._texts.values() if text.row == row]:
            text.run.parent = getcurrent()
            text.run.throw(GreenletExit)
            self._texts.pop(text.run, None)

    def close(self) -> None:
        """Give up the texts that have not ended."""
        for row in self.busy:
            self.give_up(row)

    def _resume(self, text: _Text[T], *answer: Any) -> None:
        text.run.parent = getcurrent()
        try:
            with OwnClock(text.clock):
                if answer and isinstance(answer[0], Exception):
                    text.run.throw(answer[0])
                else:
                    text.run.switch(*answer)
                text.clock = working_seconds()
        finally:
            if text.run.dead:
                self._texts.pop(text.run, None)


def _alone(shared: Shared[Asked, Given], request: Asked) -> Given | Exception:
    """The answer to one text, after one to several failed."""
    try:
        return shared.run([request])[0]
    except Exception as error:
        return error


class Decisions:
    """`Shared` of a hub: how far texts draft, decided when all that draft have asked.

    Its place in the hub's order is after the drafts' passes and before the target's.
    """

    def __init__(self) -> None:
        self._joints: dict[Setting, tuple[JointCostOptimal | None, set[int]]] = {}
        self._rows: dict[int, list[CostOptimalText]] = {}

    def policy(self, setting: Setting, row: int, ask: Callable[[CostOptimalText], int]) -> StoppingPolicy:
        """A new policy of a setting's top level for a row.

        Rows of one setting share what decides for them together. A row that asks again begins again, and shares with
        those that do so too. In a chain each row decides for itself: a round of copies asks and teaches its policy
        nothing, and a decision for all would wait for a row that does not ask.

        Args:
            setting: of one draft.
            row: the row.
            ask: of the hub, for these decisions.
        """
        joint, rows = self._joints.get(setting, (None, {row}))
        if row in rows:
            joint, rows = None if setting.lookup else joint_of(setting.build()), set()
            self._joints[setting] = joint, rows
        rows.add(row)
        if joint is None:
            return setting.build()
        policy = joint.text(ask)
        self._rows.setdefault(row, []).append(policy)
        return policy

    def begin(self, row: int) -> None:
        """A text begins in a row, whatever became of the one before it."""
        for policy in self._rows.get(row, ()):
            policy.forget()

    def run(self, rows: Sequence[CostOptimalText]) -> list[int]:
        """As in `Shared`; an error is raised in all texts, because asking again text by text would hide it."""
        try:
            return self._limits(rows)
        except Exception as error:
            return cast("list[int]", [error] * len(rows))

    def _limits(self, rows: Sequence[CostOptimalText]) -> list[int]:
        joints = {id(row.joint): row.joint for row in rows}
        if len(joints) == 1:
            return rows[0].joint.run(rows)
        limits: dict[int, int] = {}
        for joint in joints.values():
            its = [row for row in rows if row.joint is joint]
            limits |= zip(map(id, its), joint.run(its), strict=True)
        return [limits[id(row)] for row in rows]
