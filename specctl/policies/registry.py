"""The stopping policies that decide by themselves, by name."""

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
"""Rules of other engines: they are replayed for exports, and cannot be chosen."""
