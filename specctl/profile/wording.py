"""Keys, values and near misses as messages spell them."""

import json
import re
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

Key = tuple[str, ...]
"""A key path from the root of a profile."""

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def dotted(key: Key) -> str:
    """A key path in TOML's dotted form, parts quoted where TOML asks for it."""
    return ".".join(part if _BARE_KEY.fullmatch(part) else json.dumps(part) for part in key)


def shown(value: Any) -> str:
    """A value as TOML users know it."""
    return json.dumps(value, default=str, ensure_ascii=False)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """``; did you mean 'x'? (x, y, z)``: the nearest known name, if any is near, and all that are known."""
    names = list(known)
    near = get_close_matches(word, names, n=1)
    question = f"; did you mean '{near[0]}'?" if near else ""
    return f"{question} (known: {', '.join(names) or 'none'})"
