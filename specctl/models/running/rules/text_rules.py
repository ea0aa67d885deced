"""The rules of one text: its penalties and biases, and its grammar."""

from collections.abc import Sequence, Set

import numpy as np
import numpy.typing as npt

from specctl.errors import RecordError
from specctl.models.files.tokenizer import Tokenizer
from specctl.models.passes.forward import Numbers
from specctl.models.running.rules.grammar import grammars_of, source_of
from specctl.models.running.rules.ruled import TokenRule
from specctl.profile.base_tables import GRAMMARS, SamplingTable


class TextRules:
    """All rules of one text, in their order: a `TokenRule` too.

    Args:
        prompt: ids before the text.
        rules: at least one.
    """

    def __init__(self, prompt: Sequence[int], rules: Sequence[TokenRule]) -> None:
        self.prompt = tuple(prompt)
        self._rules = rules

    def fresh(self) -> "TextRules":
        """The same for another runner."""
        return TextRules(self.prompt, [rule.fresh() for rule in self._rules])

    def apply(self, rows: Numbers, text: Sequence[int]) -> Numbers:
        for rule in self._rules:
            rows = rule.apply(rows, text)
        return rows

    def forced(self, text: Sequence[int]) -> int | None:
        return next((token for rule in self._rules if (token := rule.forced(text)) is not None), None)


class Penalties:
    """Ids become less likely, or likelier, by what the text has: transformers' and OpenAI's rules of these names.

    Args:
        settings: with its ``logit_bias``, added to the logits; then ``repetition_penalty``, which divides positive
            logits of ids that the text has, prompt included, and multiplies negative ones; then of each id that was
            written behind the prompt ``presence_penalty`` is taken from its logit, and ``frequency_penalty`` as often
            as it was written.
        prompt: how many tokens the prompt has.
        vocabulary: V, the width of the logits.

    Raises:
        RecordError: a bias of what is no id.
    """

    def __init__(self, settings: SamplingTable, prompt: int, vocabulary: int) -> None:
        bias = {int(token): value for token, value in (settings.logit_bias or {}).items()}
        if wrong := [token for token in bias if token >= vocabulary]:
            raise RecordError("invalid_sampling", f"logit_bias: {wrong[0]} is no id of the target's {vocabulary}")
        self._bias = np.zeros(vocabulary, np.float32)
        self._bias[list(bias)] = list(bias.values())
        self._settings, self._prompt = settings, prompt

    def fresh(self) -> "Penalties":
        return self

    def forced(self, text: Sequence[int]) -> int | None:  # noqa: ARG002 - none is ruled out
        return None

    def apply(self, rows: Numbers, text: Sequence[int]) -> Numbers:
        before = len(text) - len(rows) + 1  # tokens that the first row follows
        seen = np.stack([self._counts(text[: before + row]) > 0 for row in range(len(rows))])  # (R, V)
        counts = np.stack([self._counts(text[self._prompt : before + row]) for row in range(len(rows))])
        presence, frequency = self._settings.presence_penalty, self._settings.frequency_penalty
        taken = (presence * (counts > 0) + frequency * counts).astype(np.float32)
        ratio = self._settings.repetition_penalty
        if isinstance(rows, np.ndarray):
            biased = rows + self._bias
            return np.where(seen, np.where(biased > 0, biased / ratio, biased * ratio), biased) - taken
        import torch

        tensor, at = rows.float() + torch.from_numpy(self._bias).to(rows.device), rows.device
        repeated = torch.where(tensor > 0, tensor / ratio, tensor * ratio)
        return torch.where(torch.from_numpy(seen).to(at), repeated, tensor) - torch.from_numpy(taken).to(at)

    def _counts(self, tokens: Sequence[int]) -> npt.NDArray[np.int64]:  # (V,)
        return np.bincount(np.asarray(tokens, np.int64), minlength=len(self._bias))[: len(self._bias)]


def text_rules(
    settings: SamplingTable, tokenizer: Tokenizer, eos: Set[int], prompt: Sequence[int], vocabulary: int
) -> TextRules | None:
    """The rules that a sampling table has for what follows a prompt; None where it has none.

    Args:
        settings: the sampling table in force.
        tokenizer: the target's.
        eos: ids that end a text.
        prompt: ids.
        vocabulary: V, the pair's shared vocabulary.

    Raises:
        RecordError: the grammar cannot be compiled, no grammar can be here, or a bias is of no id.
    """
    if not settings.rules:
        return None
    rules: list[TokenRule] = []
    if any(name not in GRAMMARS for name in settings.rules):
        rules.append(Penalties(settings, len(prompt), vocabulary))
    if (source := source_of(settings)) is not None:
        rules.append(grammars_of(tokenizer, eos).rule(source, prompt, vocabulary))
    return TextRules(prompt, rules)
