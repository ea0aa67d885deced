"""What is told of one model of a profile."""

from dataclasses import dataclass, field

from specctl.models.files.token_counts import TokenCounts
from specctl.models.translation.token_map import TokenMap

NOT_FOUND = "not found"


@dataclass(frozen=True, slots=True)
class Overlap:
    """What a draft with another tokenizer shares with its target.

    Attributes:
        shared: how many of the target's tokens it has.
        whole: how many the target has.
        used: the share of shared ones among the target's tokens of the prompts that come with the package. Other
            tokens cannot be drafted, so that no more of a draft is accepted.
    """

    shared: int
    whole: int
    used: float

    def __str__(self) -> str:
        return f"{self.used:.1%} of those in the prompts that come with specctl, and no more of a draft can be accepted"

    @classmethod
    def of(cls, tokens: TokenMap, counts: TokenCounts) -> "Overlap":
        """That of two tokenizers; ``counts`` are of the target's ids."""
        ids = tokens.vocabulary.ids.tolist()
        return cls(len(ids), tokens.target.whole, counts.covered(ids))


@dataclass(slots=True)
class ModelFacts:
    """One model or draft head of the profile; unknown facts are None or empty.

    Of a draft head, ``draft_head`` is its kind, ``reads_layers`` the layers of its verifier whose states it reads,
    and ``trained_on`` the model that its files name. ``draft_tokens`` is how many of the vocabulary's tokens a draft
    can write where those are not all, ``covered`` which share they are of the tokens that were counted, and
    ``covers`` which share is expected of other texts. ``output_share`` is the output layer's of the weights that a
    pass reads.
    ``adapter`` names a LoRA adapter with its rank and the model that it was trained on.
    ``overlap`` is that of a draft with another tokenizer than the target's.
    ``without_files`` is what copies from the text or is registered by another distribution.
    """

    key: str
    model: str
    found: str = NOT_FOUND
    folder: str | None = None
    adapter: str | None = None
    architecture: str | None = None
    parameters: int | None = None
    context: int | None = None
    vocabulary: int | None = None
    weights_by_dtype: dict[str, int] = field(default_factory=dict)
    cache_per_1k_tokens: int | None = None
    eos_ids: list[int] = field(default_factory=list)
    rules: list[str] = field(default_factory=list)
    licence: str | None = None
    gated: str | None = None
    dtype: str | None = None
    quantize: str | None = None
    devices: dict[str, int] = field(default_factory=dict)
    draft_head: str | None = None
    reads_layers: list[int] = field(default_factory=list)
    draft_tokens: int | None = None
    covered: float | None = None
    covers: float | None = None
    output_share: float = 0.0
    trained_on: str | None = None
    without_files: bool = False
    overlap: Overlap | None = None
