"""What a forward pass reads of a model's weights, told from its modules without its weights."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specctl.models.files.checkpoint import ITEM_BYTES
from specctl.models.passes.layer_sizes import largest
from specctl.models.placing.memory import Estimate

if TYPE_CHECKING:
    from torch import nn

_ROUTED = ".experts."
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts", "moe_k")


@dataclass(frozen=True, slots=True)
class WeightReads:
    """How many of a model's numbers a pass reads.

    Attributes:
        numbers: of the whole model.
        tables: those of embeddings that are no output layer, of which a pass reads a row for each token.
        experts: those of experts among which a router chooses.
        chosen: the share of them that each token goes through; 1 where that is not known.
        layers: decoder layers.
    """

    numbers: int
    tables: int
    experts: int
    chosen: float
    layers: int

    @classmethod
    def of(cls, model: "nn.Module", config: Any, output: "nn.Module | None") -> "WeightReads":
        """Count them.

        Args:
            model: a model or draft head, perhaps a `skeleton`.
            config: of its decoder; None for a draft head.
            output: the layer that makes its logits, if that is a module of its own.
        """
        from torch import nn

        own = None if output is None else id(output.weight)
        weights = {id(weight): weight.numel() for weight in model.parameters()}
        embeddings = {id(part.weight) for part in model.modules() if isinstance(part, nn.Embedding)} - {own}
        total, chosen = (None if config is None else largest(config, *names) for names in (_EXPERTS, _CHOSEN))
        return cls(
            numbers=sum(weights.values()),
            tables=sum(count for key, count in weights.items() if key in embeddings),
            experts=sum(weight.numel() for name, weight in model.named_parameters() if _ROUTED in name),
            chosen=min(1.0, chosen / total) if total and chosen else 1.0,
            layers=int(getattr(config, "num_hidden_layers", 0)),
        )

    def bytes(self, need: Estimate, dtype: str, width: int = 1) -> int:
        """Bytes of the weights that a pass over ``width`` tokens reads.

        Of experts, each token is taken to choose its own at random, so that wider passes read more of them.

        Args:
            need: of the same model in the form in which it is loaded.
            dtype: of what is not quantised.
            width: tokens in the pass.
        """
        read = self.numbers - self.tables
        whole = need.weight_bytes(dtype) - self.tables * ITEM_BYTES[dtype]
        left_out = self.experts * (1 - self.chosen) ** width
        return round(whole * (1 - left_out / read)) if read else 0
