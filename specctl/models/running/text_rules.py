"""The rules of one text and those of a generation_config.json, without torch and transformers."""

from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import numpy as np
import numpy.typing as npt

from specctl.errors import RecordError
from specctl.models.files.tokenizer import Tokenizer
from specctl.models.passes.forward import Numbers
from specctl.models.running.grammars.grammar import UNFIT, grammars_of, source_of
from specctl.models.running.ruled import TokenRule
from specctl.profile.schema import ABOUT_PROMPTS, GRAMMARS, SamplingTable

Ids = npt.NDArray[np.int64]


class TextRules:
    """All rules of one text, in order; itself a `TokenRule`.

    Args:
        prompt: the ids before the text.
        rules: at least one.
        fit: judges the finished text; None if the rules enforce everything.
    """

    def __init__(
        self, prompt: Sequence[int], rules: Sequence[TokenRule], fit: Callable[[str], str | None] | None = None
    ) -> None:
        self.prompt = tuple(prompt)
        self._rules, self._fit = rules, fit

    def fresh(self) -> "TextRules":
        """A copy for another runner."""
        return TextRules(self.prompt, [rule.fresh() for rule in self._rules], self._fit)

    def require_fit(self, text: str, *, cut: bool) -> None:
        """Raise RecordError for a finished text that does not fit the schema.

        Args:
            text: the whole text.
            cut: whether a stop string ended it.
        """
        if self._fit is not None and (fault := self._fit(text)) is not None:
            where = "the text, which a stop string ended," if cut else "the text"
            raise RecordError(UNFIT, f"{where} does not fit the schema: {fault}")

    def apply(self, rows: Numbers, text: Sequence[int]) -> Numbers:
        for rule in self._rules:
            rows = rule.apply(rows, text)
        return rows

    def forced(self, text: Sequence[int]) -> int | None:
        return next((token for rule in self._rules if (token := rule.forced(text)) is not None), None)


class Penalties:
    """Changes the logits of ids by their occurrences in the text: transformers' and OpenAI's rules of these names.

    Args:
        settings: these apply in order. ``logit_bias`` is added to the logits. ``encoder_repetition_penalty`` multiplies
            positive and divides negative logits of ids in the prompt. ``repetition_penalty`` divides positive and
            multiplies negative logits of ids in the text, prompt included. For each id generated after the prompt,
            ``presence_penalty`` is subtracted once, and ``frequency_penalty`` once per occurrence. An
            ``encoder_no_repeat_ngram_size`` of n forbids an id that follows the same n - 1 ids in the prompt.
        prompt: ids before the text.
        vocabulary: V, the width of the logits.

    Raises:
        RecordError: a bias is for an invalid id.
    """

    def __init__(self, settings: SamplingTable, prompt: Sequence[int], vocabulary: int) -> None:
        bias = {int(token): value for token, value in (settings.logit_bias or {}).items()}
        if wrong := [token for token in bias if token >= vocabulary]:
            raise RecordError("invalid_sampling", f"logit_bias: {wrong[0]} is not an id of the target's {vocabulary}")
        self._bias = np.zeros(vocabulary, np.float32)
        self._bias[list(bias)] = list(bias.values())
        self._settings, self._prompt = settings, len(prompt)
        self._asked = np.unique(self._known(np.asarray(prompt, np.int64)))
        # For each n - 1 consecutive ids, those that follow them in the prompt.
        self._followers: dict[tuple[int, ...], list[int]] = {}
        width = settings.encoder_no_repeat_ngram_size
        for start in range(len(prompt) - width + 1) if width else ():
            *before, token = prompt[start : start + width]
            if token < vocabulary:
                self._followers.setdefault(tuple(before), []).append(token)

    def fresh(self) -> "Penalties":
        return self

    def forced(self, text: Sequence[int]) -> int | None:  # noqa: ARG002 - none is ruled out
        return None

    def apply(self, rows: Numbers, text: Sequence[int]) -> Numbers:
        ids = np.asarray(text, np.int64)
        ends = range(len(text) - len(rows) + 1, len(text) + 1)  # the length of the text before each row
        if isinstance(rows, np.ndarray):
            biased = rows + self._bias if self._settings.logit_bias else rows.copy()
            self._penalise(biased, ids, ends, np.where, lambda numbers: numbers)
            return biased
        import torch

        def there(numbers: npt.NDArray[Any]) -> torch.Tensor:
            return torch.from_numpy(numbers).to(rows.device)

        found = rows.to(torch.float32, copy=True)
        if self._settings.logit_bias:
            found += there(self._bias)
        self._penalise(found, ids, ends, torch.where, there)
        return found

    def _penalise(
        self, found: Any, ids: Ids, ends: Sequence[int], where: Callable[..., Any], there: Callable[..., Any]
    ) -> None:
        """Change the logits ``(R, V)`` of the text's ids in place; biases have been added already.

        Args:
            found: numpy or torch logits.
            ids: of the text.
            ends: the number of them before each row.
            where: the same library's ``where``.
            there: moves host numbers to the logits' device.
        """
        ratio, presence = self._settings.repetition_penalty, self._settings.presence_penalty
        frequency = self._settings.frequency_penalty
        if (asked := self._settings.encoder_repetition_penalty) != 1:
            places = _places([self._asked] * len(ends), there)
            some = found[places]
            found[places] = where(some < 0, some * (1 / asked), some / (1 / asked))  # rounds like transformers
        if ratio != 1:
            places = _places([self._known(ids[:end]) for end in ends], there)
            some = found[places]
            found[places] = where(some > 0, some / ratio, some * ratio)
        if presence or frequency:
            parts = (self._known(ids[self._prompt : end]) for end in ends)
            written, counts = zip(*(np.unique(part, return_counts=True) for part in parts), strict=True)
            taken = presence + frequency * np.concatenate(counts)
            found[_places(written, there)] -= there(taken.astype(np.float32))
        if self._followers:
            width = self._settings.encoder_no_repeat_ngram_size
            lasts = (tuple(ids[end + 1 - width : end].tolist()) for end in ends)
            banned = [np.array(self._followers.get(last, []), np.int64) for last in lasts]
            found[_places(banned, there)] = -np.inf

    def _known(self, ids: Ids) -> Ids:
        """The ids that have a column in the logits."""
        return ids[ids < len(self._bias)]


def _places(parts: Sequence[Ids], there: Callable[..., Any]) -> tuple[Any, Any]:
    """The rows and columns of ids, for rows that each contain a part of them."""
    rows = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    return there(rows), there(np.concatenate(parts))


def repetition_rule(penalty: float, vocabulary: int) -> Penalties:
    """The rule for a generation configuration's ``repetition_penalty``, above 0, on logits ``(R, V)``."""
    return Penalties(SamplingTable.model_construct(repetition_penalty=penalty), (), vocabulary)


def text_rules(
    settings: SamplingTable,
    tokenizer: Tokenizer,
    eos: Set[int],
    prompt: Sequence[int],
    vocabulary: int,
    usual: Mapping[str, Any] | None = None,
) -> TextRules | None:
    """A sampling table's token rules for the text after a prompt; None without any.

    Args:
        settings: the sampling table in force.
        tokenizer: the target's.
        eos: ids that end a text.
        prompt: ids.
        vocabulary: V, the pair's shared vocabulary.
        usual: default prompt rules by the table's keys, used where the table does not set them.

    Raises:
        RecordError: the grammar cannot be compiled, grammars are not available here, or a bias is for an invalid id.
    """
    if usual:
        settings = settings.model_copy(update={name: usual[name] for name in usual.keys() - {*settings.rules}})
    if not settings.rules:
        return None
    rules: list[TokenRule] = []
    fit: Callable[[str], str | None] | None = None
    if any(name not in GRAMMARS for name in settings.rules):
        rules.append(Penalties(settings, prompt, vocabulary))
    if (source := source_of(settings)) is not None:
        grammars = grammars_of(tokenizer, eos)
        compiled = grammars.compiled(source)
        rules.append(grammars.rule(compiled, prompt, vocabulary))
        fit = None if compiled.fit is None else compiled.fit.fault
    return TextRules(prompt, rules, fit)


RULES: dict[str, Any] = {
    "sequence_bias": {},
    "repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "bad_words_ids": [],
    "min_length": 0,
    "forced_bos_token_id": None,
    "remove_invalid_values": False,
    "suppress_tokens": [],
}
"""The supported rules in transformers' order, each with the value that, like None, has no effect."""

REFUSED: dict[str, tuple[Any, str]] = {
    "num_beams": (1, "beams follow several texts at once"),
    "penalty_alpha": (0.0, "contrastive search compares several texts"),
    "dola_layers": (None, "it mixes the logits of several layers"),
    "guidance_scale": (1.0, "guidance needs a second pass over another prompt"),
    "watermarking_config": (None, "a watermark's random choices cannot be verified"),
    "min_new_tokens": (0, "it depends on where the prompt ends"),
    "forced_eos_token_id": (None, "it depends on the token limit"),
    "exponential_decay_length_penalty": (None, "it depends on where the prompt ends"),
    "begin_suppress_tokens": ([], "it depends on where the prompt ends"),
}
"""Unsupported settings that change the text, each with the value that has no effect, and the reason."""


def rules_in(settings: object) -> dict[str, Any]:
    """The active rules by name.

    Args:
        settings: a ``GenerationConfig`` or another object with its attributes.
    """
    values = ((name, getattr(settings, name, None), nothing) for name, nothing in RULES.items())
    return {name: value for name, value, nothing in values if value is not None and value != nothing}


def prompt_rules_in(settings: object) -> dict[str, Any]:
    """The active rules that depend on a text's prompt, by their names in a sampling table."""
    values = ((name, getattr(settings, name, None)) for name in ABOUT_PROMPTS)
    return {name: value for name, value in values if value not in (None, SamplingTable.model_fields[name].default)}


def lone_repetition_penalty(settings: object) -> float | None:
    """The repetition penalty of settings with no other rules, 1 if there is none; None with other rules."""
    rules = rules_in(settings) | prompt_rules_in(settings)
    penalty = rules.pop("repetition_penalty", 1.0)
    known = not rules and isinstance(penalty, int | float) and penalty > 0  # otherwise transformers reports the error
    return float(penalty) if known else None


def unsupported_in(settings: object) -> dict[str, str]:
    """Active settings that change the text and are not supported, by name, each with the reason."""
    values = ((name, getattr(settings, name, None), nothing, why) for name, (nothing, why) in REFUSED.items())
    found = {f"{name} = {value}": why for name, value, nothing, why in values if value is not None and value != nothing}
    for name, value in prompt_rules_in(settings).items():
        try:
            SamplingTable.model_validate({name: value})
        except ValueError:
            found[f"{name} = {value}"] = "it is out of bounds"
    return found
