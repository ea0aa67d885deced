"""Every stopping policy by its name in profiles, flags and files."""

from specctl.policies.bandit import Bandit
from specctl.policies.base import Rule
from specctl.policies.registry import RULES

POLICIES: dict[str, type[Rule]] = {**RULES, "bandit": Bandit}
