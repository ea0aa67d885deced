"""How tokens are drawn: the settings, and the distributions they make of logits."""

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

from specctl.errors import ProfileError
from specctl.models.running.pair import Pair
from specctl.models.running.ruled import RuledPasses
from specctl.models.running.slot import Slot
from specctl.models.running.text_rules import TextRules
from specctl.profile.schema import SamplingTable, Verification

if TYPE_CHECKING:
    import torch

COLDEST = 1e-6
"""Temperatures below it are greedy: any difference between two float32 logits would make the larger one certain."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Temperature and filters, applied alike to target and draft, in the order of transformers' ``generate``.

    Temperature 0 (below 1e-6) is greedy; top_k 0, top_p 1, min_p 0, typical_p 1, epsilon_cutoff 0, eta_cutoff 0 and
    top_h 0 leave the distribution unchanged. top_h is applied before top_k, the others in this order. ``verification``
    selects whether draft tokens are verified one by one or as a block, without effect on greedy decoding. ``rules``
    belong to one text: they forbid tokens or change their probabilities.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    verification: Verification = "token"
    typical_p: float = 1.0
    epsilon_cutoff: float = 0.0
    eta_cutoff: float = 0.0
    top_h: float = 0.0
    rules: TextRules | None = field(default=None, compare=False)

    @classmethod
    def of(cls, settings: SamplingTable, rules: TextRules | None = None) -> "Sampling":
        """The settings of a sampling table, with its token rules for one text.

        Raises:
            ProfileError: the table has token rules and ``rules`` is missing: an existing text is read, which was not
                generated with them.
        """
        if rules is None and settings.rules:
            what = f"texts are measured without rules about tokens here, and [sampling] has {', '.join(settings.rules)}"
            raise ProfileError(what, "leave it out for this command")
        values = {one.name: getattr(settings, one.name) for one in fields(cls) if one.name != "rules"}
        return cls(**values, rules=rules)

    @classmethod
    def measured(cls, settings: SamplingTable, pair: Pair) -> "Sampling":
        """The settings for reading an existing text, without token rules.

        Raises:
            ProfileError: the table has token rules, or the target's generation_config.json has rules that depend on the
                prompt.
        """
        if pair.prompt_rules:
            what = f"texts are measured without rules about prompts here, and {', '.join(pair.prompt_rules)} is"
            what += " in the target's generation_config.json"
            raise ProfileError(what, "set generation_config = false at the top of the profile for this command")
        return cls.of(settings)

    def over(self, runner: Slot, *, decides: bool = False) -> Slot:
        """The runner for a text with these settings: wrapped with the text's token rules, if it has any.

        Where a draft that writes text or a lookup breaks the rules, verification rejects its tokens.
        """
        if self.rules is None or runner.writes_text:
            return runner
        return Slot(RuledPasses(runner, self.rules.fresh(), self.rules.prompt[: runner.length], decides=decides))

    @property
    def greedy(self) -> bool:
        return self.temperature < COLDEST

    @property
    def filters(self) -> bool:
        """Whether a filter may set probabilities to 0."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0 or self.top_h > 0 or self.shapes

    @property
    def shapes(self) -> bool:
        """Whether a filter is active that depends on what earlier filters have left."""
        return self.typical_p < 1 or self.epsilon_cutoff > 0 or self.eta_cutoff > 0

    @property
    def in_blocks(self) -> bool:
        """Whether sampled drafts are verified as a block."""
        return not self.greedy and self.verification == "block"

    @property
    def plain(self) -> bool:
        """Whether the processed distribution is the softmax of the raw logits."""
        return self.temperature == 1 and not self.filters

    def probs(self, logits: "torch.Tensor") -> "torch.Tensor":  # (..., V) -> (..., V)
        """The processed distribution in float32, see `Logits.distributions`; one-hot at the argmax when greedy."""
        import torch

        from specctl.decoding.logits.judging import logits_over

        probs = logits_over(logits.reshape(-1, logits.shape[-1])).distributions(self).numbers
        return (probs if isinstance(probs, torch.Tensor) else torch.from_numpy(probs)).reshape(logits.shape)
