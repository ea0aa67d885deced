"""Shows text while it is generated: round by round, or in a live panel."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING

from rich.console import Console

from specctl.jsonl import Record
from specctl.messages import read_messages
from specctl.outputs import Sink
from specctl.records import Completion, ExtraToken, Round
from specctl.terminal.live import LiveView, Origin, Piece, ShownText, recall
from specctl.terminal.output import WordWrap, write_text

if TYPE_CHECKING:
    from specctl.decoding.answers import Answerer, OnRound
    from specctl.observing.record_stream import Watch
    from specctl.profile import Profile


ORIGINS = {ExtraToken.CORRECTION: Origin.CORRECTION, ExtraToken.BONUS: Origin.BONUS}


def watch_with(answerer: "Answerer", view: LiveView) -> "Watch":
    """A `Watch` that shows each record while it is answered."""

    @contextmanager
    def watch(record: Record) -> Iterator["OnRound | None"]:
        with view.text(str(record.id if record.id is not None else record.line), _opening(record)) as shown:
            yield Watcher(answerer, shown, None)

    return watch


def view_of(profile: "Profile", console: Console) -> LiveView:
    """A live view of generations of a profile's pair."""
    return LiveView(console, title_of(profile), _policies(profile), profile.sampling.max_new_tokens)


def _policies(profile: "Profile") -> str:
    draft = profile.draft.at_work() if profile.draft is not None else None
    return " / ".join([level.policy.name for level in draft.levels] if draft is not None else ["none"])


def title_of(profile: "Profile") -> str:
    """The names of the models that take part."""
    from specctl.profile.schema import LOOKUP

    draft = profile.draft.at_work() if profile.draft is not None else None
    lookup = [LOOKUP] if draft is not None and draft.lookup else []
    drafts = [level.model for level in draft.levels] if draft is not None else []
    return " + ".join([profile.target.model, *lookup, *drafts])


def _opening(record: Record) -> str:
    """The text of a record that its panel shows first."""
    if "messages" in record.data:
        return "\n".join(message["content"] for message in read_messages(record.data["messages"]))
    return "\n".join(record.data["turns"][:1]) if "turns" in record.data else str(record.data["prompt"])


class Watcher:
    """Turns rounds into pieces of text, passes them to a view and a sink, and keeps the text.

    Attributes:
        view: shows pieces; None to show nothing.
        shown: the pieces, in order.
        written: number of characters written to the sink; characters that may start a stop string are held back.
    """

    def __init__(
        self, answerer: "Answerer", view: ShownText | None, trace: "OnRound | None", sink: Sink | None = None
    ) -> None:
        from specctl.decoding.text import TextStream

        self._stream: Callable[[Sequence[int]], TextStream] = partial(
            TextStream, answerer.prompts.tokenizer, ends=answerer.session.ends
        )
        self.view, self._trace, self._sink = view, trace, sink
        self._text: TextStream | None = None
        self._turn = -1
        self._stops = answerer.settings.stop
        self.shown = ""
        self.written = 0

    def __call__(self, turn: int, prompt: Sequence[int], round_: Round) -> None:
        if self._trace is not None:
            self._trace(turn, prompt, round_)
        if self._text is None or turn != self._turn:
            self._turn, self._text = turn, self._stream(prompt)
        kept, drafted = round_.accepted_tokens, round_.drafted - round_.copied
        groups = (
            ((kept[:drafted], Origin.ACCEPTED), (kept[drafted:], Origin.COPIED))
            if round_.copied
            else ((kept, Origin.ACCEPTED),)
        )
        pieces = [Piece(self._text.push(tokens), origin) for tokens, origin in groups if tokens]
        if round_.extra is not None and round_.extra_kind is not None:
            pieces.append(Piece(self._text.push([round_.extra]), ORIGINS[round_.extra_kind]))
        self.shown += "".join(piece.text for piece in pieces)
        if self.view is not None:
            self.view.on_round(round_, pieces)
        if self._sink is not None:
            from specctl.decoding.text import shown_length

            safe = shown_length(self.shown, self.written, self._stops)
            write_text(self._sink, self.shown[self.written : safe])
            self._sink.flush()
            self.written = safe

    def rest(self) -> str:
        """Text held back because its last character is incomplete."""
        return self._text.flush() if self._text is not None else ""


def show_prompt(
    answerer: "Answerer", record: Record, sink: Sink, trace: "OnRound | None", view: LiveView | None
) -> None:
    """Answer one prompt and write its text to ``sink``, all at once after a live panel, else as it grows.

    After a panel, the prompt of a continued text precedes its completion, and the figures follow. On an interrupt, the
    text generated so far is written.
    """
    terminal = WordWrap(sink) if sink.isatty() else None
    sink = terminal or sink
    watcher = Watcher(answerer, None, trace, sink if view is None else None)
    completion: Completion | None = None
    interrupted = False
    try:
        with nullcontext() if view is None else view.text("", _opening(record)) as watcher.view:
            (completion,) = answerer.answer(record, watcher)
    except KeyboardInterrupt:
        interrupted = True
        raise
    finally:
        text = watcher.shown + watcher.rest() if completion is None else completion.text
        if view is not None and text and terminal is not None and not answerer.prompts.chat:
            recall(view.console, _opening(record), terminal)
        write_text(sink, text[watcher.written :] + "\n" * bool(text or completion))
        sink.flush()
        if watcher.view is not None and (completion is not None or interrupted):
            watcher.view.finish(completion)
