"""How tokens are drawn: the settings, and what they make of logits."""

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
    top_h 0 leave the distribution alone; top_h comes before top_k, the others in this order. ``verification`` says
    whether draft tokens are verified one by one or as a block, which makes no difference to greedy decoding. ``rules``
    are of one text: which tokens may follow, and how likely they are.
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
        """Those of a sampling table, with its rules for one text.

        Raises:
            ProfileError: the table has rules that are not given: the text is read, and was not written so.
        """
        if rules is None and settings.rules:
            what = f"texts are measured without rules about tokens here, and [sampling] has {', '.join(settings.rules)}"
            raise ProfileError(what, "leave it out for this command")
        values = {one.name: getattr(settings, one.name) for one in fields(cls) if one.name != "rules"}
        return cls(**values, rules=rules)

    @classmethod
    def measured(cls, settings: SamplingTable, pair: Pair) -> "Sampling":
        """Those of a text that is read again, where a text's rules are not known.

        Raises:
            ProfileError: the table has rules, or the target's generation_config.json has some about prompts.
        """
        if pair.prompt_rules:
            what = f"texts are measured without rules about prompts here, and {', '.join(pair.prompt_rules)} is"
            what += " in the target's generation_config.json"
            raise ProfileError(what, "set generation_config = false at the top of the profile for this command")
        return cls.of(settings)

    def over(self, runner: Slot, *, decides: bool = False) -> Slot:
        """A runner as a text with these settings uses it: with the text's rules around it, if it has any.

        What a draft writes as text against them is rejected, as what a lookup copies is.
        """
        if self.rules is None or runner.writes_text:
            return runner
        return Slot(RuledPasses(runner, self.rules.fresh(), self.rules.prompt[: runner.length], decides=decides))

    @property
    def greedy(self) -> bool:
        return self.temperature < COLDEST

    @property
    def filters(self) -> bool:
        """Whether some tokens may get no probability at all."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0 or self.top_h > 0 or self.shapes

    @property
    def shapes(self) -> bool:
        """Whether a filter is in force that looks at what the others before it have left."""
        return self.typical_p < 1 or self.epsilon_cutoff > 0 or self.eta_cutoff > 0

    @property
    def in_blocks(self) -> bool:
        """Whether drawn tokens are verified as a block."""
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
