"""When to stop drafting. Pure Python on floats: no torch, no I/O.

A policy is a dataclass: its public fields are its settings, with their bounds, and the only place where they are
written down. Profiles, flags and calibration read them from here.
"""

from specctl.policies.adaedl import AdaEdl, MaxConfidence
from specctl.policies.base import DISTRIBUTION_SIGNALS, SIGNALS, Signal, StoppingPolicy
from specctl.policies.constant import Constant, NoDraft
from specctl.policies.cost_optimal import CostOptimal
from specctl.policies.drafting import collect_phase, draft_phase
from specctl.policies.heuristic import Heuristic
from specctl.policies.self_verify import SelfVerify
from specctl.policies.specdec import SpecDecPlusPlus
from specctl.policies.svip import Svip

POLICIES: dict[str, type[StoppingPolicy]] = {
    "none": NoDraft,
    "constant": Constant,
    "heuristic": Heuristic,
    "max-confidence": MaxConfidence,
    "svip": Svip,
    "adaedl": AdaEdl,
    "self-verify": SelfVerify,
    "specdec++": SpecDecPlusPlus,
    "cost-optimal": CostOptimal,
}

__all__ = ["DISTRIBUTION_SIGNALS", "POLICIES", "SIGNALS", "Signal", "StoppingPolicy", "collect_phase", "draft_phase"]
