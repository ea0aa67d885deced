"""The rules that a target's generation_config.json may have about which tokens follow a text."""

from typing import Any

from specctl.profile.schema import ABOUT_PROMPTS, SamplingTable

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
    known = not rules and isinstance(penalty, int | float) and penalty > 0  # else transformers tells what is wrong
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
