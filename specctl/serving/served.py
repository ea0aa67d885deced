"""What a server writes with: a pair here or replicas of it, and what may be asked of it."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from specctl.decoding.answers import NamedDrafters
from specctl.decoding.prompt_format import PromptFormat
from specctl.decoding.session import TextRequest
from specctl.errors import ProfileError, UsageError
from specctl.models.files.tokenizer import BareTokenizer, Spelling, Tokenizer, light
from specctl.models.running.pair import Pair, room_in
from specctl.models.running.passes import Passes
from specctl.models.running.rules.grammar import Compiled, grammars_of, source_of
from specctl.policies import POLICIES
from specctl.profile import Profile
from specctl.profile.validation import settings_model
from specctl.serving.text_thread import served_writer
from specctl.text_engine.here import HereEngine, Rows
from specctl.text_engine.processes import ProcessEngine


@dataclass(frozen=True, slots=True)
class PairFacts:
    """What a replica reports of its pair.

    Attributes:
        spelling: of the target's tokenizer; None where only transformers has all of it.
        eos, context, vocabulary: as of `Pair`.
        offer: what may be asked, see `offer`.
        rows: texts that it writes at once.
    """

    spelling: Spelling | None
    eos: frozenset[int]
    context: int
    vocabulary: int
    offer: dict[str, Any]
    rows: int

    @classmethod
    def of(cls, pair: Pair, offered: dict[str, Any], rows: int) -> "PairFacts":
        """Those of a pair that is loaded."""
        tokenizer = light(pair.tokenizer)
        spelling = tokenizer.spelling if isinstance(tokenizer, BareTokenizer) else None
        return cls(spelling, pair.eos, pair.context, pair.vocabulary, offered, rows)


@dataclass(frozen=True, slots=True)
class ReplicatedPair:
    """Replicas of a pair, whose own engines are of `served_engine`.

    Attributes:
        engine: one of them is ready.
        workers: how many there are.
        tokenizer: the target's.
        facts: as they tell them.
    """

    engine: ProcessEngine
    workers: int
    tokenizer: Tokenizer
    facts: PairFacts

    @property
    def eos(self) -> frozenset[int]:
        return self.facts.eos

    @property
    def context(self) -> int:
        return self.facts.context

    @property
    def vocabulary(self) -> int:
        return self.facts.vocabulary

    def room(self, prompt: Sequence[int]) -> int:
        """As of `Pair`."""
        return room_in(self.context, self.vocabulary, prompt)


def served_engine(
    pair: Pair, profile: Profile, passes: Sequence[Passes] | None, warn: Callable[[str], None] = lambda _: None
) -> HereEngine:
    """The engine of this process that writes a server's texts.

    Caches are kept from text to text: a prompt that begins like one that they hold is read from where they differ.

    Args:
        pair: loaded; nothing else uses it.
        profile: how it is used.
        passes: for the rows, `specctl.batching.pair_rows.passes_of`; None to write one text at a time.
        warn: receives a message when memory runs out.
    """

    def in_row(row: Pair, saved: Callable[[], int]) -> Any:
        return served_writer(row, profile, saved)

    rows = None if passes is None else Rows.over(pair, passes, in_row, warn, kept=True)
    return HereEngine(served_writer(pair, profile), rows)


def replica_engine(
    pair: Pair,
    profile: Profile,
    name: str,
    passes: Sequence[Passes] | None = None,
    warn: Callable[[str], None] = lambda _: None,
) -> HereEngine:
    """`served_engine` of a replica, which compiles grammars itself while other texts go on, and says what it has.

    Args:
        pair, profile, passes, warn: as there.
        name: what clients call the pair.
    """

    def compiling(asked: tuple[TextRequest, bool]) -> "Future[Compiled | None] | None":
        if (source := source_of(asked[0].settings)) is None:
            return None
        return grammars_of(pair.tokenizer, pair.eos).compiling(source)

    engine = served_engine(pair, profile, passes, warn)
    engine.prepare = compiling
    engine.about = PairFacts.of(pair, offer(pair, profile, name), engine.count)
    return engine


def offer(pair: Pair, profile: Profile, name: str) -> dict[str, Any]:
    """A JSON document: the model's name, the sampling and policy of the profile, and what `specctl.policy` may name.

    Args:
        pair: loaded; nobody uses it yet.
        profile: how it is used.
        name: what clients call the model.
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
    """Whether a policy can stop the pair's draft: some read what a trained head says."""
    try:
        return drafters.of(policy) is not None
    except (ProfileError, UsageError):
        return False
