"""Which policies can stop a draft that copies from the text."""

from collections.abc import Iterable

from specctl.errors import ProfileError, UsageError
from specctl.policies import LOOKUP_SIGNALS, POLICIES, Setting
from specctl.profile.schema import LOOKUP_POLICY, DraftTable


def unoffered(policy: str) -> str:
    """Why a policy that reads a draft's distribution cannot stop a lookup, and which policies can."""
    fitting = [name for name, rule in POLICIES.items() if rule.drafts and not rule.signals_of({}) - LOOKUP_SIGNALS]
    default = Setting.of(LOOKUP_POLICY).label
    return f"{policy} reads signals that a lookup does not have; choose {', '.join(fitting)} or {default}"


def require_offered(setting: Setting) -> None:
    """Raise ProfileError if the policy of a lookup reads a draft's distribution."""
    if setting.signals - LOOKUP_SIGNALS:
        raise ProfileError(unoffered(setting.policy))


def require_models(drafts: Iterable[DraftTable], purpose: str, hint: str) -> None:
    """Raise UsageError if one of the drafts is a lookup; ``purpose`` is what needs a distribution."""
    if any(draft.is_lookup for draft in drafts):
        raise UsageError(f"{purpose} reads a draft's distributions, and a lookup has none", hint)
