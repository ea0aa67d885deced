"""The turns of a conversation, and the record that they are saved as."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specctl.errors import UsageError
from specctl.files import Content, content_of, write_line
from specctl.jsonl import Record, read_records
from specctl.messages import Message, read_messages
from specctl.metrics import Metrics
from specctl.outputs import Outputs
from specctl.outputs.file import whole_lines
from specctl.records import CompletionSummary, FinishReason
from specctl.streams import open_input


@dataclass(slots=True)
class Turn:
    """What the user said, and the answer.

    Attributes:
        text: the user's.
        answer: None before there is one.
        finish_reason: why the answer ended; None if it was loaded from a file that does not say.
        completion: the answer's numbers; None if they are not known.
    """

    text: str
    answer: str | None = None
    finish_reason: FinishReason | None = None
    completion: CompletionSummary | None = None


@dataclass(slots=True)
class Transcript:
    """A conversation: turns in order, of which only the last may be without an answer.

    Attributes:
        turns: in order.
        system: the system message that a loaded file brought; None without one.
    """

    turns: list[Turn] = field(default_factory=list)
    system: str | None = None

    @property
    def texts(self) -> list[str]:
        return [turn.text for turn in self.turns]

    @property
    def answers(self) -> list[str]:
        """The answers of all turns but the last, whose answer is the next to be written."""
        return [turn.answer or "" for turn in self.turns[:-1]]

    @property
    def messages(self) -> list[dict[str, str]]:
        """The chat up to the last turn's text, without a system message."""
        return list(_messages(self.texts, self.answers))

    def last(self) -> Turn:
        """The last turn; raises UsageError if there is none."""
        if not self.turns:
            raise UsageError("nothing has been said yet")
        return self.turns[-1]

    def undo(self) -> Turn:
        """Take the last turn back; raises UsageError if there is none."""
        turn = self.last()
        self.turns.pop()
        return turn

    def as_record(self, *, chat: bool, system: str | None) -> dict[str, Any]:
        """The conversation as `specctl generate` reads and writes one.

        Args:
            chat: whether it goes through a chat template: then ``messages`` end with the last turn's text and
                ``completion`` is its answer. Else it is ``turns`` with a completion for each.
            system: the system message of a chat.
        """
        last = self.last()
        metrics = Metrics()
        for turn in self.turns:
            if turn.completion is not None:
                metrics.add(turn.completion)
        reasons = [None if turn.finish_reason is None else turn.finish_reason.value for turn in self.turns]
        if not chat:
            said = [turn.answer for turn in self.turns if turn.answer is not None]
            record = {"turns": self.texts, "completion": said, "finish_reason": reasons[: len(said)]}
            return {**record, "metrics": metrics.as_record()}
        first = [] if system is None else [{"role": "system", "content": system}]
        answer = {} if last.answer is None else {"completion": last.answer, "finish_reason": reasons[-1]}
        return {"messages": [*first, *self.messages], **answer, "metrics": metrics.as_record()}

    def save(self, path: Path, *, chat: bool, system: str | None, beside: Outputs | None = None) -> None:
        """Append `as_record` to a file as one line.

        Args:
            path: the file.
            chat, system: as in `as_record`.
            beside: outputs and inputs, none of which the file may be.

        Raises:
            UsageError: nothing has been said, the file holds something else or is one of those, another process is
                writing it, or it cannot be written.
            OutputError: the line cannot be written whole; then the file is as before.
        """
        record = self.as_record(chat=chat, system=system)
        with (beside or Outputs()).further() as outputs:
            file = outputs.file("conversation", path, resumed=True)
            if file.continued and (found := content_of(path)) not in (None, Content.PROMPTS, Content.COMPLETIONS):
                raise UsageError(f"{path} holds {found}, not conversations", "name another file")
            if file.continued and whole_lines(path) != path.stat().st_size:
                raise UsageError(f"the last line of {path} is not complete", "name another file")
            write_line(file, record)


def load_transcript(path: Path) -> Transcript:
    """The conversation of a file's last record: ``messages``, ``turns`` or a ``prompt``, answered or not.

    Raises:
        UsageError: the file cannot be read, or its last record is no conversation of a user and an assistant.
    """
    with open_input(str(path)) as stream:
        try:
            records = list(read_records(stream))
        except OSError as error:
            raise UsageError(f"cannot read {path}: {error.strerror}") from error
    if not records:
        raise UsageError(f"{path} is empty")
    record = records[-1]
    if record.error is not None:
        raise UsageError(f"{path}:{record.line}: {record.error.message}")
    found = _transcript(record)
    if found is None:
        raise UsageError(
            f"{path}:{record.line}: a conversation is a system message, if any, then user and assistant in turn, "
            "each with a text alone"
        )
    return found


def _transcript(record: Record) -> Transcript | None:
    data = record.data
    completion = data.get("completion")
    if "messages" in data:
        return _of_messages(read_messages(data["messages"]), completion)
    texts = data["turns"] if "turns" in data else [data["prompt"]]
    answers = completion if isinstance(completion, list) else [completion]
    if completion is None:
        answers = []
    if len(answers) > len(texts) or not all(isinstance(answer, str) for answer in answers):
        return None
    turns = [Turn(text, answer) for text, answer in zip(texts, answers, strict=False)]
    # Only the last turn of a conversation may be without an answer; the rest was never said.
    return Transcript([*turns, *(Turn(text) for text in texts[len(turns) : len(turns) + 1])])


def _of_messages(messages: Sequence[Message], completion: object) -> Transcript | None:
    if any(message.keys() > {"role", "content"} for message in messages):
        return None  # the next prompt would be without a name, or without a tool's call
    system = messages[0]["content"] if messages[0]["role"] == "system" else None
    said = list(messages[system is not None :])
    if isinstance(completion, str):
        said.append({"role": "assistant", "content": completion})
    expected = ["user" if index % 2 == 0 else "assistant" for index in range(len(said))]
    if not said or [message["role"] for message in said] != expected:
        return None
    texts, answers = ([message["content"] for message in said[start::2]] for start in (0, 1))
    padded: Iterable[str | None] = [*answers, None][: len(texts)]
    return Transcript([Turn(text, answer) for text, answer in zip(texts, padded, strict=True)], system)


def _messages(texts: Sequence[str], answers: Sequence[str]) -> Iterator[dict[str, str]]:
    for number, text in enumerate(texts):
        yield {"role": "user", "content": text}
        if number < len(answers):
            yield {"role": "assistant", "content": answers[number]}
