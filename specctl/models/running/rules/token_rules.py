"""The rules of a target's generation_config.json about which tokens may follow a text, such as a repetition penalty.

transformers' own logits processors apply them. Each rule here depends on the text before a token and on nothing else,
so the target's distribution at a position is the same in target-only decoding and in a verification.
"""

from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import transformers

from specctl.models.passes.forward import Numbers


@dataclass(frozen=True, slots=True)
class Context:
    """What a rule is made for.

    Attributes:
        eos: ids that end a sequence, at least one.
        vocabulary: V, the width of the logits.
        device: of the logits.
    """

    eos: list[int]
    vocabulary: int
    device: str


Maker = Callable[[Any, Context], Any]


# A word with an id beyond the vocabulary can never be written; transformers' processors take none, nor an empty list.
def _bad_words(words: Any, context: Context) -> transformers.NoBadWordsLogitsProcessor | None:
    known = [list(word) for word in words if all(token < context.vocabulary for token in word)]
    return transformers.NoBadWordsLogitsProcessor(known, context.eos) if known else None


def _bias(bias: Any, context: Context) -> transformers.SequenceBiasLogitsProcessor | None:
    pairs = bias.items() if isinstance(bias, dict) else bias
    known = [[list(word), value] for word, value in pairs if all(token < context.vocabulary for token in word)]
    return transformers.SequenceBiasLogitsProcessor(known) if known else None


# In the order in which transformers applies them; each with the value that means nothing, besides None.
_RULES: dict[str, tuple[Any, Maker]] = {
    "sequence_bias": ({}, _bias),
    "repetition_penalty": (1.0, lambda value, _: transformers.RepetitionPenaltyLogitsProcessor(value)),
    "no_repeat_ngram_size": (0, lambda value, _: transformers.NoRepeatNGramLogitsProcessor(value)),
    "bad_words_ids": ([], _bad_words),
    "min_length": (0, lambda value, c: transformers.MinLengthLogitsProcessor(value, c.eos, device=c.device)),
    "forced_bos_token_id": (None, lambda value, _: transformers.ForcedBOSTokenLogitsProcessor(value)),
    "remove_invalid_values": (False, lambda _, __: transformers.InfNanRemoveLogitsProcessor()),
    "suppress_tokens": ([], lambda value, c: transformers.SuppressTokensLogitsProcessor(value, device=c.device)),
}

_REFUSED: dict[str, tuple[Any, str]] = {
    "num_beams": (1, "beams follow several texts at once"),
    "penalty_alpha": (0.0, "contrastive search compares several texts"),
    "dola_layers": (None, "it mixes the logits of several layers"),
    "guidance_scale": (1.0, "guidance needs a second pass over another prompt"),
    "watermarking_config": (None, "a watermark's random choices cannot be verified"),
    "encoder_repetition_penalty": (1.0, "it depends on where the prompt ends"),
    "encoder_no_repeat_ngram_size": (0, "it depends on where the prompt ends"),
    "min_new_tokens": (0, "it depends on where the prompt ends"),
    "forced_eos_token_id": (None, "it depends on the token limit"),
    "exponential_decay_length_penalty": (None, "it depends on where the prompt ends"),
    "begin_suppress_tokens": ([], "it depends on where the prompt ends"),
}
"""Settings that change the text and are not supported, each with the value that means nothing, and why."""


def rules_in(config: transformers.GenerationConfig) -> dict[str, Any]:
    """The rules that are in force, by name."""
    values = ((name, getattr(config, name, None), nothing) for name, (nothing, _) in _RULES.items())
    return {name: value for name, value, nothing in values if value is not None and value != nothing}


def unsupported_in(config: transformers.GenerationConfig) -> dict[str, str]:
    """Settings in force that change the text and cannot be honoured, by name, each with the reason."""
    values = ((name, getattr(config, name, None), nothing, why) for name, (nothing, why) in _REFUSED.items())
    return {f"{name} = {value}": why for name, value, nothing, why in values if value is not None and value != nothing}


class TokenRules:
    """Rules about which tokens may follow a text.

    Args:
        processors: logits processors, each a function of the text and the scores alone.
        device: where they compute; None for where the logits are.
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
        made = [_RULES[name][1](value, context) for name, value in rules.items()]
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
