"""What specctl knows of another engine: how it drafts, which tokens it keeps, and where that was read."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from specctl.policies import Setting

if TYPE_CHECKING:
    from specctl.export.rule_space import Kind

Acceptance = Literal["ratio", "likeliest", "matched"]
"""Which draft tokens an engine keeps where it samples. ``ratio``: drawn from q and kept with probability min(1, p/q).
``likeliest``: the draft's likeliest token, kept with probability p, by comparing it with a token drawn from p or by a
test that has the same law. ``matched``: drawn from q, and kept if a token drawn from p is the same."""
Confidence = Literal["chosen", "largest", "top ten", "top logit"]
"""What an engine reads of a draft token: the draft's probability of the token that it chose, the largest probability,
the same after a softmax over the ten largest logits, or the largest logit."""


LONGEST = 20
"""The longest draft that is tried."""


@dataclass(frozen=True, slots=True)
class Names:
    """The pair as an engine is to be told of it: folders or hub ids; and the kind of draft head, None for a model."""

    target: str
    draft: str
    head: str | None = None


@dataclass(frozen=True, slots=True)
class Written:
    """What an engine reads.

    Attributes:
        place: where the text belongs.
        text: a command line, a file, or lines of Python.
        notes: what has to be known to use it.
    """

    place: str
    text: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Sampled:
    """How an engine is told to sample.

    Attributes:
        temperature: 0 in greedy decoding.
        blocks: whether draft tokens are verified as a block.
    """

    temperature: float = 0.0
    blocks: bool = False


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine with the rules by which it stops drafts.

    Attributes:
        name: what ``--export`` calls it.
        package: of PyPI, whose version is compared where it is installed; None for an engine that has none.
        version: that was read.
        released: the day on which that version appeared, or what it is where that is not known.
        source: the file that has the rule.
        write: the setting of its rule as it reads it.
        acceptance: when sampling; None for a rule of its own that cannot be replayed, which ``own_rule`` describes.
        own_rule: the end of a sentence that begins with the engine's name.
        confidence: what its rules read of a draft token; None for nothing.
        keeps_trigger: whether the token below the threshold is verified too.
        capped: whether a threshold goes together with a longest draft.
        kinds: of rules that it has besides drafts of one length.
        stops_at_eos: whether its draft ends at an end-of-sequence token; others draft on.
        blocks: whether it can verify draft tokens as a block.
        unpriced: why its threshold takes time that no replay knows, as the beginning of a sentence: it is shown, and a
            length is written; empty if it does not.
        further_passes: of the draft in each round, apart from those that draft.
        passes_when_full: further ones in a round whose tokens are all accepted.
        passes_when_idle: of either model in a round without a draft, apart from the target's one.
        longest: the longest draft that it takes; None for any.
        read: the day on which its source was read.
        scheduled: whether it takes a length for each number of texts that it verifies at once.
        heads: the kinds of draft heads that settings are written for, too.
    """

    name: str
    package: str | None
    version: str
    released: str
    source: str
    write: Callable[[Names, Setting, Sampled], Written]
    acceptance: Acceptance | None
    own_rule: str = ""
    confidence: Confidence | None = None
    keeps_trigger: bool = True
    capped: bool = True
    kinds: "tuple[Kind, ...]" = ()
    stops_at_eos: bool = False
    blocks: bool = False
    unpriced: str = ""
    further_passes: int = 0
    passes_when_full: int = 0
    passes_when_idle: int = 0
    scheduled: bool = False
    heads: tuple[str, ...] = ()
    longest: int | None = None
    read: str = "2026-11-22"

    def lengths(self, recorded: int) -> range:
        """The lengths of drafts to try where traces hold drafts of that many tokens."""
        return range(1, min(LONGEST, recorded, self.longest or LONGEST) + 1)
