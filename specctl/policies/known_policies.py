"""Every stopping policy by its name in profiles, flags and files: built-in and registered ones."""

import dataclasses
from collections.abc import Callable
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

from specctl.plugins import PluginError, Registry
from specctl.policies.bandit import Bandit
from specctl.policies.base import SIGNALS, Rule, Signal, StoppingPolicy
from specctl.policies.registry import ENGINE_RULES, RULES
from specctl.records import DraftStep, Round

_KINDS = (bool, int, float, str, tuple)


def checked_policy(found: object) -> type[Rule]:
    """A registered class, checked to be a stopping policy.

    Raises:
        ValueError: it is not one; the message gives the reason.
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
        raise ValueError(f"its draft_limit() is {limit!r}, not a number of tokens")
    return found


def _kind(hint: Any) -> Any:
    bare = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    return get_origin(bare) or bare


POLICIES: Registry[type[Rule]] = Registry(
    "policy", {**RULES, "bandit": Bandit}, "specctl.policies", checked_policy, ENGINE_RULES
)
"""Every stopping policy by its name; of `ENGINE_RULES` it gives the class, but does not list it."""

Answer = TypeVar("Answer")
UNDRAWN: frozenset[Signal] = frozenset({"entropy", "top_prob"})  # The signals that do not depend on the drawn token
NO_TOKEN = -1


class RegisteredPolicy:
    """A `StoppingPolicy` wrapper for a registered policy, with checks of everything the policy returns.

    Args:
        policy: the registered policy.
        what: its name and distribution, for messages.

    A policy that drops the token at which it stops sees neither that token nor anything that depends on it. Otherwise
    the output would be biased (docs/exactness.md).

    Raises:
        PluginError: from every method, where the policy raises an exception or returns an invalid value.
    """

    def __init__(self, policy: StoppingPolicy, what: str) -> None:
        self.policy = policy
        self._what = what
        self.signals: frozenset[Signal] = policy.signals
        self.keep_trigger = policy.keep_trigger
        self.drafts = policy.drafts
        if not self.keep_trigger and (drawn := sorted(self.signals - UNDRAWN)):
            error = ValueError(f"{', '.join(drawn)} may not be read by a policy that drops the token at which it stops")
            raise PluginError(what, "keep_trigger", error)

    @property
    def current_threshold(self) -> float | None:
        return self._asked("current_threshold", lambda: self.policy.current_threshold)

    def reset(self) -> None:
        self._asked("reset", self.policy.reset)

    def draft_limit(self) -> int:
        return self._asked("draft_limit", self._limit)

    def _limit(self) -> int:
        limit = self.policy.draft_limit()
        if type(limit) is not int or limit < 0:
            raise TypeError(f"{limit!r} is not a number of tokens")
        return limit

    def should_stop(self, step: DraftStep) -> bool:
        undrawn = DraftStep(step.index, NO_TOKEN, entropy=step.entropy, top_prob=step.top_prob)
        seen = step if self.keep_trigger else undrawn
        return bool(self._asked("should_stop", lambda: self.policy.should_stop(seen)))

    def observe(self, round_: Round) -> None:
        self._asked("observe", lambda: self.policy.observe(round_))

    def _asked(self, name: str, question: Callable[[], Answer]) -> Answer:
        try:
            return question()
        except Exception as error:
            raise PluginError(self._what, name, error) from error
