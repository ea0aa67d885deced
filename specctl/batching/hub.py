"""Several texts at once: each is written by its own loop, and what they ask of a model is read in one pass."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from greenlet import GreenletExit, getcurrent, greenlet

from specctl.models.passes.forward import Forward
from specctl.models.passes.inference import in_inference_mode
from specctl.models.passes.preparation_time import own_clock, working_seconds
from specctl.models.running.runner import RowPasses, RowRequest

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Text(Generic[T]):
    """A text that is being written.

    Attributes:
        row: whose caches it has.
        run: what writes it, up to where it waits for a pass.
        clock: seconds of its own work and of its shares of passes, as `working_seconds` tells them to it.
    """

    row: int
    run: greenlet
    clock: float = 0.0


@dataclass(slots=True)
class Hub(Generic[T]):
    """Runs every text until it waits for a pass, and then one pass for all that wait for the same model.

    A text's loop knows nothing of the others: it is a greenlet, and `ask` switches to the hub until the pass is there.
    Passes of the first model come first, so that a verification waits for the last text that drafts. A pass's time is
    shared out by tokens: each text's clock goes on by its own work and its shares alone, so that the times of all
    rounds add up to the time of the run, and no text takes waiting for others for its own price.

    Attributes:
        models: the passes, a draft's before those of what verifies it.
    """

    models: Sequence[RowPasses]
    _asked: list[list[tuple[_Text[T], RowRequest]]] = field(init=False, repr=False)
    _texts: dict[greenlet, _Text[T]] = field(init=False, repr=False, default_factory=dict)
    _ended: list[tuple[int, T]] = field(init=False, repr=False, default_factory=list)

    def __post_init__(self) -> None:
        self._asked = [[] for _ in self.models]

    def asker(self, model: int) -> Callable[[RowRequest], Forward]:
        """What a `RowRunner` of one of the models asks for its passes."""

        def ask(request: RowRequest) -> Forward:
            text = self._texts[getcurrent()]
            self._asked[model].append((text, request))
            found: Forward = text.run.parent.switch()
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

        text: _Text[T] = _Text(row, greenlet(work))
        self._texts[text.run] = text
        self._resume(text)

    # Here, since a text that leaves the mode would leave it for all.
    @in_inference_mode
    def advance(self) -> list[tuple[int, T]]:
        """Make one pass, if any text waits for one, and go on with the texts that waited.

        Returns:
            The rows whose texts have ended since the last call, with what they gave.

        Raises:
            Exception: whatever a text's own loop raises.
        """
        number = next((number for number, waiting in enumerate(self._asked) if waiting), None)
        if number is not None:
            model, asked = self.models[number], self._asked[number]
            self._asked[number] = []
            began = working_seconds()
            try:
                found: Sequence[Forward | Exception] = model.run([request for _, request in asked])
            except (RuntimeError, IndexError):
                found = [_alone(model, request) for _, request in asked]
            each = (working_seconds() - began) / sum(len(request.tokens) for _, request in asked)
            for (text, request), outputs in zip(asked, found, strict=True):
                text.clock += each * len(request.tokens)
                self._resume(text, outputs)
        ended, self._ended = self._ended, []
        return ended

    def close(self) -> None:
        """Give up the texts that have not ended."""
        self._asked = [[] for _ in self.models]
        for text in list(self._texts.values()):
            text.run.parent = getcurrent()
            text.run.throw(GreenletExit)
        self._texts.clear()

    def _resume(self, text: _Text[T], outputs: Forward | Exception | None = None) -> None:
        text.run.parent = getcurrent()
        try:
            with own_clock(text.clock):
                if isinstance(outputs, Exception):
                    text.run.throw(outputs)
                else:
                    text.run.switch(*([] if outputs is None else [outputs]))
                text.clock = working_seconds()
        finally:
            if text.run.dead:
                self._texts.pop(text.run, None)


def _alone(model: RowPasses, request: RowRequest) -> Forward | Exception:
    """A pass for one text, after one for several failed: a pass can be made again, for it writes the same places."""
    try:
        return model.run([request])[0]
    except (RuntimeError, IndexError) as error:
        return error
