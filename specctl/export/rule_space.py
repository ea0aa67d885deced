"""The settings of an engine's own rule, as policies that stop drafts where the engine does."""

from specctl.export.foreign_engine import Confidence, Engine
from specctl.policies import Setting

UNCAPPED = 1_000_000
"""The longest draft of a rule that has none."""
SHORT = (4, 6, 8)
"""The longest drafts of policies where texts draft together: each round is as long as the longest of them."""
_TWENTIETHS = tuple(round(0.05 * n, 2) for n in range(1, 20))


def rule_space(engine: Engine, confidence: Confidence | None, longest: int) -> list[Setting]:
    """Every setting to try: all lengths, for each of them thresholds from 0.05 to 0.95, and lengths that follow the
    rounds before, where the engine has these. Of policies of specctl's that it runs, thresholds too, with short drafts.

    Args:
        engine: whose rule it is.
        confidence: what traces say of the engine's own confidence; None to try no thresholds.
        longest: the longest draft that can be replayed.
    """
    lengths = engine.lengths(longest)
    settings = [Setting.of({"name": "constant", "draft_length": length}) for length in lengths]
    if engine.lengthens:
        settings += [
            Setting.of({"name": "heuristic", "draft_length": length, "max_draft": UNCAPPED, "carry_over": carried})
            for length in lengths
            for carried in (False, True)
        ]
    if confidence is not None:
        rule = {"name": "max-confidence", "adapt": False, "keep_trigger": engine.keeps_trigger}
        caps = lengths if engine.capped else (UNCAPPED,)
        settings += [
            Setting.of({**rule, "threshold": threshold, "max_draft": cap}) for cap in caps for threshold in _TWENTIETHS
        ]
    return settings + [
        Setting.of({"name": policy, "threshold": threshold, "max_draft": cap})
        for policy in engine.policies
        for cap in SHORT
        if cap <= longest
        for threshold in _TWENTIETHS
    ]
