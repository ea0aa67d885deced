"""Who runs: policies as profiles write them."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from specctl.benchmark.results import Entrant
from specctl.policies import POLICIES


def policy_entrant(table: Mapping[str, Any]) -> Entrant:
    """A policy table with its name as an entrant; its label tells the settings that are not the defaults."""
    name = table["name"]
    policy = POLICIES[name](**{key: value for key, value in table.items() if key != "name"})
    settings: dict[str, Any] = {}
    changed = []
    for field in fields(policy):  # type: ignore[arg-type]
        if field.init:
            settings[field.name] = getattr(policy, field.name)
            if settings[field.name] != field.default:
                changed.append(f"{field.name}={settings[field.name]}")
    return Entrant(f"{name}:{','.join(changed)}" if changed else name, "policy", name, settings)
