"""When to stop drafting. Pure Python on floats: no torch, no I/O.

A policy is a dataclass. Its public fields are its settings with their bounds; profiles, flags and calibration read the
settings from these fields and define none of their own.
"""

from specctl.policies.base import (
    DISTRIBUTION_SIGNALS,
    LOOKUP_SIGNALS,
    SIGNAL_NAMES,
    SIGNALS,
    TOP_PROBS,
    TRAINED_SIGNALS,
    Resting,
    Rule,
    Signal,
    StoppingPolicy,
    never_stops,
    read,
    rests,
)
from specctl.policies.drafting import TextRead, collect_phase, draft_phase, longest_draft
from specctl.policies.known_policies import POLICIES
from specctl.policies.setting import NONE, Setting, nested

__all__ = [
    "DISTRIBUTION_SIGNALS",
    "LOOKUP_SIGNALS",
    "NONE",
    "POLICIES",
    "SIGNALS",
    "SIGNAL_NAMES",
    "TOP_PROBS",
    "TRAINED_SIGNALS",
    "Resting",
    "Rule",
    "Setting",
    "Signal",
    "StoppingPolicy",
    "TextRead",
    "collect_phase",
    "draft_phase",
    "longest_draft",
    "nested",
    "never_stops",
    "read",
    "rests",
]
