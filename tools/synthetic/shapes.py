"""The shapes of synthetic pairs, their chosen properties (dials), and their measured ones."""

from dataclasses import dataclass
from typing import Any

MARK = "synthetic"
"""True in the configuration of every synthetic model."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a Llama; every model of a pair has the same vocabulary."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    intermediate: int
    vocabulary: int
    context: int = 8192

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def config(self) -> dict[str, Any]:
        """The same as arguments of a `LlamaConfig`."""
        return {
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "max_position_embeddings": self.context,
        }


SHAPES: dict[str, tuple[Shape, Shape]] = {
    "llama3-8b-1b": (Shape(32, 4096, 32, 8, 14336, 128256), Shape(16, 2048, 32, 8, 8192, 128256)),
    "llama2-7b-68m": (Shape(32, 4096, 32, 32, 11008, 32000), Shape(2, 768, 12, 12, 3072, 32000)),
    # Layers of Llama 3 70B, 34 of its 80, so that one large GPU holds them and the draft.
    "llama3-70b-cut-8b": (Shape(34, 8192, 64, 8, 28672, 128256), Shape(32, 4096, 32, 8, 14336, 128256)),
    "tiny": (Shape(5, 64, 8, 4, 160, 512, 256), Shape(2, 32, 4, 2, 96, 512, 256)),
}


@dataclass(frozen=True, slots=True)
class Dials:
    """The chosen properties of a synthetic pair.

    Attributes:
        damping: factor on the outputs of the target's own layers; 0 is a target that always agrees with the draft.
        sharpness: standard deviation of the logits of a token without a likely successor.
        easy: share of tokens that have a likely successor.
        gain: how far the successor's logit is above the mean of the others, in multiples of ``sharpness``.
        seed: seed of all weights.
    """

    damping: float = 0.3
    sharpness: float = 2.0
    easy: float = 0.5
    gain: float = 7.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Traits:
    """The measured properties of a pair on random text.

    Attributes:
        agreement: share of positions at which both models have the same argmax, as greedy verification requires.
        entropy, entropy_deviation: mean and standard deviation of the draft's entropy, in nats.
    """

    agreement: float
    entropy: float
    entropy_deviation: float


def require_room(target: Shape, draft: Shape) -> None:
    """Raise ValueError if a target of this shape cannot contain the function of a draft of that shape."""
    ratio, remainder = divmod(target.head_dim, draft.head_dim)
    fits = (
        target.vocabulary == draft.vocabulary
        and target.layers > draft.layers
        and target.hidden >= draft.hidden
        and target.intermediate >= draft.intermediate
        and target.kv_heads >= draft.kv_heads
        and target.heads // target.kv_heads >= draft.heads // draft.kv_heads
        and ratio >= 1
        and remainder == 0
    )
    if not fits:
        raise ValueError(
            "the target must have more layers than the draft, the same vocabulary, at least its sizes, and a head size "
            "that is a multiple of the draft's"
        )
