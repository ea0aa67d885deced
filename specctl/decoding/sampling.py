"""How tokens are drawn: the settings, and what they make of logits."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from specctl.errors import ProfileError
from specctl.models.running.rules.grammar import GrammarRule
from specctl.models.running.rules.ruled import RuledRunner
from specctl.models.running.runner import Runner
from specctl.profile.schema import SamplingTable, Verification

if TYPE_CHECKING:
    import torch

COLDEST = 1e-6
"""Temperatures below it are greedy: any difference between two float32 logits would make the larger one certain."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Temperature and filters, applied alike to target and draft, in the order of transformers' ``generate``.

    Temperature 0 (below 1e-6) is greedy; top_k 0, top_p 1 and min_p 0 leave the distribution alone. ``verification``
    says whether draft tokens are verified one by one or as a block, which makes no difference to greedy decoding.
    ``rule`` is of one text: which tokens may follow.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    verification: Verification = "token"
    rule: GrammarRule | None = field(default=None, compare=False)

    @classmethod
    def of(cls, settings: SamplingTable, rule: GrammarRule | None = None) -> "Sampling":
        """Those of a sampling table, with the rule of its grammar for one text.

        Raises:
            ProfileError: the table has a grammar and there is no rule: the text is read, and was not written so.
        """
        if rule is None and settings.names_grammar:
            what = "texts are measured without a grammar here, and the sampling settings name one"
            raise ProfileError(what, f"leave {', '.join(settings.names_grammar)} out of [sampling]")
        return cls(settings.temperature, settings.top_k, settings.top_p, settings.min_p, settings.verification, rule)

    def over(self, runner: Runner) -> Runner:
        """A runner as a text with these settings uses it: with the text's grammar around it, if it has one."""
        if self.rule is None:
            return runner
        return RuledRunner(runner, self.rule.fresh(), self.rule.prompt[: runner.length])

    @property
    def greedy(self) -> bool:
        return self.temperature < COLDEST

    @property
    def filters(self) -> bool:
        """Whether some tokens may get no probability at all."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    @property
    def in_blocks(self) -> bool:
        """Whether drawn tokens are verified as a block."""
        return not self.greedy and self.verification == "block"

    @property
    def plain(self) -> bool:
        """Whether the processed distribution is the softmax of the raw logits."""
        return self.temperature == 1 and not self.filters

    def probs(self, logits: "torch.Tensor") -> "torch.Tensor":  # (..., V) -> (..., V)
        """The processed distribution in float32, as `Rows.laws`; one-hot at the argmax when greedy."""
        import torch

        from specctl.decoding.rows.rows_of import rows_over

        laws = rows_over(logits.reshape(-1, logits.shape[-1])).laws(self).numbers
        return (laws if isinstance(laws, torch.Tensor) else torch.from_numpy(laws)).reshape(logits.shape)


UNPROCESSED = Sampling(1.0)
"""The softmax of the logits as they are."""
