"""Several texts at once: each has its own decoding loop, and their requests to a model share one pass."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar, cast

from greenlet import GreenletExit, getcurrent, greenlet

from specctl.errors import out_of_memory
from specctl.models.passes.inference import in_inference_mode
from specctl.models.passes.preparation_time import OwnClock, working_seconds
from specctl.policies import Setting, StoppingPolicy
from specctl.policies.base import joint_of
from specctl.policies.cost_optimal import CostOptimal, CostOptimalBatch


class Request(Protocol):
    """A text's request to something shared.

    Attributes:
        size: its weight when the time of a shared answer is divided among the requests.
    """

    @property
    def size(self) -> float: ...


T = TypeVar("T")
Asked = TypeVar("Asked", bound=Request, contravariant=True)
Given = TypeVar("Given", covariant=True)


class CrowdedError(Exception):
    """There is not enough memory to answer all texts at once; their requests can still be answered one by one."""


class Shared(Protocol[Asked, Given]):
    """A resource that serves several texts at once: a model's passes (`Passes`), or a joint decision."""

    def run(self, requests: Sequence[Asked], /) -> Sequence[Given]:
        """Answer requests, at most one of each text; an exception as an answer is raised in that text alone.

        If `run` itself raises, each request is answered alone, so repeating a request must give the same answer.
        """


@dataclass(slots=True, eq=False)
class _Text(Generic[T]):
    """A text that is being written."""

    row: int  # the row whose caches it uses
    run: greenlet  # its loop, suspended while it waits for a pass
    clock: float = 0.0  # seconds of its own work and of its shares of passes, as `working_seconds` returns them to it


@dataclass(slots=True)
class Hub(Generic[T]):
    """Runs every text until it waits, then answers all requests to the same resource in one call.

    A text's loop is a greenlet that knows nothing of the other texts: a call of its `asker` switches to the hub until
    the answer exists. Resources are served in order, so verification waits for the last text that drafts. An answer's
    time is divided by the requests' sizes. A text's clock counts only its own work and its shares, so the times of all
    rounds add up to the run's time and waiting is not counted as a cost.
    """

    order: Sequence[Shared[Any, Any]]  # the shared resources, a draft's passes before its verifier's
    # called with each row in which a text begins, before its first request
    begins: Callable[[int], None] = lambda _: None
    _asked: list[list[tuple[_Text[T], Request]]] = field(init=False, repr=False)
    _texts: dict[greenlet, _Text[T]] = field(init=False, repr=False, default_factory=dict)
    _ended: list[tuple[int, T]] = field(init=False, repr=False, default_factory=list)

    def __post_init__(self) -> None:
        self._asked = [[] for _ in self.order]

    def asker(self, shared: Shared[Asked, Given]) -> Callable[[Asked], Given]:
        """The function that sends a text's request to a resource in the order and returns the answer."""
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

    # Set here, because a text that left the mode would leave it for all texts.
    @in_inference_mode
    def advance(self) -> list[tuple[int, T]]:
        """Answer all requests to the first requested resource in the order, and resume their texts.

        Returns:
            The rows whose texts have ended since the last call, with the texts' results.

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
        """Stop the text of a row; the row is then free."""
        for waiting in self._asked:
            waiting[:] = [(text, request) for text, request in waiting if text.row != row]
        for text in [text for text in self._texts.values() if text.row == row]:
            text.run.parent = getcurrent()
            text.run.throw(GreenletExit)
            self._texts.pop(text.run, None)

    def close(self) -> None:
        """Stop all unfinished texts."""
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
    """Answer one request alone, after a joint answer failed."""
    try:
        return shared.run([request])[0]
    except Exception as error:
        return error


class Decisions:
    """Decides jointly how far texts draft, once every drafting text has asked.

    In the hub's order it comes after the drafts' passes and before the target's.
    """

    def __init__(self) -> None:
        self._joints: dict[Setting, tuple[CostOptimalBatch | None, set[int]]] = {}
        self._rows: dict[int, list[CostOptimal]] = {}

    def policy(self, setting: Setting, row: int, ask: Callable[[CostOptimal], int]) -> StoppingPolicy:
        """A new policy of a setting's top level for a row.

        Rows of one setting share a joint policy. A row that calls this again starts over and shares with other rows
        that do. In a chain with a lookup each row decides for itself: rounds of copied tokens neither ask nor train the
        policy, and a joint decision would wait for a row that does not ask.

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
        """Reset a row for a new text, however the previous one ended."""
        for policy in self._rows.get(row, ()):
            policy.forget()

    def run(self, rows: Sequence[CostOptimal]) -> list[int]:
        """See `Shared`; an error is raised in all texts, because asking again one by one would hide it."""
        try:
            return self._limits(rows)
        except Exception as error:
            return cast("list[int]", [error] * len(rows))

    def _limits(self, rows: Sequence[CostOptimal]) -> list[int]:
        joints = {id(row.batch): row.batch for row in rows}
        if len(joints) == 1:
            return rows[0].batch.run(rows)
        limits: dict[int, int] = {}
        for joint in joints.values():
            its = [row for row in rows if row.batch is joint]
            limits |= zip(map(id, its), joint.run(its), strict=True)
        return [limits[id(row)] for row in rows]
