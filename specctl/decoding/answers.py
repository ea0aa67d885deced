"""Turns an input record into its completions, one for each turn."""

import json
import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence, Set
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from specctl.decoding.composition import build_drafter
from specctl.decoding.draft import Drafter
from specctl.decoding.prompt_format import PromptFormat
from specctl.errors import ProfileError, RecordError, UsageError, of_onnxruntime, out_of_memory, reason
from specctl.jsonl import Record
from specctl.models.running.pair import Pair
from specctl.policies import Setting, Signal
from specctl.processes import interrupt
from specctl.profile import parse_policy
from specctl.profile.schema import DraftTable, PolicyTable, SamplingTable, with_one_grammar
from specctl.profile.wording import did_you_mean, shown
from specctl.record_settings import own_settings
from specctl.records import Completion, CompletionSummary, Round

TURN_STRIDE = 1_000_003
"""Added to the seed from turn to turn, so that turns draw independently of each other and of other records."""
OnRound = Callable[[int, Sequence[int], Round], None]
"""Called after each round with the number of the turn, the ids of its prompt, and the round."""


class TurnRound(NamedTuple):
    """A round of a record's turn: the turn's number ``turn`` and the ids of its prompt, ``prompt``."""

    turn: int
    prompt: Sequence[int]
    round: Round


class TurnEnd(NamedTuple):
    """A record's turn after its last round."""

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
    """Answers records: a prompt, a chat, or a conversation whose answers are fed back turn by turn."""

    session: Generates  # completes prompts
    prompts: PromptFormat  # makes those prompts
    settings: SamplingTable  # for records without settings of their own
    start: Callable[[Record], None] = lambda _: None  # called with each record before it is answered

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
            done: the first turns, already answered by an earlier run. They are neither answered again nor returned.
        """
        if record.error is not None:
            raise record.error
        settings = self.settings_of(record)
        # Without an offset: a record's own seed is used unchanged.
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
        """The ids of a record's prompt; of a conversation, the ids up to the first turn without an answer."""
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
    if not detail["loc"]:  # the error concerns several keys
        return detail["msg"].removeprefix("Value error, ")
    first, *rest = map(str, detail["loc"])
    key = ".".join([own[first][0], *rest])
    if detail["type"] == "extra_forbidden":
        return f"{key}: unknown key{did_you_mean(str(detail['loc'][-1]), SamplingTable.model_fields)}"
    return f"{key}: {shown(detail['input'])} {detail['msg'].replace('Input should be', 'must be')}"


@contextmanager
def failures_of_a_text() -> Iterator[None]:
    """Turn what the models' code raises over one text into a RecordError, so that other texts go on.

    Errors that would recur for every text pass unchanged: a broken device, and an interrupt that native code turned
    into an error of its own.
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


KEPT = 8  # Named policies whose drafters are cached, with what they learned
LONGEST_WORD = 20  # A ``draft`` field up to this many characters is taken for an answer, such as ``no``


class NamedDrafters:
    """The profile's drafter, and one for each policy that a text names instead of the profile's.

    A named policy decides for its own text alone, even where the other texts of a batch are decided on together.

    Args:
        pair: loaded, or the pair of a batch slot.
        draft: the profile's table; None without a draft.
        signals: to record at every level whether or not a policy reads them.
    """

    def __init__(self, pair: Pair, draft: DraftTable | None, signals: Set[Signal] = frozenset()) -> None:
        self._pair, self._draft, self._signals = pair, draft, signals
        self._own = None if draft is None else build_drafter(pair, draft.setting, signals)
        self._others: dict[Setting, Drafter | None] = {}

    def setting(self, policy: str | None, *, drafts: bool = True, place: str = "policy") -> Setting | None:
        """The setting for a text; None where nothing is to be drafted.

        Args:
            policy: of the draft that the target verifies, as ``--policy`` writes it; None for the profile's.
            drafts: whether the text shall have drafts.
            place: the field or flag that names the policy, for messages.

        Raises:
            ProfileError: the policy is unknown, or it cannot stop this draft.
            UsageError: a policy is named without a draft.
        """
        draft = self._draft
        if policy is None:
            return draft.setting if draft is not None and drafts else None
        if draft is None:
            raise UsageError("there is no draft for a policy to stop", f"leave {place} out")
        table = PolicyTable(**parse_policy(policy, place))
        found = draft.model_copy(update={"policy": table, "batch_policies": None}).setting
        if found.parallel and not found.fixed_length:
            raise ProfileError(f"a draft in parallel is stopped by a fixed length alone, and {place} names {policy}")
        return found if drafts else None

    def of(self, policy: str | None, *, drafts: bool = True, place: str = "policy") -> Drafter | None:
        """The drafter for a text, see `setting`; None where nothing is to be drafted."""
        setting = self.setting(policy, drafts=drafts, place=place)
        if policy is None:
            return self._own if drafts else None
        if setting is None:
            return None
        found = self._others.pop(setting, None) or build_drafter(alone(self._pair), setting, self._signals)
        while len(self._others) >= KEPT:
            del self._others[next(iter(self._others))]
        self._others[setting] = found  # the most recently used one is last
        return found

    def of_record(self, data: Mapping[str, Any]) -> Drafter | None:
        """The drafter for a record, with the ``policy`` that the record names; None where its ``draft`` is false.

        Raises:
            RecordError: the policy is unknown or cannot stop this draft; or ``draft`` looks like an answer other than
                true or false.
        """
        policy, drafts = data.get("policy"), data.get("draft") is not False
        if _seems_an_answer(data.get("draft")):
            raise RecordError("invalid_draft", f"draft must be true or false, and is {json.dumps(data['draft'])}")
        if policy is not None and not isinstance(policy, str):
            raise RecordError("invalid_policy", "policy must be a string such as svip:threshold=0.4")
        if policy is not None and not drafts:
            raise RecordError("invalid_policy", "a policy stops drafts, and draft is false; leave one of them out")
        try:
            return self.of(policy, drafts=drafts)
        except (ProfileError, UsageError) as error:
            raise RecordError("invalid_policy", error.message) from error


def _seems_an_answer(draft: object) -> bool:
    """Whether a record's ``draft`` is a number or a word; longer texts and objects are a data set's own field."""
    if isinstance(draft, str):
        return len(draft.split()) < 2 and len(draft) <= LONGEST_WORD
    return isinstance(draft, int | float) and not isinstance(draft, bool)


def alone(pair: Pair) -> Pair:
    """A pair whose policies decide for its own text."""
    return replace(pair, policy=Setting.build)
