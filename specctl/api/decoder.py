"""A loaded target with its drafts: the commands `generate` and `chat` as methods."""

import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import closing
from dataclasses import replace
from numbers import Integral
from os import PathLike, fspath
from typing import Any, Literal, TypedDict, Unpack, cast

from specctl.conversation import Chat
from specctl.decoding.answers import Answerer, failures_of_a_text
from specctl.decoding.composition import build_drafter
from specctl.decoding.prompt_format import PromptFormat
from specctl.decoding.session import Session, TextRequest
from specctl.decoding.text import TextStream, shown_length
from specctl.errors import ProfileError, RecordError, UsageError
from specctl.jsonl import Record
from specctl.models.loading.assembly import load_pair
from specctl.models.running.engines import EngineSettings
from specctl.models.running.pair import Pair
from specctl.models.running.passes import Passes
from specctl.profile import Profile, ResolvedProfile, parse_policy, resolve
from specctl.profile.schema import PolicyTable
from specctl.profile.wording import shown
from specctl.records import Completion, Round
from specctl.text_engine.dispatch import as_finished, in_order
from specctl.text_engine.engine import Writer, whole
from specctl.text_engine.here import HereEngine, Rows
from specctl.text_engine.pair_rows import why_alone
from specctl.text_engine.row_count import MOST, Batch, chosen_passes

NAMES = {"set": "overrides", "max-new-tokens": "max_new_tokens", "trust-remote-code": "trust_remote_code=True"}


def in_python(text: str) -> str:
    """A message with arguments of `load` in place of flags: ``target=MODEL`` for ``--target MODEL``."""

    def argument(found: re.Match[str]) -> str:
        name = NAMES.get(found["name"], found["name"].replace("-", "_"))
        return f"{name}={found['value']}" if found["value"] and "=" not in name else name

    return re.sub(r"(?:flag )?--(?P<name>[a-z][a-z-]*)(?: (?P<value>[A-Z][A-Z=|]+))?", argument, text)


AHEAD = 2
"""Prompts per batch slot that may be read ahead of the oldest unfinished one."""


Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]
"""A text, token ids, or the messages of a chat, each with ``role`` and ``content``."""


Request = Mapping[str, Any]
"""A ``prompt``, and settings of ``[sampling]`` for it alone."""

PROMPTS = "a prompt is a text, a list of token ids or a list of messages with role and content"


class SamplingSettings(TypedDict, total=False):
    """The settings of ``[sampling]`` in a profile (docs/profiles.md), for one prompt."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    typical_p: float
    epsilon_cutoff: float
    eta_cutoff: float
    top_h: float
    verification: Literal["token", "block"]
    max_new_tokens: int
    seed: int
    stop: list[str]
    logprobs: int
    json_schema: dict[str, Any] | bool
    regex: str
    grammar: str


def load(
    profile: str | PathLike[str] | None = None,
    *,
    target: str | None = None,
    draft: str | None = None,
    policy: str | None = None,
    overrides: Sequence[str] = (),
    trust_remote_code: bool = False,
    progress: Callable[[str], None] = lambda _: None,
) -> "Decoder":
    """Load a pair, selected by the same rules as on the command line.

    Args:
        profile: name or path of a profile; by default the pair of ``target`` and ``draft``, else the profile that
            ``SPECCTL_PROFILE`` names, else the embedded models.
        target: a folder or hub id; with a profile it replaces the profile's target.
        draft: a folder, a hub id, ``prompt:lookup`` or ``drafter:NAME``; it replaces a profile's draft.
        policy: a stopping policy, optionally with settings: ``"svip:threshold=0.4"``.
        overrides: ``KEY=VALUE`` texts, as ``--set`` takes them.
        trust_remote_code: let a profile that was found in ./profiles run a checkpoint's own code.
        progress: called with the name of each model before it is loaded, and with what an engine prepares.

    Raises:
        ProfileError: the profile cannot be found or read, or has mistakes, all of which are listed.
        ModelError: a model cannot be loaded, does not fit, or does not match the others.
    """
    name = None if profile is None else fspath(profile)
    flags: dict[str, Any] = {"target.model": target, "draft.model": draft}
    flags["draft.policy"] = None if policy is None else parse_policy(policy, "policy")
    try:
        resolved = resolve(name, overrides=overrides, flags=flags, trust_remote_code=trust_remote_code)
    except ProfileError as error:
        raise ProfileError(in_python(error.message), in_python(error.hint)) from error
    for note in (*resolved.notes, *resolved.outdated):
        warnings.warn(note, stacklevel=2)
    own = resolved.profile
    return Decoder(
        resolved, _opened(own, progress, predictors=own.draft is not None and own.draft.setting.needs_predictors)
    )


def _opened(profile: Profile, progress: Callable[[str], None] = lambda _: None, *, predictors: bool) -> Pair:
    """The pair of a profile, with or without the predictors that it names."""
    engines = EngineSettings.of(profile, notice=progress, progress=progress)
    pair = load_pair(profile, with_predictors=predictors, engines=engines, models=False, progress=progress)
    if pair.preparing_seconds is not None or pair.target.device.type == "cuda":
        from specctl.decoding.warming import warm_up

        setting = profile.draft.own_setting if profile.draft is not None else None
        warm_up(
            pair,
            profile.sampling,
            tree=setting.tree if setting else None,
            longest=setting.longest_draft if setting else 0,
        )
    return pair


class Decoder:
    """A loaded pair. One text is written at a time; policies that learn go on learning from text to text.

    Args:
        resolved: the profile, with where its values came from.
        pair: loaded with it.

    Attributes:
        profile: the checked values in force.
    """

    def __init__(self, resolved: ResolvedProfile, pair: Pair) -> None:
        self.resolved, self.profile = resolved, resolved.profile
        self._passes: dict[Batch, list[Passes]] = {}  # of the last call for several texts
        self._take(pair)
        self._use_drafter()

    @property
    def policy(self) -> str:
        """The policy in force with its settings, as ``--policy`` writes it."""
        return "none" if self.profile.draft is None else self.profile.draft.setting.label

    def use(self, policy: str) -> None:
        """Switch to another stopping policy; in a hierarchy it applies to the target's own draft.

        Raises:
            ProfileError: there is no such policy or setting, or it needs a head.
            UsageError: there is no draft.
        """
        table = PolicyTable(**parse_policy(policy, "policy"))
        before = self.profile
        if before.draft is None:
            raise UsageError("there is no draft for a policy to stop", "load the pair with a draft")
        self.profile = before.model_copy(update={"draft": before.draft.model_copy(update={"policy": table})})
        try:
            self._use_drafter()
        except Exception:
            self.profile = before
            raise

    def generate(
        self,
        prompt: Prompt,
        *,
        on_round: Callable[[Round], None] | None = None,
        **sampling: Unpack[SamplingSettings],
    ) -> Completion:
        """Complete a prompt.

        Args:
            prompt: a text, which goes through the target's chat template where it has one, unless the profile's
                ``prompt.chat`` is false; messages; or ids.
            on_round: called with each round as it ends.
            sampling: settings in place of the profile's.

        Returns:
            The text, its tokens, why it ended, its rounds and times.

        Raises:
            RecordError: a setting is wrong, or the prompt is empty, fills the context or needs a missing chat template.
        """
        request = self._request(prompt, sampling)
        return self._session.generate(request.prompt, request.settings, on_round=on_round)

    def stream(self, prompt: Prompt, **sampling: Unpack[SamplingSettings]) -> Iterator[str]:
        """Like `generate`, but yields the text of each round as it ends; the pieces joined are the completion's text.

        Closing the iterator ends the text. Errors of `generate` are raised by the first ``next``.
        """
        request = self._request(prompt, sampling)
        stream = TextStream(self.pair.tokenizer, request.prompt, self.pair.eos)
        text, shown = "", 0
        with closing(self._session.play(request.prompt, request.settings)) as playing:
            while True:
                try:
                    text += stream.push(next(playing).emitted)
                except StopIteration as end:
                    completion: Completion = end.value
                    break
                safe = shown_length(text, shown, request.settings.stop)
                if safe > shown:
                    yield text[shown:safe]
                shown = safe
        if rest := completion.text[shown:]:
            yield rest

    def generate_many(
        self, prompts: Iterable[Prompt | Request], *, batch: Batch = "auto", **sampling: Unpack[SamplingSettings]
    ) -> Iterator[Completion | RecordError]:
        """Complete several prompts, several at once where that is faster; closing the iterator ends them all.

        Args:
            prompts: each as in `generate`, or a mapping with a ``prompt`` and settings of its own. They are read
                lazily, a few ahead of the texts being written.
            batch: the batch size; ``"auto"`` chooses it from free memory and measured pass times.
            sampling: settings in place of the profile's. A prompt without its own seed uses this seed plus its index
                from 0.

        Yields:
            In the order of the prompts, a completion, or the `RecordError` that `generate` would raise.
        """
        return (found for _, found in self._several(prompts, batch, sampling, ordered=True))

    def generate_as_finished(
        self, prompts: Iterable[Prompt | Request], *, batch: Batch = "auto", **sampling: Unpack[SamplingSettings]
    ) -> Iterator[tuple[int, Completion | RecordError]]:
        """Like `generate_many`, but yields each text as soon as it is finished, with the index of its prompt from 0."""
        return self._several(prompts, batch, sampling, ordered=False)

    def _several(
        self, prompts: Iterable[Prompt | Request], batch: Batch, sampling: Mapping[str, Any], *, ordered: bool
    ) -> Iterator[tuple[int, Completion | RecordError]]:
        if batch != "auto" and (not isinstance(batch, Integral) or batch < 1):
            raise UsageError(f"batch must be a number from 1 on or 'auto', not {batch!r}", "e.g. batch=8")

        def prepared(number: int, given: Prompt | Request) -> TextRequest:
            own: Mapping[str, Any] = {}
            if isinstance(given, Mapping):
                own = {key: value for key, value in given.items() if key != "prompt"}
                given = cast("Prompt", given.get("prompt"))
            request = self._request(given, {**sampling, **own})
            return request if "seed" in own else replace(request, seed_offset=number)

        def asked() -> Iterator[tuple[tuple[int, RecordError | None], TextRequest | None]]:
            for number, given in enumerate(prompts):
                try:
                    yield (number, None), prepared(number, given)
                except RecordError as error:
                    yield (number, error), None

        def warn(text: str) -> None:
            warnings.warn(in_python(text), stacklevel=3)

        def written() -> Iterator[tuple[int, Completion | RecordError]]:
            pair, draft, alone = self.pair, self.profile.draft, self._session
            settings = [] if draft is None else [draft.setting]
            texts, limit = len(prompts) if isinstance(prompts, Sized) else MOST, self.profile.sampling.max_new_tokens
            passes = self._passes.pop(batch, None)  # a call made in the meantime sets its own
            if passes is None or passes[-1].slots > texts or why_alone(pair, *settings) is not None:
                passes = chosen_passes(pair, batch, texts, limit, settings, warn)

            def in_row(row: Pair, _: Callable[[], int]) -> Writer:
                return _writer(Session(row, None if draft is None else build_drafter(row, draft.setting)))

            rows = None if passes is None else Rows.over(pair, passes, in_row)
            engine, ahead = HereEngine(_writer(alone) if rows is None else None, rows), 1 if rows is None else AHEAD
            try:
                with engine:
                    tasks = asked()
                    found = in_order(engine, tasks, ahead * engine.count) if ordered else as_finished(engine, tasks)
                    for (number, error), text in found:
                        yield number, error or text
            finally:
                if passes is not None and self.pair is pair:
                    self._passes = {batch: passes}

        return written()

    def chat(self, system: str | None = None, **sampling: Unpack[SamplingSettings]) -> Chat:
        """A conversation: ``ask`` takes a turn and returns the answer; through the chat template as in `generate`.

        Its models are shared. If another text is written between two turns, the next turn reads the whole conversation
        again.

        Args:
            system: a system message.
            sampling: settings in place of the profile's.

        Raises:
            UsageError: a system message is given, and turns do not go through a chat template.
            RecordError: a setting is wrong.
        """
        settings = self._request([0], sampling).settings
        prompt = self.profile.prompt.model_copy(update={"system": system})
        return Chat(self.pair, self.profile.model_copy(update={"prompt": prompt, "sampling": settings}))

    def _request(self, prompt: Prompt, sampling: Mapping[str, Any]) -> TextRequest:
        answerer = Answerer(
            self._session, PromptFormat.of(self.pair.tokenizer, self.profile.prompt), self.profile.sampling
        )
        settings = answerer.settings_of(Record(1, None, {"sampling": dict(sampling)}))
        return TextRequest(tuple(self._ids(answerer.prompts, prompt)), settings)

    def _ids(self, prompts: PromptFormat, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return prompts.prompt(prompt)
        if not isinstance(prompt, Sequence) or isinstance(prompt, bytes | bytearray):
            raise TypeError(f"{PROMPTS}, not {type(prompt).__name__}")
        if not prompt:
            raise RecordError("empty_prompt", "the prompt is empty")
        if all(isinstance(message, Mapping) for message in prompt):
            return prompts.messages(cast("Sequence[Mapping[str, str]]", prompt))
        for token in prompt:
            if not isinstance(token, Integral):
                raise TypeError(f"{PROMPTS}, not a list with {shown(token)}")
        return [int(token) for token in cast("Sequence[int]", prompt)]

    def _take(self, pair: Pair) -> None:
        self.pair = pair
        self._session = Session(pair, None)
        self._passes = {}

    def _use_drafter(self) -> None:
        draft = self.profile.draft
        if draft is None:
            return
        named = any(level.head is not None for level in draft.levels)
        if named and draft.setting.needs_predictors and not any(self.pair.named_predictors):
            self._take(_opened(self.resolved.profile, predictors=True))  # it was loaded for a policy that reads none
        self._session.drafter = build_drafter(self.pair, draft.setting)


def _writer(session: Session) -> Writer:
    def write(request: TextRequest) -> Completion | RecordError:
        try:
            with failures_of_a_text():
                return session.generate(request.prompt, request.settings, seed_offset=request.seed_offset)
        except RecordError as error:
            return error

    return whole(write)
