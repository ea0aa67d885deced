"""What is told of one model of a profile."""

from dataclasses import dataclass, field

from specctl.models.files.token_counts import TokenCounts, shipped_texts
from specctl.models.files.tokenizer import Tokenizer
from specctl.models.translation import TokenMap, agreement

NOT_FOUND = "not found"


@dataclass(frozen=True, slots=True)
class Overlap:
    """What a draft with another tokenizer shares with its target.

    Attributes:
        shared: how many of the target's tokens it has.
        whole: how many the target has.
        used: the share of shared ones among the target's tokens of the prompts that come with the package. Other
            tokens cannot be drafted where shared ones are, so that no more of a draft is accepted.
        agreed: the share of these tokens that come out as they were if the draft writes the prompts as text. Others
            are drafted wrongly, so that no more of a draft is accepted then.
        writes_text: whether it does.
    """

    shared: int
    whole: int
    used: float
    agreed: float
    writes_text: bool

    def __str__(self) -> str:
        shared = f"{self.used:.1%} of the tokens in the prompts that come with specctl are shared"
        written = f"{self.agreed:.1%} come out right of text"
        first, other, name = (written, shared, "intersection") if self.writes_text else (shared, written, "text")
        return f'{first}, and no more of a draft can be accepted ({other}: draft.vocabulary = "{name}")'

    @classmethod
    def of(cls, tokens: TokenMap, target: Tokenizer) -> "Overlap":
        """That of two tokenizers."""
        ids, texts = tokens.vocabulary.ids.tolist(), shipped_texts(target)
        agreed = agreement(tokens, texts)
        return cls(len(ids), tokens.target.whole, TokenCounts.of(texts).covered(ids), agreed, tokens.writes_text)


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
    ``about`` is how large a model that is not here is in 16 bits, by its name.
    ``layers`` is how many of its layers go to each device; of one that is split within layers, how many each has a part
    of. Empty where it was not asked.
    ``checked`` is of a target whether it is known to make the same of a text in whatever passes it reads it.
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
    checked: bool | None = None
    about: int | None = None
    layers: dict[str, int] = field(default_factory=dict)
