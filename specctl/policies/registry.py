"""The stopping policies that decide by themselves, by name."""

from specctl.policies.adaedl import AdaEdl, MaxConfidence
from specctl.policies.base import Rule
from specctl.policies.confidence import ConfidentPrefix
from specctl.policies.constant import Constant, NoDraft
from specctl.policies.cost_optimal import CostOptimal
from specctl.policies.disco import Disco
from specctl.policies.heuristic import Heuristic
from specctl.policies.self_verify import SelfVerify
from specctl.policies.specdec import SpecDecPlusPlus
from specctl.policies.svip import Svip

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
}
