"""From transformers' logits processors to how tokens are drawn and which rules they follow."""

from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

import torch
import transformers

from specctl.decoding.sampling import Sampling
from specctl.errors import UsageError
from specctl.models.running.rules.token_rules import TokenRules
from specctl.profile.schema import Verification

FILTERS: dict[type, str] = {
    transformers.TemperatureLogitsWarper: "temperature",
    transformers.TopHLogitsWarper: "top_h",
    transformers.TopKLogitsWarper: "top_k",
    transformers.TopPLogitsWarper: "top_p",
    transformers.MinPLogitsWarper: "min_p",
    transformers.TypicalLogitsWarper: "typical_p",
    transformers.EpsilonLogitsWarper: "epsilon_cutoff",
    transformers.EtaLogitsWarper: "eta_cutoff",
}
"""The processors that `Sampling` is, in its order, each with its setting there."""
OWN_NAMES = {"typical_p": "mass", "epsilon_cutoff": "epsilon", "eta_cutoff": "epsilon"}
"""What processors call these settings."""
RULES = frozenset(
    {
        transformers.EncoderNoRepeatNGramLogitsProcessor,
        transformers.EncoderRepetitionPenaltyLogitsProcessor,
        transformers.ExponentialDecayLengthPenalty,
        transformers.ForcedBOSTokenLogitsProcessor,
        transformers.ForcedEOSTokenLogitsProcessor,
        transformers.InfNanRemoveLogitsProcessor,
        transformers.LogitNormalization,
        transformers.MinLengthLogitsProcessor,
        transformers.MinNewTokensLengthLogitsProcessor,
        transformers.NoBadWordsLogitsProcessor,
        transformers.NoRepeatNGramLogitsProcessor,
        transformers.RepetitionPenaltyLogitsProcessor,
        transformers.SequenceBiasLogitsProcessor,
        transformers.SuppressTokensAtBeginLogitsProcessor,
        transformers.SuppressTokensLogitsProcessor,
    }
)
"""The processors that are functions of the text before a token and its scores, so that a verification in one pass can
apply them position by position."""


def sampling_and_rules(
    processors: Iterable[Any], device: torch.device, *, do_sample: bool, verification: Verification
) -> tuple[Sampling, TokenRules]:
    """How ``generate`` draws with these processors.

    Args:
        processors: as ``generate`` prepares them.
        device: that they were made for.
        do_sample: whether tokens are drawn; otherwise filters make no difference, for they keep the likeliest token.
        verification: how drawn draft tokens are verified.

    Raises:
        UsageError: a processor is of a class that is not known, a filter comes before a rule or out of `Sampling`'s
            order, or keeps more tokens than its own setting says.
    """
    given = _without_idle_normalization(list(processors))
    kinds = [type(one) for one in given]
    if unknown := [kind.__name__ for kind in dict.fromkeys(kinds) if kind not in RULES and kind not in FILTERS]:
        raise UsageError(
            f"generate was given {', '.join(unknown)}, which speculative decoding cannot verify token by token",
            "Leave it out, or generate without custom_generate. Known are "
            f"{', '.join(sorted(kind.__name__ for kind in [*RULES, *FILTERS]))}.",
        )
    ranks = [[*FILTERS].index(kind) if kind in FILTERS else -1 for kind in kinds]
    for (one, rank), (other, next_rank) in pairwise(zip(kinds, ranks, strict=True)):
        if next_rank <= rank and rank >= 0:
            raise UsageError(
                f"{one.__name__} comes before {other.__name__}, and the order is rules, "
                f"{', '.join(FILTERS.values())}, each once",
                "Set them in the generation config, which puts them in this order.",
            )
    rules = TokenRules((one for one in given if type(one) in RULES), device)
    if not do_sample:
        return Sampling(), rules
    values: dict[str, Any] = {"temperature": 1.0}
    for one in given:
        if (name := FILTERS.get(type(one))) is not None:
            _require_plain(one)
            value = getattr(one, OWN_NAMES.get(name, name))
            values[name] = float(value) if isinstance(value, torch.Tensor) else value
    return Sampling(**values, verification=verification), rules


def _without_idle_normalization(processors: list[Any]) -> list[Any]:
    """The processors without each `LogitNormalization` behind the last rule.

    It moves all scores of a row alike, which no filter and no draw sees; a rule that depends on a score's sign or size,
    such as a repetition penalty, does.
    """
    rules = (place for place, one in enumerate(processors) if type(one) in RULES - {transformers.LogitNormalization})
    last = max(rules, default=-1)
    return [
        one for place, one in enumerate(processors) if place < last or type(one) is not transformers.LogitNormalization
    ]


def _require_plain(processor: Any) -> None:
    """Raise UsageError for a filter that keeps tokens which it would drop, or does not drop them wholly."""
    settings: Mapping[str, Any] = vars(processor)
    # `TopKLogitsWarper` has put it into top_k.
    least = 1 if isinstance(processor, transformers.TopKLogitsWarper) else settings.get("min_tokens_to_keep", 1)
    if least != 1 or settings.get("filter_value", -float("inf")) != -float("inf"):
        raise UsageError(
            f"{type(processor).__name__} has min_tokens_to_keep or a filter_value of its own",
            "Leave both at their defaults.",
        )
