"""The pair that a server uses, here or in replicas, and the parameters that it offers."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Self

from specctl.decoding.answers import NamedDrafters
from specctl.decoding.prompt_format import PromptFormat
from specctl.decoding.session import TextRequest
from specctl.errors import ProfileError, UsageError
from specctl.models.files.tokenizer import BareTokenizer, LightTokenizer, Tokenizer, light
from specctl.models.running.grammars.grammar import Compiled, grammars_of, source_of
from specctl.models.running.pair import Pair, room_in
from specctl.models.running.passes import Passes
from specctl.policies import POLICIES
from specctl.profile import Profile
from specctl.profile.validation import settings_model
from specctl.serving.text_thread import Affinity, served_writer
from specctl.text_engine.engine import TextEngine
from specctl.text_engine.here import HereEngine, Rows
from specctl.text_engine.processes import ProcessEngine


@dataclass(frozen=True, slots=True)
class PairFacts:
    """Facts about a pair for a process that has not loaded it."""

    tokenizer: Tokenizer | None  # the target's; None if only transformers can run it
    # eos, context, vocabulary: see `Pair`
    eos: frozenset[int]
    context: int
    vocabulary: int
    offer: dict[str, Any]  # see `offer`
    texts: int  # the number of texts it writes at once

    @classmethod
    def of(cls, pair: Pair, offered: dict[str, Any], texts: int) -> Self:
        """The facts about a loaded pair."""
        tokenizer = light(pair.tokenizer)
        own = tokenizer if isinstance(tokenizer, LightTokenizer) else None
        return cls(own, pair.eos, pair.context, pair.vocabulary, offered, texts)


@dataclass(frozen=True, slots=True)
class Served:
    """A pair that is served."""

    engine: TextEngine  # of `served_writer`
    profile: Profile  # the pair's profile, with the draft that is used
    facts: PairFacts  # of the pair
    tokenizer: Tokenizer  # the target's
    workers: int | None = None  # processes that have loaded the pair; None if this process has

    @classmethod
    def here(
        cls,
        pair: Pair,
        profile: Profile,
        name: str,
        passes: Sequence[Passes] | None = None,
        warn: Callable[[str], None] = lambda _: None,
        *,
        compiles: bool = False,
    ) -> Self:
        """Serve a pair in this process.

        Caches persist between texts: of a prompt that shares a prefix with a cached text, only the rest is read.

        Args:
            pair: loaded; nothing else uses it.
            profile: its settings.
            name: the model's name for clients.
            passes: for the rows, from `specctl.text_engine.pair_rows.passes_of`; None to write one text at a time.
            warn: receives a message when memory runs out.
            compiles: whether the engine itself compiles grammars, while other texts continue.
        """

        def compiling(asked: tuple[TextRequest, bool]) -> "Future[Compiled | None] | None":
            source = source_of(asked[0].settings) if compiles else None
            return None if source is None else grammars_of(pair.tokenizer, pair.eos).compiling(source)

        offered = offer(pair, profile, name)
        rows = None
        if passes is not None:
            rows = Rows.over(pair, passes, lambda row, saved: served_writer(row, profile, saved), warn, kept=True)
        facts = PairFacts.of(pair, offered, 1 if rows is None else rows.count)
        engine = HereEngine(served_writer(pair, profile), rows, prepare=compiling, about=facts)
        return cls(engine, profile, facts, pair.tokenizer)

    @classmethod
    def by_workers(cls, engine: ProcessEngine, profile: Profile, tokenizer: Callable[[], Tokenizer]) -> Self:
        """Serve a pair that processes have loaded with `here`; ``tokenizer`` loads the target's tokenizer."""
        facts: PairFacts = engine.about
        known = facts.tokenizer or tokenizer()
        if isinstance(known, BareTokenizer):
            known.whole = tokenizer
        return cls(engine, profile, facts, known, engine.count // engine.places)

    @property
    def texts(self) -> int:
        """The number of texts written at once."""
        return self.facts.texts * (self.workers or 1)

    @property
    def affinity(self) -> Affinity | None:
        """The choice of processes' places by their caches."""
        return None if self.workers is None else Affinity(self.engine.count // self.workers)

    def room(self, prompt: Sequence[int]) -> int:
        """As `Pair.room`."""
        return room_in(self.facts.context, self.facts.vocabulary, prompt)


def offer(pair: Pair, profile: Profile, name: str) -> dict[str, Any]:
    """A JSON document: the model's name, the profile's sampling and policy, and the values of `specctl.policy`.

    Args:
        pair: loaded, and not in use yet.
        profile: its settings.
        name: the model's name for clients.
    """
    draft, sampling = profile.draft, profile.sampling
    drafters = NamedDrafters(pair, draft)
    return {
        "model": name,
        "chat": PromptFormat(pair.tokenizer, profile.prompt.chat).chat,
        "chat_template": PromptFormat(pair.tokenizer).chat,
        "sampling": {"temperature": sampling.temperature, "max_tokens": sampling.max_new_tokens},
        "policy": None if draft is None else {"id": draft.setting.policy, "label": draft.setting.label},
        "policies": [
            {"id": policy, "settings": settings_model(policy).model_json_schema()["properties"]}
            for policy in POLICIES
            if _fits(drafters, policy)
        ],
    }


def _fits(drafters: NamedDrafters, policy: str) -> bool:
    """Whether a policy can stop the pair's draft; some policies need a trained head."""
    try:
        return drafters.of(policy) is not None
    except (ProfileError, UsageError):
        return False
