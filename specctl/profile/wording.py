"""Keys, values and suggestions in the form that messages use."""

import json
import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any

Key = tuple[str, ...]  # A key path from the root of a profile

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
KIND = re.compile(r"^(?:embedded|prompt|target|drafter):")  # Before names of models that are not files of a user


def dotted(key: Key) -> str:
    """A key path in TOML's dotted form, with quotes where TOML needs them."""
    return ".".join(part if _BARE_KEY.fullmatch(part) else json.dumps(part) for part in key)


def shown(value: Any) -> str:
    """A value for messages, written as in TOML."""
    try:
        return brief(json.dumps(value, default=str, ensure_ascii=False))
    except ValueError:  # Python does not write integers of thousands of digits
        return "a value that is too long"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """``; did you mean 'x'? (known: x, y, z)``: the nearest known name, if one is near, and all known names."""
    names = list(known)
    begun = [name for name in names if len(word) > 1 and name.startswith(word)]
    near = begun[:1] or get_close_matches(word, names, n=1)
    question = f"; did you mean '{near[0]}'?" if near else ""
    return f"{question} (known: {', '.join(names) or 'none'})"


def brief(text: str, most: int = 200) -> str:
    """A text for messages, cut where it is too long to read."""
    return text if len(text) <= most else f"{text[:most]}..."


def short_name(model: str) -> str:
    """A model's name without its owner, folder or kind; a tag stays, as in ``Qwen3-8B-GGUF:Q4_K_M``."""
    return KIND.sub("", model).rpartition("/")[2]


def distinct_name(path: str, others: Sequence[str]) -> str:
    """The shortest end of a path that no other path ends with; ``others`` may contain the path itself."""
    own = _parts(path)
    for count in range(1, len(own)):
        if all(_parts(other)[-count:] != own[-count:] for other in others if other != path):
            return "/".join(own[-count:])
    return path


def short_names(models: Sequence[str]) -> list[str]:
    """For each of several models the shortest end of its name that no other has."""
    return [distinct_name(model, models) for model in models]


def _parts(path: str) -> list[str]:
    return path.replace(":", "/").strip("/").split("/")
