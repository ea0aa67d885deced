"""A conversation with a loaded pair or a server: its turns, its settings and its slash commands."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from specctl.decoding.answers import TURN_STRIDE, Answerer, OnRound, failures_of_a_text
from specctl.decoding.composition import build_drafter
from specctl.decoding.prompt_format import PromptFormat
from specctl.decoding.session import Session
from specctl.decoding.text import decode_after
from specctl.errors import RecordError, SpecctlError, UsageError
from specctl.files import Content, content_of, write_line
from specctl.jsonl import Record, read_records
from specctl.messages import Message, read_messages
from specctl.metrics import Metrics, shown_rates
from specctl.models.running.pair import Pair
from specctl.outputs import Outputs, whole_lines
from specctl.profile import Profile, changed, parse_policy
from specctl.profile.schema import PolicyTable, PromptTable, SamplingTable, Table
from specctl.profile.wording import did_you_mean, shown
from specctl.records import CompletionSummary, FinishReason, Round
from specctl.remote import Server, Usage, api_settings
from specctl.streams import open_input

if TYPE_CHECKING:
    import httpx


@dataclass(slots=True)
class Turn:
    """A user message and its answer."""

    text: str  # the user's message
    answer: str | None = None  # None until it is written
    # why the answer ended; None if a file that it was loaded from does not say
    finish_reason: FinishReason | None = None
    completion: CompletionSummary | None = None  # statistics of the answer; None if unknown


@dataclass(slots=True)
class Transcript:
    """A conversation."""

    turns: list[Turn] = field(default_factory=list)  # in order; only the last may be without an answer
    system: str | None = None  # the system message of a loaded file; None without one

    @property
    def texts(self) -> list[str]:
        return [turn.text for turn in self.turns]

    @property
    def answers(self) -> list[str]:
        """The answers of all turns but the last, which is to be answered next."""
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
        """Remove the last turn; raises UsageError if there is none."""
        turn = self.last()
        self.turns.pop()
        return turn

    def as_record(self, *, chat: bool, system: str | None) -> dict[str, Any]:
        """The conversation in the format that `specctl generate` reads and writes.

        Args:
            chat: whether it goes through a chat template. Then ``messages`` end with the last turn's text, and
                ``completion`` is its answer. Otherwise there are ``turns`` with a completion for each.
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

    def save(self, path: Path, *, chat: bool, system: str | None, others: Outputs | None = None) -> None:
        """Append `as_record` to a file as one line.

        Args:
            path: the file.
            chat, system: see `as_record`.
            others: outputs and inputs; the file may not be one of them.

        Raises:
            UsageError: there is no turn, the file has other content or is one of ``others``, another process is writing
                it, or it cannot be written.
            OutputError: the line cannot be written whole; the file is then unchanged.
        """
        record = self.as_record(chat=chat, system=system)
        with (others or Outputs()).further() as outputs:
            file = outputs.file("conversation", path, resumed=True)
            if file.continued and (found := content_of(path)) not in (None, Content.PROMPTS, Content.COMPLETIONS):
                raise UsageError(f"{path} holds {found}, not conversations", "name another file")
            if file.continued and whole_lines(path) != path.stat().st_size:
                raise UsageError(f"the last line of {path} is not complete", "name another file")
            write_line(file, record)


def load_transcript(path: Path) -> Transcript:
    """Read the conversation in a file's last record: ``messages``, ``turns`` or a ``prompt``, answered or not.

    Raises:
        UsageError: the file cannot be read, or its last record is not a conversation of a user and an assistant.
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
    # Only the last turn of a conversation may be without an answer; turns after it were never said.
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


TABLES: dict[str, type[Table]] = {"sampling": SamplingTable, "prompt": PromptTable}
"""The tables of a profile that may change during a conversation."""


class Chat:
    """One conversation; models and their caches stay from turn to turn.

    Args:
        pair: loaded models: the target and every draft of the profile.
        profile: ``prompt.chat`` says whether turns go through the target's chat template or are joined as plain text.
            Where it is unset, they go through the template if there is one.
        outputs: outputs and inputs of the program; no conversation is saved to them.

    Attributes:
        profile: the settings of the next answer.
        transcript: the turns so far.
        metrics: of all answers so far, including removed ones.

    Raises:
        UsageError: the profile asks for a chat template, or has a system message, and there is no template.
    """

    def __init__(self, pair: Pair, profile: Profile, outputs: Outputs | None = None) -> None:
        self.pair = pair
        self._require_template(profile)
        self.profile = profile
        self.transcript = Transcript()
        self.metrics = Metrics()
        self._outputs = outputs
        self._session = Session(pair, None, keep_caches=True)
        self._asked = 0
        self._use_drafter()

    @property
    def answerer(self) -> Answerer:
        """The session with the settings in force."""
        prompts = PromptFormat.of(self.pair.tokenizer, self.profile.prompt)
        return Answerer(self._session, prompts, self.profile.sampling)

    @property
    def through_template(self) -> bool:
        """Whether turns go through the target's chat template; else they are joined as plain text."""
        return self.answerer.prompts.chat

    def say(self, text: str) -> None:
        """Add a turn, to be answered next."""
        self.transcript.turns.append(Turn(text))

    def answer(self, on_round: OnRound | None = None, enough: Callable[[], bool] = lambda: False) -> Turn | None:
        """Answer the last turn, again if it has an answer.

        If that fails or nothing is generated, an earlier answer stays, and a turn without an answer is removed.

        Args:
            on_round: see `Answerer.answer`; it receives the turn's number.
            enough: called after each round; returns whether to end the answer there.

        Returns:
            The turn with its answer; None if an interrupt came before the first round had ended.

        Raises:
            UsageError: nothing has been said yet.
            SpecctlError: the conversation fills the context, or cannot be made into a prompt.
        """
        turn = self.transcript.last()
        written = False
        try:
            written = self._write(turn, on_round, enough)
        except RecordError as error:
            raise _explained(error) from error
        finally:
            if turn.answer is None:
                self.transcript.undo()
        return turn if written else None

    def ask(self, text: str) -> str:
        """Add a turn and return the answer; raises the errors of `answer`."""
        self.say(text)
        turn = self.answer()
        return "" if turn is None else turn.answer or ""

    def _write(self, turn: Turn, on_round: OnRound | None, enough: Callable[[], bool]) -> bool:
        ids = self._prompt_ids()
        number = len(self.transcript.turns) - 1
        tokens: list[int] = []

        def watch(round_: Round) -> None:
            tokens.extend(round_.emitted)
            if on_round is not None:
                on_round(number, ids, round_)

        seed_offset = self._asked * TURN_STRIDE
        self._asked += 1
        try:
            with failures_of_a_text():
                done = self._session.generate(
                    ids, self.profile.sampling, seed_offset=seed_offset, on_round=watch, enough=enough
                )
        except KeyboardInterrupt:
            if tokens:
                turn.answer = decode_after(self.pair.tokenizer, ids, tokens, self.pair.eos)
                turn.finish_reason, turn.completion = FinishReason.INTERRUPTED, None
            return bool(tokens)
        turn.answer, turn.finish_reason, turn.completion = done.text, done.finish_reason, done.summary
        self.metrics.add(done.summary)
        return True

    def _prompt_ids(self) -> list[int]:
        prompts = self.answerer.prompts
        if prompts.chat:
            return prompts.messages(self.transcript.messages)
        return prompts.plain(self.transcript.texts, self.transcript.answers)

    def fills_context(self, turn: Turn) -> bool:
        """Whether the context, and not the token limit, ended an answer."""
        done = turn.completion
        return (
            done is not None
            and done.finish_reason is FinishReason.LENGTH
            and len(done.tokens) < self.profile.sampling.max_new_tokens
        )

    def figures(self) -> Iterator[tuple[str, str]]:
        """Speed and acceptance of all answers, by name."""
        metrics = self.metrics
        yield "answers", str(metrics.sequences)
        yield "generated tokens", str(metrics.generated_tokens)
        yield "tokens/s", f"{metrics.tokens_per_second:.1f}"
        yield "rounds", str(metrics.rounds)
        yield from shown_rates(metrics)
        yield "seconds on prompts", f"{metrics.prefill_seconds:.2f}"
        yield "seconds in all", f"{metrics.total_seconds:.2f}"

    def use_policy(self, text: str) -> None:
        """Switch to a policy given as ``NAME:KEY=VALUE,...``; in a hierarchy, that of the target's own draft.

        Raises:
            ProfileError: there is no such policy or setting, or it needs a head.
            UsageError: there is no draft.
        """
        draft = self.profile.draft
        if draft is None:
            raise UsageError("there is no draft for a policy to stop", "name one with --draft when the chat starts")
        table = PolicyTable(**parse_policy(text, "/policy"))
        before = self.profile
        self.profile = before.model_copy(update={"draft": draft.model_copy(update={"policy": table})})
        try:
            self._use_drafter()
        except SpecctlError:
            self.profile = before
            raise

    @property
    def policy(self) -> str:
        """The policy in force with its settings."""
        return "none" if self.profile.draft is None else self.profile.draft.setting.label

    def change(self, text: str) -> None:
        """Change a sampling or prompt setting given as ``KEY=VALUE``, such as ``temperature=0.7``.

        Raises:
            ProfileError: the value is wrong.
            UsageError: there is no such setting, or it needs a chat template that is missing.
        """
        self._put(changed(self.profile, f"{_key(text.partition('=')[0].strip())}{_after(text)}", "/set"))

    def say_first(self, system: str | None) -> None:
        """Change the system message, from the next answer on; raises UsageError without a chat template."""
        prompt = self.profile.prompt.model_copy(update={"system": system})
        self._put(self.profile.model_copy(update={"prompt": prompt}))

    def load(self, transcript: Transcript) -> None:
        """Continue a conversation with its system message; raises UsageError without a chat template for it."""
        if self.through_template or transcript.system is not None:
            self.say_first(transcript.system)
        self.transcript = transcript

    def save(self, path: Path) -> None:
        """Append the conversation to a file; see `Transcript.save`."""
        system = self.profile.prompt.system
        self.transcript.save(path, chat=self.through_template, system=system, others=self._outputs)

    def _put(self, profile: Profile) -> None:
        self._require_template(profile)
        self.profile = profile

    def _require_template(self, profile: Profile) -> None:
        if profile.prompt.chat and not self.pair.tokenizer.chat_template:
            raise UsageError("the target has no chat template", "leave prompt.chat out: turns are joined as plain text")
        if profile.prompt.system is not None and not PromptFormat.of(self.pair.tokenizer, profile.prompt).chat:
            raise UsageError("a system message needs a chat template", "plain turns cannot have one")

    def _use_drafter(self) -> None:
        draft = self.profile.draft
        self._session.drafter = None if draft is None else build_drafter(self.pair, draft.setting)


def _key(name: str) -> str:
    """The dotted key of a setting, given with or without its table."""
    known = {key: f"{table}.{key}" for table, schema in TABLES.items() for key in schema.model_fields}
    if name in known or name in known.values():
        return known.get(name, name)
    raise UsageError(f"/set {name}: there is no such setting{did_you_mean(name, known)}")


def _after(text: str) -> str:
    """The text from its first equals sign on."""
    return "".join(text.partition("=")[1:])


def _explained(error: RecordError) -> SpecctlError:
    if error.kind == "prompt_too_long":
        what = error.message.replace("the prompt", "the conversation")
        return SpecctlError(
            f"{what}, so this turn was not answered", "/undo takes the last turn back, /reset starts a new conversation"
        )
    return SpecctlError(error.message)


OURS = "specctl"
NOT_ASKED = frozenset({"verification", "regex", "grammar", "logprobs"})
"""Keys of the sampling table that requests to a server cannot have."""


class RemoteChat(Chat):
    """One conversation with a server; no model is loaded.

    Args:
        server: the server that answers.
        client: connected to it.
        profile: only its sampling and prompt tables count; turns go through the server's chat template unless
            ``prompt.chat`` is false.
        outputs: see `Chat`.

    Attributes:
        heard: receives each piece of an answer.
        usage: of the last answer.
        seconds: that the last answer took.

    Raises:
        UsageError: there is a system message, but no chat template for it.
    """

    def __init__(self, server: Server, client: "httpx.Client", profile: Profile, outputs: Outputs) -> None:
        self.server, self._client = server, client
        self._require_template(profile)
        self.profile = profile
        self.transcript = Transcript()
        self.metrics = Metrics()
        self.heard: Callable[[str], None] = lambda _: None
        self.usage, self.seconds = Usage(), 0.0
        self._outputs = outputs
        self._asked = 0
        self._policy: str | None = None
        self._sums = {"answers": 0, "generated tokens": 0, "drafted": 0, "accepted": 0}
        self._all_seconds = 0.0

    @property
    def through_template(self) -> bool:
        return self.profile.prompt.chat is not False

    def _write(self, turn: Turn, on_round: OnRound | None, enough: Callable[[], bool]) -> bool:  # noqa: ARG002
        texts: list[str] = []
        usage, reason, pieces = Usage(), None, 0
        began = perf_counter()
        body = self._body()
        self._asked += 1
        try:
            answer = self.server.stream(self._client, body)
            for chunk in answer:
                if chunk.text:
                    pieces += 1
                    texts.append(chunk.text)
                    self.heard(chunk.text)
                usage, reason = chunk.usage or usage, chunk.finish_reason or reason
                if enough():
                    reason = FinishReason.INTERRUPTED.value
                    answer.close()
                    break
        except KeyboardInterrupt:
            reason = FinishReason.INTERRUPTED.value
        if reason == FinishReason.INTERRUPTED.value and not texts:
            return False
        known = {one.value: one for one in FinishReason}
        turn.answer, turn.finish_reason, turn.completion = "".join(texts), known.get(reason or ""), None
        self.usage, self.seconds = usage, perf_counter() - began
        accepted = usage.accepted or 0
        added = 1, pieces if usage.completion is None else usage.completion, accepted + (usage.rejected or 0), accepted
        self._sums = {name: before + more for (name, before), more in zip(self._sums.items(), added, strict=True)}
        self._all_seconds += self.seconds
        return True

    def _body(self) -> dict[str, Any]:
        plain, sampling = SamplingTable(), self.profile.sampling
        settings = {
            key: value
            for key, value in sampling.model_dump().items()
            if key in ("temperature", "max_new_tokens") or (key not in NOT_ASKED and value != getattr(plain, key))
        }
        if sampling.temperature:
            settings["seed"] = sampling.seed + self._asked
        found = api_settings(settings, chat=self.through_template)
        if self._policy is not None:
            found["specctl"] = {"policy": self._policy}
        if not self.through_template:
            both = zip(self.transcript.texts, [*self.transcript.answers, ""], strict=True)
            said = [text for pair in both for text in pair]
            return {**found, "prompt": "\n".join(said[:-1]) + "\n"}
        system = self.profile.prompt.system
        first = [] if system is None else [{"role": "system", "content": system}]
        return {**found, "messages": [*first, *self.transcript.messages]}

    def use_policy(self, text: str) -> None:
        """Set the policy of the next answers; raises UsageError unless the server is specctl's."""
        if self.server.owner != OURS:
            raise UsageError("/policy works only with specctl's servers: requests to others cannot name a policy")
        PolicyTable(**parse_policy(text, "/policy"))
        self._policy = text

    @property
    def policy(self) -> str:
        return self._policy or "of the server"

    def change(self, text: str) -> None:
        key = text.partition("=")[0].strip().removeprefix("sampling.")
        if key in NOT_ASKED:
            raise UsageError(f"/set {key}: requests to a server cannot have it")
        super().change(text)

    def figures(self) -> Iterator[tuple[str, str]]:
        tokens, drafted = self._sums["generated tokens"], self._sums["drafted"]
        yield "answers", str(self._sums["answers"])
        yield "generated tokens", str(tokens)
        yield "tokens/s", f"{tokens / self._all_seconds:.1f}" if self._all_seconds else "-"
        if drafted:
            yield "acceptance rate", f"{self._sums['accepted'] / drafted:.1%}"
        yield "seconds in all", f"{self._all_seconds:.2f}"

    def _require_template(self, profile: Profile) -> None:
        if profile.prompt.system is not None and profile.prompt.chat is False:
            raise UsageError("a system message needs a chat template", "plain turns cannot have one")


ESCAPED = "//"  # Escapes the slash at the start of a turn


@dataclass(frozen=True, slots=True)
class Reply:
    """The result of a slash command."""

    text: str = ""  # for the user; may be empty
    answer: bool = False  # whether to answer the last turn now
    leave: bool = False  # whether the conversation is over


@dataclass(frozen=True, slots=True)
class Slash:
    """A slash command; help shows its argument in square brackets where it is optional."""

    argument: str
    about: str
    run: Callable[[Chat, str], Reply]


def is_slash(line: str) -> bool:
    """Whether a line is a command and not a turn."""
    return line.startswith("/") and not line.startswith(ESCAPED)


def run_slash(chat: Chat, line: str) -> Reply:
    """Run a slash command.

    Raises:
        UsageError: there is no such command, its argument is missing, or it takes none.
        SpecctlError: it fails.
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
        raise UsageError(f"{name} takes no argument")
    return slash.run(chat, argument)


def _help(_: Chat, __: str) -> Reply:
    heads = [f"{name} {slash.argument}".rstrip() for name, slash in SLASHES.items()]
    width = max(map(len, heads))
    lines = [f"{head:{width}}  {slash.about}" for head, slash in zip(heads, SLASHES.values(), strict=True)]
    more = "a line that ends in a backslash continues in the next; Ctrl-C ends an answer, Ctrl-D the conversation"
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
