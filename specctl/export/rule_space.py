"""The kinds of rules that engines have, and the settings of each to try: policies that stop drafts as engines do."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from specctl.export.foreign_engine import Confidence, Engine
from specctl.policies import Setting

UNCAPPED = 1_000_000
"""The longest draft of a rule that has none."""
SHORT = (4, 6, 8)
"""The longest drafts of policies where texts draft together: each round is as long as the longest of them."""
LADDERS = ((1, 2, 3), (1, 3, 5), (2, 4, 6), (1, 3, 5, 7), (3, 5, 7, 9), (1, 2, 3, 4, 5, 6, 7, 8))
"""The lengths between which a rule that steps may choose."""
_TWENTIETHS = tuple(round(0.05 * n, 2) for n in range(1, 20))
_TENTHS = tuple(round(0.1 * n, 1) for n in range(1, 10))
Values = Iterable[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of rule.

    Attributes:
        policy: that stops drafts so.
        values: its settings to try in an engine, with the lengths of drafts that can be replayed.
        compares: whether it reads `Engine.confidence`.
        for_heads: whether an engine has it for draft heads alone.
        words: a setting in words that hold for all engines.
    """

    policy: str
    values: Callable[[Engine, Sequence[int]], Values]
    words: Callable[[dict[str, Any]], str]
    compares: bool = False
    for_heads: bool = False


def _thresholds(engine: Engine, lengths: Sequence[int]) -> Values:
    rule = {"adapt": False, "keep_trigger": engine.keeps_trigger}
    caps = lengths if engine.capped else (UNCAPPED,)
    return [{**rule, "threshold": threshold, "max_draft": cap} for cap in caps for threshold in _TWENTIETHS]


def _growing(_: Engine, lengths: Sequence[int]) -> Values:
    rule = {"max_draft": UNCAPPED}
    return [{**rule, "draft_length": k, "carry_over": carried} for k in lengths for carried in (False, True)]


def _probed(_: Engine, lengths: Sequence[int]) -> Values:
    adaptive = [
        {"least": k, "max_draft": lengths[-1], "cooldown": rests} for k in lengths[:-1] for rests in (False, True)
    ]
    return adaptive + [{"least": k, "max_draft": k, "cooldown": True} for k in lengths]


def _policy(name: str) -> Kind:
    """A policy of specctl's that an engine runs, with short drafts."""
    return Kind(
        name,
        lambda _, lengths: [
            {"threshold": threshold, "max_draft": cap} for cap in SHORT if cap in lengths for threshold in _TWENTIETHS
        ],
        lambda values: f"{name} threshold {values['threshold']:g}, K = {values['max_draft']}",
    )


def _longest(values: dict[str, Any]) -> str:
    return f"K = {values['max_draft']}" if values["max_draft"] < UNCAPPED else "any K"


def _probed_words(values: dict[str, Any]) -> str:
    least, most = values["least"], values["max_draft"]
    return (f"K = {least}" if least == most else f"K probed from {least}") + ", cooldown" * bool(values["cooldown"])


LENGTHS = Kind(
    "constant",
    lambda _, lengths: [{"draft_length": k} for k in lengths],
    lambda values: f"K = {values['draft_length']}",
)
GROWING = Kind(
    "heuristic",
    _growing,
    lambda values: f"K from {values['draft_length']}, +2 or -1" + ", kept between texts" * bool(values["carry_over"]),
)
THRESHOLD = Kind(
    "max-confidence",
    _thresholds,
    lambda values: f"threshold {values['threshold']:g}, {_longest(values)}",
    compares=True,
)
ADAPTIVE_VERIFICATION = Kind(
    "vllm-adaptive",
    lambda _, lengths: [{"max_draft": k} for k in lengths],
    lambda values: f"K = {values['max_draft']}, verified adaptively",
    compares=True,
)
PROBED = Kind("probed-length", _probed, _probed_words)
CALIBRATED = Kind(
    "calibrated-confidence",
    lambda _, lengths: [{"confidence": share, "max_draft": k} for k in lengths for share in _TENTHS],
    lambda values: f"confidence {values['confidence']:g}, {_longest(values)}",
    compares=True,
)
STEPPED = Kind(
    "stepped-length",
    lambda _, lengths: [
        {"lengths": ladder, "first": first} for ladder in LADDERS if ladder[-1] in lengths for first in ladder
    ],
    lambda values: f"K of {', '.join(map(str, values['lengths']))} from {values['first']}",
    for_heads=True,
)
POLICY_KINDS = tuple(map(_policy, ("svip", "adaedl", "max-confidence")))
"""What the worker of `vllm-plugin` runs."""
_WORDS = {one.policy: one.words for one in (*POLICY_KINDS[:2], LENGTHS, GROWING, THRESHOLD, ADAPTIVE_VERIFICATION)} | {
    one.policy: one.words for one in (PROBED, CALIBRATED, STEPPED)
}


def rule_space(engine: Engine, confidence: Confidence | None, longest: int, head: str | None = None) -> list[Setting]:
    """Every setting of an engine's rules to try.

    Args:
        engine: whose rules they are.
        confidence: what traces say of the engine's own confidence; None to try no thresholds.
        longest: the longest draft that can be replayed.
        head: the kind of draft head; None for a draft model.
    """
    lengths = engine.lengths(longest)
    return [
        Setting.of({"name": kind.policy, **values})
        for kind in (LENGTHS, *engine.kinds)
        if not (kind.compares and confidence is None) and (head is not None or not kind.for_heads)
        for values in kind.values(engine, lengths)
    ]


def words_of(setting: Setting) -> str:
    """A setting of `rule_space` in words that hold for all engines."""
    if not setting.drafts:
        return "no draft"
    values = setting.all_values
    if setting.policy == "max-confidence" and values["adapt"]:
        return POLICY_KINDS[-1].words(values)
    return _WORDS[setting.policy](values)
