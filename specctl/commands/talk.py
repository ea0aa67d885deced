"""Runs a conversation: reads the user's lines, writes answers to one stream and everything else to another."""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any

from rich.console import Console
from rich.text import Text

from specctl.commands.watching import Watcher, title_of, view_of
from specctl.conversation import ESCAPED, SLASHES, Chat, RemoteChat, Turn, is_slash, run_slash
from specctl.errors import SpecctlError, UsageError
from specctl.outputs import Outputs, Sink
from specctl.printable import printable
from specctl.processes import interruptible
from specctl.profile import resolve
from specctl.profile.schema import EMBEDDED
from specctl.records import FinishReason
from specctl.remote import Server
from specctl.terminal.line_input import LineInput, joined, unechoed
from specctl.terminal.output import WordWrap, print_message, wrapped, write_text

LEAVES = ("exit", "quit", "bye")  # Words that end the conversation, besides /quit
OPENING = "Once upon a time"
LEAVING = "Ctrl-C again or Ctrl-D leaves; /help shows what else there is"


class Talk:
    """A conversation on standard streams.

    Attributes:
        failed: whether a turn or command failed.
    """

    def __init__(self, chat: Chat, console: Console, sink: Sink, *, person: bool, live: bool, quiet: bool) -> None:
        self.chat = chat
        self.failed = False
        self._console, self._sink = console, wrapped(sink)
        self._person, self._live, self._quiet = person, live, quiet

    def run(self) -> bool:
        """Talk until the end; returns whether a line failed."""
        if self._person:
            self.ask()
        else:
            self.read()
        return self.failed

    def ask(self) -> None:
        """Read typed lines until the person leaves; two interrupts in a row raise KeyboardInterrupt."""
        if not self._quiet:
            self._introduce()
        lines = LineInput(SLASHES)
        interrupts = 0
        while True:
            try:
                line = lines.ask()
                interrupts = 0
                if not self.handle(line):
                    return
            except EOFError:
                self._tell("")
                return
            except KeyboardInterrupt:
                self._tell("")
                interrupts += 1
                if interrupts > 1:
                    raise
                self._tell(LEAVING)

    def read(self) -> None:
        """Read every line of a pipe or a file."""
        for line in joined(self._lines()):
            if not self.handle(line):
                return

    def handle(self, line: str) -> bool:
        """Answer one turn or run one slash command; returns whether the conversation continues."""
        if not line.strip():
            return True
        try:
            if is_slash(line):
                reply = run_slash(self.chat, line)
                if reply.text:
                    self._tell(reply.text)
                if not reply.answer:
                    return not reply.leave
            elif self._person and line.strip().lower() in LEAVES:
                return False
            else:
                self.chat.say(line[1:] if line.startswith(ESCAPED) else line)
            self._answer()
        except SpecctlError as error:
            self._report(error)
        return True

    def _introduce(self) -> None:
        self._tell(f"{title_of(self.chat.profile)} · {self.chat.policy}; /help lists commands")
        if self.chat.profile.target.model.startswith(EMBEDDED):
            self._tell(f"demonstration models, which only continue stories; try: {OPENING}")
        if not self.chat.through_template:
            missing = not self.chat.pair.tokenizer.chat_template
            why = "the target has no chat template" if missing else "no chat template used"
            self._tell(f"{why}: turns are joined as plain text")

    def _lines(self) -> Iterator[str]:
        for raw in sys.stdin.buffer:
            try:
                yield raw.decode("utf-8").lstrip("\ufeff").rstrip("\r\n")
            except UnicodeDecodeError as error:
                self._report(UsageError(f"a line of standard input is not UTF-8 ({error.reason})"))

    def _answer(self) -> None:
        guard = interruptible() if self._person else nullcontext(_never)
        with guard as enough, unechoed() if self._person else nullcontext():
            try:
                turn, written = self._written(enough)
            except SpecctlError:
                self._end()
                raise
        interrupted = turn is None or turn.finish_reason is FinishReason.INTERRUPTED
        if turn is not None:
            text = (turn.answer or "")[written:]
            write_text(self._sink, f"{text}\n")
            self._sink.flush()
        else:
            self._end()
        if interrupted and not self._person:
            raise KeyboardInterrupt
        if interrupted or (self._person and not self._quiet):
            self._tell(self._ending(turn))

    def _end(self) -> None:
        """Flush the pending text of an answer that has ended."""
        if isinstance(self._sink, WordWrap):
            self._sink.end()

    def _written(self, enough: Callable[[], bool]) -> tuple[Turn | None, int]:
        """The result of `Chat.answer`, and the number of characters written to the stream."""
        shown = view_of(self.chat.profile, self._console).text("", "") if self._live else nullcontext()
        with shown as view:
            watcher = Watcher(self.chat.answerer, view, None, None if self._live else self._sink)
            return self.chat.answer(watcher, enough), watcher.written

    def _ending(self, turn: Turn | None) -> str:
        """Report an answer: its numbers, and the reason if it ended early."""
        if turn is None:
            return "interrupted before anything was written; the conversation is as before"
        parts = self._figures(turn)
        if turn.finish_reason is FinishReason.INTERRUPTED:
            parts.append("interrupted; what was written stays")
        elif self.chat.fills_context(turn):
            parts.append(f"the context of {self.chat.pair.context} tokens is full; /undo or /reset makes room")
        elif turn.finish_reason is FinishReason.LENGTH:
            parts.append("ended at max_new_tokens")
        return " · ".join(parts)

    def _figures(self, turn: Turn) -> list[str]:
        if (done := turn.completion) is None:
            return []
        drafted = sum(round_.drafted for round_ in done.rounds)
        accepted = sum(round_.accepted for round_ in done.rounds)
        parts = [f"{len(done.tokens)} tokens", f"{len(done.tokens) / done.total_ms * 1e3:.1f} tokens/s"]
        return [*parts, f"acceptance rate {accepted / drafted:.1%}"] if drafted else parts

    def _tell(self, text: str) -> None:
        # The wrapping of a terminal would break words; a file or a pipe gets unbroken lines.
        self._console.print(Text(printable(text), style="dim"), soft_wrap=not self._console.is_terminal)

    def _report(self, error: SpecctlError) -> None:
        self.failed = True
        print_message(error.full_message, "error", "1;31")


def _never() -> bool:
    return False


class RemoteTalk(Talk):
    """A `Talk` with answers from `RemoteChat`."""

    chat: RemoteChat

    def _introduce(self) -> None:
        self._tell(f"{self.chat.server.model} at {self.chat.server.url}; /help lists commands")
        if not self.chat.through_template:
            self._tell("no chat template used: turns are joined as plain text")

    def _written(self, enough: Callable[[], bool]) -> tuple[Turn | None, int]:
        written = 0

        def write(text: str) -> None:
            nonlocal written
            write_text(self._sink, text)
            self._sink.flush()
            written += len(text)

        self.chat.heard = write
        return self.chat.answer(None, enough), written

    def _figures(self, turn: Turn) -> list[str]:  # noqa: ARG002
        usage, parts = self.chat.usage, []
        if usage.completion is not None:
            parts += [f"{usage.completion} tokens", f"{usage.completion / self.chat.seconds:.1f} tokens/s"]
        if usage.accepted is not None and (drafted := usage.accepted + (usage.rejected or 0)):
            parts.append(f"acceptance rate {usage.accepted / drafted:.1%}")
        return parts


def talk_with(
    server: Server,
    flags: Mapping[str, Any],
    console: Console,
    sink: Sink,
    outputs: Outputs,
    *,
    person: bool,
    quiet: bool,
) -> bool:
    """Talk until the end; returns whether a line failed."""
    import httpx

    # The server applies its own template; whether it has one is not known here.
    flags = {**flags, "prompt.chat": flags.get("prompt.chat") is not False}
    with httpx.Client(**server.settings) as client:
        chat = RemoteChat(server, client, resolve(flags=flags, environ={}).profile, outputs)
        return RemoteTalk(chat, console, sink, person=person, live=False, quiet=quiet).run()
