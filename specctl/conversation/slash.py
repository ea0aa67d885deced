"""Lines that begin with a slash: commands about the conversation instead of a part of it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from specctl.conversation.conversation import TABLES, Chat
from specctl.conversation.transcript import load_transcript
from specctl.errors import UsageError
from specctl.profile.wording import did_you_mean, shown

ESCAPED = "//"
"""Begins a turn whose text begins with a single slash."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What a slash command leads to.

    Attributes:
        text: for the user; may be empty.
        answer: whether the last turn is to be answered now.
        leave: whether the conversation is over.
    """

    text: str = ""
    answer: bool = False
    leave: bool = False


@dataclass(frozen=True, slots=True)
class Slash:
    """A slash command: its argument as help shows it (square brackets where it may be missing), and what it does."""

    argument: str
    about: str
    run: Callable[[Chat, str], Reply]


def is_slash(line: str) -> bool:
    """Whether a line is a command and not a turn."""
    return line.startswith("/") and not line.startswith(ESCAPED)


def run_slash(chat: Chat, line: str) -> Reply:
    """Carry out a slash command.

    Raises:
        UsageError: there is no such command, its argument is missing, or it has one too many.
        SpecctlError: it cannot be carried out.
    """
    name, _, argument = line.strip().partition(" ")
    slash = SLASHES.get(name)
    if slash is None:
        raise UsageError(
            f"there is no command {name}{did_you_mean(name, SLASHES)}", "to send a line that starts with /, type //"
        )
    argument = argument.strip()
    if not argument and slash.argument and not slash.argument.startswith("["):
        raise UsageError(f"{name} needs {slash.argument}")
    if argument and not slash.argument:
        raise UsageError(f"{name} takes nothing behind it")
    return slash.run(chat, argument)


def _help(_: Chat, __: str) -> Reply:
    heads = [f"{name} {slash.argument}".rstrip() for name, slash in SLASHES.items()]
    width = max(map(len, heads))
    lines = [f"{head:{width}}  {slash.about}" for head, slash in zip(heads, SLASHES.values(), strict=True)]
    more = "a line that ends in a backslash goes on in the next; Ctrl-C ends an answer, Ctrl-D the conversation"
    return Reply("\n".join([*lines, more]))


def _policy(chat: Chat, text: str) -> Reply:
    if text:
        chat.use_policy(text)
    return Reply(f"policy {chat.policy}")


def _set(chat: Chat, text: str) -> Reply:
    if text:
        chat.change(text)
    return Reply("\n".join(_settings(chat)))


def _settings(chat: Chat) -> Iterator[str]:
    for table in TABLES:
        for key, value in getattr(chat.profile, table).model_dump(exclude_none=True).items():
            yield f"{table}.{key} = {shown(value)}"


def _system(chat: Chat, text: str) -> Reply:
    if text:
        chat.say_first(text)
    system = chat.profile.prompt.system
    return Reply("there is no system message" if system is None else f"system message: {system}")


def _undo(chat: Chat, _: str) -> Reply:
    return Reply(f"taken back: {chat.transcript.undo().text}")


def _retry(chat: Chat, _: str) -> Reply:
    chat.transcript.last()
    return Reply(answer=True)


def _reset(chat: Chat, _: str) -> Reply:
    chat.transcript.turns.clear()
    return Reply("a new conversation")


def _save(chat: Chat, name: str) -> Reply:
    path = Path(name).expanduser()
    chat.save(path)
    return Reply(f"added to {path}")


def _load(chat: Chat, name: str) -> Reply:
    path = Path(name).expanduser()
    chat.load(load_transcript(path))
    turns = chat.transcript.turns
    pending = "; /retry answers the last one" if turns[-1].answer is None else ""
    return Reply(f"{len(turns)} {'turn' if len(turns) == 1 else 'turns'} from {path}{pending}")


def _stats(chat: Chat, _: str) -> Reply:
    return Reply("\n".join(f"{name:24}{value:>10}" for name, value in chat.figures()))


SLASHES = {
    "/help": Slash("", "this list", _help),
    "/policy": Slash("[NAME:KEY=VALUE,...]", "show or switch the stopping policy", _policy),
    "/set": Slash("[KEY=VALUE]", "show or change sampling and prompt settings, such as temperature=0.7", _set),
    "/system": Slash("[TEXT]", "show or change the system message", _system),
    "/undo": Slash("", "take the last turn back", _undo),
    "/retry": Slash("", "answer the last turn again; when sampling, with other random draws", _retry),
    "/reset": Slash("", "start a new conversation; settings stay", _reset),
    "/save": Slash("FILE", "add the conversation to a file of JSON lines", _save),
    "/load": Slash("FILE", "continue the last conversation in a file", _load),
    "/stats": Slash("", "speed and acceptance of all answers so far", _stats),
    "/quit": Slash("", "leave", lambda _, __: Reply(leave=True)),
}
