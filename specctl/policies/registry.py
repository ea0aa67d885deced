"""The stopping policies that decide by themselves, by name, and parsing of a policy in one word."""

import tomllib
from typing import Any

from specctl.errors import too_deep
from specctl.policies.base import Rule
from specctl.policies.cost_optimal import CostOptimal
from specctl.policies.foreign_rules import CalibratedConfidence, ProbedLength, SteppedLength, VllmAdaptive
from specctl.policies.published import (
    AdaEdl,
    ConfidentPrefix,
    Constant,
    Disco,
    Heuristic,
    MaxConfidence,
    NoDraft,
    SelfVerify,
    SpecDecPlusPlus,
    Svip,
)

RULES: dict[str, type[Rule]] = {
    "none": NoDraft,
    "constant": Constant,
    "heuristic": Heuristic,
    "max-confidence": MaxConfidence,
    "svip": Svip,
    "adaedl": AdaEdl,
    "self-verify": SelfVerify,
    "specdec++": SpecDecPlusPlus,
    "disco": Disco,
    "confidence": ConfidentPrefix,
    "cost-optimal": CostOptimal,
    "vllm-adaptive": VllmAdaptive,
}
ENGINE_RULES: dict[str, type[Rule]] = {
    "probed-length": ProbedLength,
    "calibrated-confidence": CalibratedConfidence,
    "stepped-length": SteppedLength,
}
"""Rules of other engines: they are replayed for exports, and users cannot select them."""

_LONGEST_NUMBER = 20  # Characters of a 64-bit integer


def parse_value(text: str) -> Any:
    """A text parsed as a TOML value, or unchanged if it is not valid TOML, so that words need no quotes."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    if too_deep(parsed) or (len(text) > _LONGEST_NUMBER and isinstance(parsed.get("value"), int)):
        return text
    return parsed["value"] if parsed.keys() == {"value"} else text


def policy_table(text: str) -> dict[str, Any]:
    """The name and the settings of a policy in one word, for example ``svip:threshold=0.4,max_draft=20``, unchecked.

    Raises:
        ValueError: the text has a different form.
    """
    name, _, settings = text.partition(":")
    table: dict[str, Any] = {"name": name.strip()}
    for setting in _parts(settings) if settings else []:
        key, equals, value = setting.partition("=")
        if not equals or not key.strip() or key.strip() == "name":
            raise ValueError("expected NAME:KEY=VALUE,...")
        table[key.strip()] = parse_value(value.strip())
    return table


def _parts(settings: str) -> list[str]:
    """The settings between commas; commas inside a list do not separate."""
    parts: list[str] = []
    for piece in settings.split(","):
        if parts and parts[-1].count("[") > parts[-1].count("]"):
            parts[-1] += f",{piece}"
        else:
            parts.append(piece)
    return parts
