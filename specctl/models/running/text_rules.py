"""The rules of one text and those of a generation_config.json, which need neither torch nor transformers."""

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
    """All rules of one text, in their order: a `TokenRule` too.

    Args:
        prompt: ids before the text.
        rules: at least one.
        fit: judges the text once it has ended; None where there is no more to ask of it.
    """

    def __init__(
        self, prompt: Sequence[int], rules: Sequence[TokenRule], fit: Callable[[str], str | None] | None = None
    ) -> None:
        self.prompt = tuple(prompt)
        self._rules, self._fit = rules, fit

    def fresh(self) -> "TextRules":
        """The same for another runner."""
        return TextRules(self.prompt, [rule.fresh() for rule in self._rules], self._fit)

    def require_fit(self, text: str, *, cut: bool) -> None:
        """Raise RecordError for a text that has ended and does not fit the schema.

        Args:
            text: all of it.
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
    """Ids become less likely, or likelier, by what the text has: transformers' and OpenAI's rules of these names.

    Args:
        settings: with its ``logit_bias``, added to the logits; then ``encoder_repetition_penalty``, which multiplies
            positive logits of ids that the prompt has, and divides negative ones; then ``repetition_penalty``, which
            divides positive logits of ids that the text has, prompt included, and multiplies negative ones; then of
            each id that was written after the prompt ``presence_penalty`` is taken from its logit, and
            ``frequency_penalty`` as often as it was written. With an ``encoder_no_repeat_ngram_size`` of n no id
            follows that the prompt has after the same n - 1 ids.
        prompt: ids before the text.
        vocabulary: V, the width of the logits.

    Raises:
        RecordError: a bias for something that is not an id.
    """

    def __init__(self, settings: SamplingTable, prompt: Sequence[int], vocabulary: int) -> None:
        bias = {int(token): value for token, value in (settings.logit_bias or {}).items()}
        if wrong := [token for token in bias if token >= vocabulary]:
            raise RecordError("invalid_sampling", f"logit_bias: {wrong[0]} is not an id of the target's {vocabulary}")
        self._bias = np.zeros(vocabulary, np.float32)
        self._bias[list(bias)] = list(bias.values())
        self._settings, self._prompt = settings, len(prompt)
        self._asked = np.unique(self._known(np.asarray(prompt, np.int64)))
        self._followers: dict[tuple[int, ...], list[int]] = {}  # of n - 1 ids in a row those that follow in the prompt
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
        ends = range(len(text) - len(rows) + 1, len(text) + 1)  # of the text that each row follows
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
        """Change biased logits ``(R, V)`` in their own memory, those of ids that the text has.

        Args:
            found: by numpy or torch.
            ids: of the text.
            ends: how many of them each row follows.
            where: of the same library.
            there: takes numbers of the host to where the logits are.
        """
        ratio, presence = self._settings.repetition_penalty, self._settings.presence_penalty
        frequency = self._settings.frequency_penalty
        if (asked := self._settings.encoder_repetition_penalty) != 1:
            places = _places([self._asked] * len(ends), there)
            some = found[places]
            found[places] = where(some < 0, some * (1 / asked), some / (1 / asked))  # as transformers rounds
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
        """Those that logits have a column for."""
        return ids[ids < len(self._bias)]


def _places(parts: Sequence[Ids], there: Callable[..., Any]) -> tuple[Any, Any]:
    """The rows and columns of ids, each row with a part of them."""
    rows = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    return there(rows), there(np.concatenate(parts))


def repetition_rule(penalty: float, vocabulary: int) -> Penalties:
    """The ``repetition_penalty`` of a generation configuration, above 0, about logits ``(R, V)``."""
    return Penalties(SamplingTable.model_construct(repetition_penalty=penalty), (), vocabulary)


def text_rules(
    settings: SamplingTable,
    tokenizer: Tokenizer,
    eos: Set[int],
    prompt: Sequence[int],
    vocabulary: int,
    usual: Mapping[str, Any] | None = None,
) -> TextRules | None:
    """The rules that a sampling table has for what follows a prompt; None where it has none.

    Args:
        settings: the sampling table in force.
        tokenizer: the target's.
        eos: ids that end a text.
        prompt: ids.
        vocabulary: V, the pair's shared vocabulary.
        usual: rules about the prompt that hold where the table has no others, by its keys.

    Raises:
        RecordError: the grammar cannot be compiled, no grammar can be here, or a bias is of no id.
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
"""Those that are followed, in the order in which transformers applies them, each with the value that means nothing
besides None."""

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
"""Settings that change the text and are not supported, each with the value that means nothing, and why."""


def rules_in(settings: object) -> dict[str, Any]:
    """The rules that are in force, by name.

    Args:
        settings: a ``GenerationConfig`` or another object with its attributes.
    """
    values = ((name, getattr(settings, name, None), nothing) for name, nothing in RULES.items())
    return {name: value for name, value, nothing in values if value is not None and value != nothing}


def prompt_rules_in(settings: object) -> dict[str, Any]:
    """The rules in force that are about a text's prompt, by their names in a sampling table."""
    values = ((name, getattr(settings, name, None)) for name in ABOUT_PROMPTS)
    return {name: value for name, value in values if value not in (None, SamplingTable.model_fields[name].default)}


def lone_repetition_penalty(settings: object) -> float | None:
    """The repetition penalty of settings without other rules, 1 if there is none of them; None if there are others."""
    rules = rules_in(settings) | prompt_rules_in(settings)
    penalty = rules.pop("repetition_penalty", 1.0)
    known = not rules and isinstance(penalty, int | float) and penalty > 0  # else transformers reports what is wrong
    return float(penalty) if known else None


def unsupported_in(settings: object) -> dict[str, str]:
    """Settings in force that change the text and cannot be honoured, by name, each with the reason."""
    values = ((name, getattr(settings, name, None), nothing, why) for name, (nothing, why) in REFUSED.items())
    found = {f"{name} = {value}": why for name, value, nothing, why in values if value is not None and value != nothing}
    for name, value in prompt_rules_in(settings).items():
        try:
            SamplingTable.model_validate({name: value})
        except ValueError:
            found[f"{name} = {value}"] = "it is out of bounds"
    return found
