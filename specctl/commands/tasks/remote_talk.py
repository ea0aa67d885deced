"""A conversation with a server on standard streams. No torch here."""

from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console

from specctl.commands.tasks.chat_dialogue import Talk
from specctl.conversation import RemoteChat, Turn
from specctl.outputs import Outputs, Sink
from specctl.profile import resolve
from specctl.remote import Server
from specctl.terminal.output import write_text


class RemoteTalk(Talk):
    """As `Talk`; `RemoteChat` answers."""

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
    """Talk until the end; whether a line could not be answered.

    Args:
        server: that answers.
        flags: what the user sets, by dotted key of a profile.
        console, sink, person, quiet: as of `Talk`.
        outputs: of the program.
    """
    import httpx

    # Its own template is the server's affair: no profile here says that there is none.
    flags = {**flags, "prompt.chat": flags.get("prompt.chat") is not False}
    with httpx.Client(**server.settings) as client:
        chat = RemoteChat(server, client, resolve(flags=flags, environ={}).profile, outputs)
        talk = RemoteTalk(chat, console, sink, person=person, live=False, quiet=quiet)
        if person:
            talk.ask()
        else:
            talk.read()
        return talk.failed
