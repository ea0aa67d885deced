"""Token rules from a target's generation_config.json, such as a repetition penalty.

transformers' own logits processors apply them. Most models have only a repetition penalty; it has its own
implementation, without torch and without a call for each row. Each rule depends only on the text before a token, so the
target's distribution at a position is the same in target-only decoding and in verification.
"""

from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import transformers

from specctl.models.passes.forward import Numbers
from specctl.models.running.ruled import TokenRule
from specctl.models.running.text_rules import lone_repetition_penalty, repetition_rule, rules_in


@dataclass(frozen=True, slots=True)
class Context:
    """The inputs for making a rule."""

    eos: list[int]  # ids that end a sequence, at least one
    vocabulary: int  # V, the width of the logits
    device: str  # the device of the logits


Maker = Callable[[Any, Context], Any]


# A word with an id beyond the vocabulary can never occur; transformers' processors accept neither such ids nor an empty
# list.
def _bad_words(words: Any, context: Context) -> transformers.NoBadWordsLogitsProcessor | None:
    known = [list(word) for word in words if all(token < context.vocabulary for token in word)]
    return transformers.NoBadWordsLogitsProcessor(known, context.eos) if known else None


def _bias(bias: Any, context: Context) -> transformers.SequenceBiasLogitsProcessor | None:
    pairs = bias.items() if isinstance(bias, dict) else bias
    known = [[list(word), value] for word, value in pairs if all(token < context.vocabulary for token in word)]
    return transformers.SequenceBiasLogitsProcessor(known) if known else None


_MAKERS: dict[str, Maker] = {
    "sequence_bias": _bias,
    "repetition_penalty": lambda value, _: transformers.RepetitionPenaltyLogitsProcessor(value),
    "no_repeat_ngram_size": lambda value, _: transformers.NoRepeatNGramLogitsProcessor(value),
    "bad_words_ids": _bad_words,
    "min_length": lambda value, context: transformers.MinLengthLogitsProcessor(
        value, context.eos, device=context.device
    ),
    "forced_bos_token_id": lambda value, _: transformers.ForcedBOSTokenLogitsProcessor(value),
    "remove_invalid_values": lambda _, __: transformers.InfNanRemoveLogitsProcessor(),
    "suppress_tokens": lambda value, context: transformers.SuppressTokensLogitsProcessor(value, device=context.device),
}
"""A processor for each of `RULES`."""


def config_rules(
    config: transformers.GenerationConfig, eos: Set[int], vocabulary: int, device: torch.device
) -> TokenRule | None:
    """The token rules of a generation configuration, see `TokenRules.of`; None without rules."""
    if (penalty := lone_repetition_penalty(config)) is not None:
        return None if penalty == 1 else repetition_rule(penalty, vocabulary)
    rules = TokenRules.of(config, eos, vocabulary, device)
    return rules if rules.active else None


class TokenRules:
    """Rules about which tokens may follow a text.

    Args:
        processors: logits processors that depend only on the text and the scores.
        device: the device that they run on; None for the logits' device.
    """

    def __init__(self, processors: Iterable[Any], device: torch.device | None = None) -> None:
        self._processors = transformers.LogitsProcessorList(processors)
        self._device = device
        self.active = bool(self._processors)

    @classmethod
    def of(
        cls, config: transformers.GenerationConfig, eos: Set[int], vocabulary: int, device: torch.device
    ) -> "TokenRules":
        """The rules of a generation configuration.

        Args:
            config: the target's.
            eos: ids that end a sequence.
            vocabulary: V, the pair's shared vocabulary.
            device: of the logits.
        """
        context = Context(sorted(eos), vocabulary, str(device))
        rules = rules_in(config)
        if not eos:
            rules.pop("min_length", None)  # nothing can end before it
        made = [_MAKERS[name](value, context) for name, value in rules.items()]
        return cls(processor for processor in made if processor is not None)

    def fresh(self) -> "TokenRules":
        return self

    def forced(self, text: Sequence[int]) -> int | None:  # noqa: ARG002 - transformers' processors cannot tell
        return None

    def apply(self, rows: Numbers, text: Sequence[int]) -> torch.Tensor:
        """The logits that follow the last R tokens of a text, with the rules applied.

        Args:
            rows: logits ``(R, V)``; row i follows ``text[: len(text) - R + 1 + i]``.
            text: all tokens, the prompt's included.

        Returns:
            ``(R, V)`` float32.
        """
        logits = torch.from_numpy(rows) if isinstance(rows, np.ndarray) else rows
        scores = logits.to(self._device or logits.device, torch.float32)
        if not len(scores):
            return scores.to(logits.device)
        ids: Any = torch.tensor([list(text)], device=scores.device)  # (1, T)
        before = len(text) - len(scores)
        ruled = [
            self._processors(ids[:, : before + row], scores[row - 1 : row].clone()) for row in range(1, len(scores) + 1)
        ]
        return torch.cat(ruled).to(logits.device)
