"""Every stopping policy by its name in profiles, flags and files: those that ship and those that are registered."""

import dataclasses
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from specctl.plugins import Registry
from specctl.policies.base import SIGNALS, Rule
from specctl.policies.registry import ENGINE_RULES, RULES
from specctl.policies.rules.bandit import Bandit

_KINDS = (bool, int, float, str, tuple)


def checked_policy(found: object) -> type[Rule]:
    """A registered class, if it is a stopping policy.

    Raises:
        ValueError: it is none; the message says what is wrong.
    """
    if not (isinstance(found, type) and issubclass(found, Rule)):
        raise ValueError(f"{getattr(found, '__name__', found)!r} is not a subclass of specctl.policies.Rule")
    if "__dataclass_fields__" not in vars(found):
        raise ValueError(f"{found.__name__} is not a dataclass")
    hints = get_type_hints(found, include_extras=True)
    for setting in dataclasses.fields(found):  # type: ignore[arg-type]
        if not setting.init:
            continue
        if setting.default is dataclasses.MISSING:
            raise ValueError(f"its setting {setting.name} has no default value")
        if setting.name.startswith("_") or setting.name == "name":
            raise ValueError(f"{setting.name} cannot be the name of a setting")
        if _kind(hints[setting.name]) not in _KINDS:
            raise ValueError(f"its setting {setting.name} is not an int, float, bool, str or tuple")
    policy = found()
    if unknown := sorted(set(policy.signals | found.signals_of({})) - set(SIGNALS)):
        raise ValueError(f"it reads {', '.join(unknown)}, and the signals are {', '.join(SIGNALS)}")
    limit = policy.draft_limit()
    if type(limit) is not int or limit < 0:
        raise ValueError(f"its draft_limit() is {limit!r}, no number of tokens")
    return found


def _kind(hint: Any) -> Any:
    bare = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    return get_origin(bare) or bare


POLICIES: Registry[type[Rule]] = Registry(
    "policy", {**RULES, "bandit": Bandit}, "specctl.policies", checked_policy, ENGINE_RULES
)
"""Every stopping policy by its name; of `ENGINE_RULES` it gives the class, but does not list it."""
