"""An input record becomes its completions, one for each turn."""

import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from specctl.decoding.prompt_format import PromptFormat
from specctl.errors import RecordError, of_onnxruntime, out_of_memory, reason
from specctl.jsonl import Record
from specctl.processes import interrupt
from specctl.profile.schema import SamplingTable, with_one_grammar
from specctl.profile.wording import did_you_mean, shown
from specctl.record_settings import own_settings
from specctl.records import Completion, CompletionSummary, Round

TURN_STRIDE = 1_000_003
"""Added to the seed from turn to turn, so that turns draw independently of each other and of other records."""
OnRound = Callable[[int, Sequence[int], Round], None]
"""Called after each round with the number of the turn, the ids of its prompt, and the round."""


class TurnRound(NamedTuple):
    """A round of a record's turn, whose number is ``turn`` and the ids of whose prompt are ``prompt``."""

    turn: int
    prompt: Sequence[int]
    round: Round


class TurnEnd(NamedTuple):
    """A record's turn that has ended."""

    turn: int
    completion: Completion | CompletionSummary


class Generates(Protocol):
    """Completes a prompt of ids: a `Session`, or transformers' own assisted generation."""

    @property
    def ends(self) -> frozenset[int]:
        """Ids that end a text."""

    def play(
        self, prompt: Sequence[int], settings: SamplingTable, *, seed_offset: int = 0
    ) -> Generator[Round, bool | None, Completion]:
        """Yields rounds, where they are visible, and returns the completion."""


@dataclass(frozen=True, slots=True)
class Answerer:
    """Answers records: a prompt, a chat, or a conversation whose answers are fed back turn by turn.

    Attributes:
        session: completes prompts.
        prompts: makes them.
        settings: in force where a record has none of its own.
        start: called with each record before it is answered.
    """

    session: Generates
    prompts: PromptFormat
    settings: SamplingTable
    start: Callable[[Record], None] = lambda _: None

    def answer(self, record: Record, on_round: OnRound | None = None) -> list[Completion]:
        """One completion, or one per turn.

        Args:
            record: to answer.
            on_round: called with each round as it ends.

        Raises:
            RecordError: the record cannot be answered.
        """
        with closing(self.play(record)) as playing:
            while True:
                try:
                    happened = next(playing)
                except StopIteration as end:
                    completions: list[Completion] = end.value
                    return completions
                if on_round is not None and isinstance(happened, TurnRound):
                    on_round(*happened)

    def play(
        self, record: Record, done: Sequence[CompletionSummary] = ()
    ) -> Generator[TurnRound | TurnEnd, None, list[Completion]]:
        """`answer` step by step.

        Args:
            record: to answer.
            done: the first turns, which an earlier run has answered; they are not answered again, nor returned.
        """
        if record.error is not None:
            raise record.error
        settings = self.settings_of(record)
        # A record's own seed is used as it is.
        offset = 0 if "seed" in own_settings(record.data) else record.line - 1
        completions: list[Completion] = []
        texts = [completion.text for completion in done]
        self.start(record)
        for turn in range(len(done), len(record.data.get("turns", ("",)))):
            ids = self.prompt_ids(record, texts)
            with (
                failures_of_a_text(),
                closing(self.session.play(ids, settings, seed_offset=offset + turn * TURN_STRIDE)) as playing,
            ):
                while True:
                    try:
                        round_ = next(playing)
                    except StopIteration as end:
                        completion: Completion = end.value
                        break
                    yield TurnRound(turn, ids, round_)
            completions.append(completion)
            texts.append(completion.text)
            yield TurnEnd(turn, completion)
        return completions

    def prompt_ids(self, record: Record, answers: Sequence[str] = ()) -> list[int]:
        """The ids of a record's prompt; in a conversation, of its turns up to the first that has no answer yet."""
        if "turns" in record.data:
            return self.prompts.conversation(record.data["turns"], answers)
        if "messages" in record.data:
            return self.prompts.messages(record.data["messages"])
        return self.prompts.prompt(record.data["prompt"])

    def settings_of(self, record: Record) -> SamplingTable:
        """The sampling table with the record's own settings; raises RecordError for invalid ones."""
        own = own_settings(record.data)
        if not own:
            return self.settings
        try:
            values = with_one_grammar({key: value for key, (_, value) in own.items()})
            return SamplingTable.model_validate({**self.settings.model_dump(), **values})
        except ValidationError as error:
            mistakes = "; ".join(_mistake(detail, own) for detail in error.errors(include_url=False))
            raise RecordError("invalid_sampling", mistakes) from error


def _mistake(detail: ErrorDetails, own: Mapping[str, tuple[str, Any]]) -> str:
    if not detail["loc"]:  # about several keys
        return detail["msg"].removeprefix("Value error, ")
    first, *rest = map(str, detail["loc"])
    key = ".".join([own[first][0], *rest])
    if detail["type"] == "extra_forbidden":
        return f"{key}: unknown key{did_you_mean(str(detail['loc'][-1]), SamplingTable.model_fields)}"
    return f"{key}: {shown(detail['input'])} {detail['msg'].replace('Input should be', 'must be')}"


@contextmanager
def failures_of_a_text() -> Iterator[None]:
    """Raise a RecordError for what the models' code raises over one text, so that other texts go on.

    What would fail for every text stays as it is: a device that can run nothing any more, and an interrupt that native
    code turned into an error of its own.
    """
    try:
        yield
    except Exception as error:
        if out_of_memory(error):
            what = reason(error) or type(error).__name__
            raise RecordError("out_of_memory", f"not enough memory for this text: {what}") from error
        if not (isinstance(error, RuntimeError | IndexError) or of_onnxruntime(error)):
            raise
        torch = sys.modules.get("torch")
        if interrupt.became(error) or (torch is not None and isinstance(error, torch.AcceleratorError)):
            raise
        what = f"{type(error).__name__}: {reason(error)}"
        raise RecordError("failed_pass", f"a pass failed over this text: {what}") from error
