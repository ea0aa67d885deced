"""Token rules of one request: what it asks of tokens besides a target's own rules."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from specctl.models.running.pair import Pair

if TYPE_CHECKING:
    import torch

    from specctl.models.running.rules.token_rules import TokenRules


@dataclass(frozen=True, slots=True)
class RequestRules:
    """Penalties and biases of a request, each a function of the text before a token.

    Attributes:
        bias: added to the logits of ids.
        repetition: divides positive logits of ids that the text has, prompt included, and multiplies negative ones.
        presence: taken from the logits of ids that were written behind the prompt.
        frequency: the same once for each time.
    """

    bias: Mapping[int, float] = field(default_factory=dict)
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0

    @property
    def active(self) -> bool:
        return bool(self.bias) or self.repetition != 1 or self.presence != 0 or self.frequency != 0

    def token_rules(self, prompt: int) -> "TokenRules":
        """The rules behind a prompt of so many tokens."""
        from transformers import RepetitionPenaltyLogitsProcessor, SequenceBiasLogitsProcessor

        from specctl.models.running.rules.token_rules import TokenRules

        made: list[Any] = []
        if self.bias:
            made.append(SequenceBiasLogitsProcessor([[[token], float(bias)] for token, bias in self.bias.items()]))
        if self.repetition != 1:
            made.append(RepetitionPenaltyLogitsProcessor(self.repetition))
        if self.presence or self.frequency:
            made.append(WrittenPenalty(prompt, self.presence, self.frequency))
        return TokenRules(made)


class WrittenPenalty:
    """A logits processor: tokens that were written behind the prompt become less likely.

    Args:
        prompt: tokens of the prompt.
        presence: taken from the logit of each id that was written.
        frequency: the same once for each time.
    """

    def __init__(self, prompt: int, presence: float, frequency: float) -> None:
        self._prompt, self._presence, self._frequency = prompt, presence, frequency

    def __call__(self, input_ids: "torch.Tensor", scores: "torch.Tensor") -> "torch.Tensor":  # (1, T), (1, V)
        import torch

        counts = torch.bincount(input_ids[0, self._prompt :], minlength=scores.shape[1])  # (V,)
        return scores - self._frequency * counts - self._presence * (counts > 0)


def ruled(pair: Pair, rules: "TokenRules") -> Pair:
    """A pair whose target and drafts follow token rules; what a lookup copies against them the target rejects."""
    from specctl.models.running.rules.ruled import RuledRunner

    drafts = (draft if draft.index is not None else RuledRunner(draft, rules) for draft in pair.drafts)
    return replace(pair, target=RuledRunner(pair.target, rules), drafts=tuple(drafts))
