"""What is told of one model of a profile."""

from dataclasses import dataclass, field

NOT_FOUND = "not found"


@dataclass(slots=True)
class ModelFacts:
    """One model or draft head of the profile; unknown facts are None or empty.

    Of a draft head, ``draft_head`` is its kind, ``reads_layers`` the layers of its verifier whose states it reads,
    and ``trained_on`` the model that its files name. ``draft_tokens`` is how many of the vocabulary's tokens a draft
    can write where those are not all, ``covered`` which share they are of the tokens that were counted, and
    ``covers`` which share is expected of other texts. ``output_share`` is the output layer's of the weights that a
    pass reads.
    ``without_files`` is what copies from the text or is registered by another distribution.
    """

    key: str
    model: str
    found: str = NOT_FOUND
    folder: str | None = None
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
