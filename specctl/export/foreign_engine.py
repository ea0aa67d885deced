"""What specctl knows of another engine: how it drafts, which tokens it keeps, and where that was read."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from specctl.policies import Setting

Acceptance = Literal["ratio", "likeliest", "matched"]
"""Which draft tokens an engine keeps where it samples. ``ratio``: drawn from q and kept with probability min(1, p/q).
``likeliest``: the draft's likeliest token, kept with probability p, by comparing it with a token drawn from p or by a
test that has the same law. ``matched``: drawn from q, and kept if a token drawn from p is the same."""
Confidence = Literal["chosen", "top ten"]
"""What an engine compares with its threshold: the draft's probability of the token that it chose, or the largest
probability after a softmax over the ten largest logits."""


LONGEST = 20
"""The longest draft that is tried."""


@dataclass(frozen=True, slots=True)
class Names:
    """The pair as an engine is to be told of it: folders or hub ids."""

    target: str
    draft: str


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
    """An engine with the rule by which it stops drafts of an ordinary draft model.

    Attributes:
        name: what ``--export`` calls it.
        package: of PyPI, whose version is compared where it is installed; None for an engine that has none.
        version: that was read.
        released: the day on which that version appeared, or what it is where that is not known.
        source: the file that has the rule.
        write: the setting of its rule as it reads it.
        acceptance: when sampling; None for a rule of its own that cannot be replayed, which ``own_rule`` describes.
        own_rule: the end of a sentence that begins with the engine's name.
        confidence: what it compares with a threshold; None without one.
        keeps_trigger: whether the token below the threshold is verified too.
        capped: whether a threshold goes together with a longest draft.
        lengthens: whether a draft's length may follow the rounds before, as in the policy ``heuristic``.
        stops_at_eos: whether its draft ends at an end-of-sequence token; others draft on.
        blocks: whether it can verify draft tokens as a block.
        further_passes: of the draft in each round, apart from those that draft.
        longest: the longest draft that it takes; None for any.
        read: the day on which its source was read.
        scheduled: whether it takes a length for each number of texts that it verifies at once.
        policies: those of specctl that it runs, with thresholds of their own.
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
    lengthens: bool = False
    stops_at_eos: bool = False
    blocks: bool = False
    further_passes: int = 0
    scheduled: bool = False
    policies: tuple[str, ...] = ()
    longest: int | None = None
    read: str = "2026-11-22"

    def lengths(self, recorded: int) -> range:
        """The lengths of drafts to try where traces hold drafts of that many tokens."""
        return range(1, min(LONGEST, recorded, self.longest or LONGEST) + 1)
