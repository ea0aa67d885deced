"""A conversation with a loaded pair, whose policy and settings may change between turns."""

from collections.abc import Callable, Iterator
from pathlib import Path

from specctl.conversation.transcript import Transcript, Turn
from specctl.decoding.answers import TURN_STRIDE, Answerer, OnRound, failures_of_a_text
from specctl.decoding.composition import build_drafter
from specctl.decoding.prompt_format import PromptFormat
from specctl.decoding.session import Session
from specctl.decoding.text import decode_after
from specctl.errors import RecordError, SpecctlError, UsageError
from specctl.metrics import Metrics, shown_rates
from specctl.models.running.pair import Pair
from specctl.outputs import Outputs
from specctl.profile import Profile, changed, parse_policy
from specctl.profile.schema import PolicyTable, PromptTable, SamplingTable, Table
from specctl.profile.wording import did_you_mean
from specctl.records import FinishReason, Round

TABLES: dict[str, type[Table]] = {"sampling": SamplingTable, "prompt": PromptTable}
"""The tables of a profile that may change during a conversation."""


class Chat:
    """One conversation; models and their caches stay from turn to turn.

    Args:
        pair: loaded models: the target and every draft of the profile.
        profile: ``prompt.chat`` says whether turns go through the target's chat template or are joined as plain text;
            unset, they do where there is a template.
        outputs: of the program: no conversation is saved in one of them, nor in one of its inputs.

    Attributes:
        profile: what is in force for the next answer.
        transcript: what was said.
        metrics: of all answers so far, those taken back included.

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
        """Answer the last turn, anew if it has an answer.

        If that fails or nothing is written, the earlier answer stays, and a turn without one is taken back.

        Args:
            on_round: as in `Answerer.answer`, called with the turn's number.
            enough: asked after each round whether to end the answer there.

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
        """Say something and return the answer; errors as of `answer`."""
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
        """Switch to a policy given as ``NAME:KEY=VALUE,...``; in a hierarchy the target's own draft gets it.

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
        """Take over a conversation with its system message; raises UsageError if that has no place."""
        if self.through_template or transcript.system is not None:
            self.say_first(transcript.system)
        self.transcript = transcript

    def save(self, path: Path) -> None:
        """Append the conversation to a file; see `Transcript.save`."""
        system = self.profile.prompt.system
        self.transcript.save(path, chat=self.through_template, system=system, beside=self._outputs)

    def _put(self, profile: Profile) -> None:
        self._require_template(profile)
        self.profile = profile

    def _require_template(self, profile: Profile) -> None:
        if profile.prompt.chat and not self.pair.tokenizer.chat_template:
            raise UsageError("the target has no chat template", "leave prompt.chat out: turns are joined as plain text")
        if profile.prompt.system is not None and not PromptFormat.of(self.pair.tokenizer, profile.prompt).chat:
            raise UsageError("a system message needs a chat template", "plain turns have no place for one")

    def _use_drafter(self) -> None:
        draft = self.profile.draft
        self._session.drafter = None if draft is None else build_drafter(self.pair, draft.setting)


def _key(name: str) -> str:
    """The dotted key of a setting that may be given by its last part alone."""
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
            f"{what}, so this turn was not taken", "/undo takes the last turn back, /reset starts a new conversation"
        )
    return SpecctlError(error.message)
