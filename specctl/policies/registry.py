"""The stopping policies that decide by themselves, by name."""

from specctl.policies.base import Rule
from specctl.policies.engine_rules.calibrated_confidence import CalibratedConfidence
from specctl.policies.engine_rules.probed_length import ProbedLength
from specctl.policies.engine_rules.stepped_length import SteppedLength
from specctl.policies.rules.adaedl import AdaEdl, MaxConfidence
from specctl.policies.rules.confidence import ConfidentPrefix
from specctl.policies.rules.constant import Constant, NoDraft
from specctl.policies.rules.cost_optimal import CostOptimal
from specctl.policies.rules.disco import Disco
from specctl.policies.rules.heuristic import Heuristic
from specctl.policies.rules.self_verify import SelfVerify
from specctl.policies.rules.specdec import SpecDecPlusPlus
from specctl.policies.rules.svip import Svip
from specctl.policies.rules.vllm_adaptive import VllmAdaptive

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
