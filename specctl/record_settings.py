"""Sampling settings in a record: the object ``sampling``, or OpenAI's names next to the prompt."""

import json
from collections.abc import Mapping
from difflib import get_close_matches
from functools import lru_cache
from typing import Any

from specctl.errors import RecordError

PLACE = "sampling"
NAMES = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "typical_p": "typical_p",
    "epsilon_cutoff": "epsilon_cutoff",
    "eta_cutoff": "eta_cutoff",
    "top_h": "top_h",
    "max_new_tokens": "max_new_tokens",
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "seed": "seed",
    "stop": "stop",
    "logprobs": "logprobs",
    "top_logprobs": "logprobs",
    "repetition_penalty": "repetition_penalty",
    "repeat_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "encoder_repetition_penalty": "encoder_repetition_penalty",
    "encoder_no_repeat_ngram_size": "encoder_no_repeat_ngram_size",
    "logit_bias": "logit_bias",
    "schema": "json_schema",
    "json_schema": "json_schema",
    "guided_json": "json_schema",
    "regex": "regex",
    "guided_regex": "regex",
    "grammar": "grammar",
}
"""The names that records use, each with the key of a profile's ``[sampling]`` table that it sets."""
SETTING_KEYS = (PLACE, "policy", "draft", *NAMES)  # All keys of a record that are settings

TOOLS = ("tools", "tool_choice", "functions", "function_call", "parallel_tool_calls")
"""Settings about tools that a model may call."""
FOREIGN: Mapping[str, tuple[Any, ...]] = {
    "n": (1,), "best_of": (1,), "echo": (False,), "suffix": ("",), "prompt_logprobs": (), "length_penalty": (1,),
    "no_repeat_ngram_size": (0,), "response_format": ({"type": "text"},), "guided_choice": ([],),
    "guided_grammar": ("",), "tools": ([],), "tool_choice": ("none", "auto"), "functions": ([],),
    "function_call": ("none", "auto"), "parallel_tool_calls": (True, False), "ignore_eos": (False,),
    "min_tokens": (0,), "min_new_tokens": (0,), "max_length": (), "n_predict": (), "num_predict": (),
    "num_beams": (1,), "beam_width": (1,), "use_beam_search": (False,), "early_stopping": (False,), "do_sample": (),
    "top_a": (0,), "tfs_z": (1,), "mirostat": (0,), "stop_sequences": ([],), "stop_strings": ([],),
    "stop_token_ids": ([],), "bad_words": ([],), "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,), "spaces_between_special_tokens": (True,), "add_generation_prompt": (True,),
    "continue_final_message": (False,), "chat_template": (), "chat_template_kwargs": ({},),
    "truncate_prompt_tokens": (), "num_ctx": (), "sampling_params": ({},), "options": ({},), "modalities": (["text"],),
    "reasoning_effort": ("none",), "web_search_options": (), "service_tier": ("auto", "default"), "store": (False,),
    "verbosity": ("medium",),
}  # fmt: skip
"""Settings of other programs that have no effect here, each with the values, besides null, that change nothing."""
_EMPTY: Mapping[str, tuple[Any, ...]] = {"stop": ("",), "guided_regex": ("",)}
"""Settings that have an effect here, each with the values, besides null, that change nothing in other programs."""
_OFF: Mapping[str, Mapping[Any, Any]] = {"top_k": {-1: 0}}
"""Values that switch a setting off in other programs, each with the value that does so here."""
_LIKE = 0.85
_SHORT = 6  # The fewest letters of a name for which similar ones are searched: short names resemble too many others


def own_settings(data: Mapping[str, Any]) -> dict[str, tuple[str, Any]]:
    """The settings of a record by key of the ``[sampling]`` table: the name in the record, and the unchecked value.

    At the top level, null and an empty ``stop`` are ignored. ``stop`` may be one string. ``logprobs`` may be true or
    false, as in chat requests. A ``schema`` that is not a JSON schema is ignored.

    Raises:
        RecordError: two names set one key to different values.
    """
    given = [(key, NAMES[key], data[key]) for key in NAMES if not asks_for_nothing(key, data.get(key))]
    if not isinstance(data.get("schema"), dict | bool):  # that of a data set, such as a database's
        given = [one for one in given if one[0] != "schema"]
    given += [(f"{PLACE}.{key}", NAMES.get(key, key), value) for key, value in (data.get(PLACE) or {}).items()]
    if isinstance(data.get("logprobs"), bool):
        given.remove(("logprobs", "logprobs", data["logprobs"]))
        if not data["logprobs"]:
            given = [one for one in given if one[0] != "top_logprobs"]
        elif all(key != "logprobs" for _, key, _ in given):
            given.append(("logprobs", "logprobs", 0))
    found: dict[str, tuple[str, Any]] = {}
    for called, key, value in given:
        value = [value] if key == "stop" and isinstance(value, str) else switched_off(key, value)
        before, earlier = found.setdefault(key, (called, value))
        if earlier != value:
            what = f"{before} is {_brief(earlier)} and {called} is {_brief(value)}"
            raise RecordError("invalid_sampling", f"{what}; they are the same setting, so give one of them")
    return found


def switched_off(key: str, value: Any) -> Any:
    """A setting's value, or the one that switches it off here if this value does so in other programs."""
    off = _OFF.get(key, {})
    return off[value] if type(value) is int and value in off else value


def asks_for_nothing(key: str, value: Any) -> bool:
    """Whether a setting with this value has no effect: null, or the default."""
    return value is None or any(_same(value, nothing) for nothing in FOREIGN.get(key, _EMPTY.get(key, ())))


def _same(one: Any, other: Any) -> bool:
    """Whether two values are equal in JSON, where true is not 1."""
    return isinstance(one, bool) is isinstance(other, bool) and bool(one == other)


def ignored_setting(key: str, value: Any) -> str | None:
    """A warning about a key that looks like a setting but has no effect; None for any other key.

    A value that asks for nothing, such as ``n = 1``, needs no warning.
    """
    return None if asks_for_nothing(key, value) else _looks_like_a_setting(key)


@lru_cache(maxsize=10_000)
def _looks_like_a_setting(key: str) -> str | None:
    if key in NAMES:
        return None
    if key in FOREIGN:
        return f"`{key}` is not a setting of specctl and has no effect"
    plain = _plain(key)
    near = next((name for name in NAMES if _plain(name) == plain), None)
    if near is None and len(plain) >= _SHORT:
        near = next(
            iter(get_close_matches(key.lower(), [name for name in NAMES if len(name) >= _SHORT], 1, _LIKE)), None
        )
    return f"`{key}` has no effect; did you mean `{near}`?" if near is not None else None


def _plain(key: str) -> str:
    return "".join(letter for letter in key.lower() if letter.isalnum())


def _brief(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
