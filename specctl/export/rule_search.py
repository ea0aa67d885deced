"""Searches an engine's own rule for its fastest setting, on the prompts and with the costs of a calibration."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from specctl.calibration.batch_sizes import with_batches
from specctl.calibration.choice import choose
from specctl.calibration.scores import Score
from specctl.calibration.search import Ranked
from specctl.export.batch_lengths import BatchLength, batch_lengths
from specctl.export.foreign_engine import LONGEST, Engine, Names, Sampled, Written
from specctl.export.pricing import score_in
from specctl.export.rereading import Reading
from specctl.export.rule_space import THRESHOLD, rule_space, words_of
from specctl.export.spelling import length_of
from specctl.policies import NONE
from specctl.replay.costs import CostTable
from specctl.replay.trace_files import TraceSet


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """What an engine reaches with drafts of at most some tokens, on the prompts chosen on.

    Attributes:
        constant: drafts of exactly so many tokens.
        stopped: drafts that a threshold stops, the fastest one; None for an engine without thresholds.
    """

    constant: Score
    stopped: Score | None


@dataclass(frozen=True, slots=True)
class Exported:
    """The fastest setting of an engine's rule.

    Attributes:
        engine: whose rule was searched.
        found: the setting, scored on the prompts reported on; target-only decoding where drafting does not pay.
        best: the setting to draft with, on the prompts chosen on.
        kinds: the fastest setting of each kind of rule, on these prompts.
        baseline: target-only decoding, on the prompts chosen on.
        written: ``best`` as the engine reads it.
        curve: by the longest draft, from 1.
        settings: how many were replayed.
        batches: the fastest lengths for several texts at once.
        left_out: why thresholds or other parts of the rule were not searched.
    """

    engine: Engine
    found: Ranked
    best: Score
    kinds: list[Score]
    baseline: Score
    written: Written
    curve: list[CurvePoint]
    settings: int
    batches: list[BatchLength] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    @property
    def pays(self) -> bool:
        """Whether drafting is faster than the target alone, beyond the noise."""
        return self.found.score.setting.drafts


def search_rule(
    engine: Engine,
    reading: Reading,
    traces: TraceSet,
    prompts: tuple[Sequence[str], Sequence[str]],
    costs: CostTable,
    names: Names,
    sampled: Sampled,
    advance: Callable[[], None] = lambda: None,
    sizes: Sequence[int] = (),
) -> Exported:
    """Replay the whole rule, choose on one part of the prompts and report on the other.

    Of each kind of rule the fastest setting competes; the simplest kind within one standard error of the fastest wins.

    Args:
        engine: whose rule it is.
        reading: what `specctl.export.rereading.traces_as` made the traces with.
        traces: as the engine keeps and judges draft tokens.
        prompts: ids to choose on and to report on.
        costs: of the engine, or of this machine.
        names: the pair's, as the engine is to be told.
        sampled: how the engine samples.
        advance: called after each setting.
        sizes: numbers of texts at once, from 2 on, for which a length is searched too.
    """
    chosen_on, reported_on = prompts
    space = rule_space(engine, reading.confidence, traces.header.depth, names.head)
    families: dict[str, list[Score]] = {}
    for setting in space:
        if (score := score_in(engine, setting, traces, chosen_on, costs)) is not None:
            families.setdefault(setting.policy, []).append(score)
        advance()
    baseline, alone = (score_in(engine, NONE, traces, part, costs) for part in prompts)
    assert baseline is not None
    assert alone is not None
    bests = [max(scores, key=_speed) for scores in families.values()]
    reported = {best.setting: score_in(engine, best.setting, traces, reported_on, costs) for best in bests}
    # A rule without a longest draft may write more on these prompts than was recorded.
    bests = [best for best in bests if reported[best.setting] is not None]
    priced = [best for best in bests if not (engine.unpriced and best.setting.policy == THRESHOLD.policy)]
    chosen, drafting = choose([baseline, *priced]).chosen, choose(priced).chosen
    found = reported.get(chosen.setting) or alone
    batches = batch_lengths(engine, traces, prompts, sizes, costs, advance)
    setting = with_batches(drafting.setting, {one.rows: one.found.score.setting for one in batches})
    if setting.batches and batches[-1].rows > setting.batches[-1][0]:  # an engine's last range ends where it was priced
        setting = replace(setting, batches=(*setting.batches, (batches[-1].rows, setting.batches[-1][1])))
    written = engine.write(names, setting, sampled)
    if batches and not (engine.scheduled or names.head):
        written = replace(written, notes=(*written.notes, _by_size(batches)))
    if len(bests) > 1:
        unpriced = (f"{engine.unpriced}, whose time is not in that: try it there.",) if engine.unpriced else ()
        written = replace(written, notes=(*written.notes, _by_kind(bests), *unpriced))
    return Exported(
        engine,
        Ranked(found, found.speedup(alone)),
        drafting,
        bests,
        baseline,
        written,
        _curve(families),
        len(space),
        batches,
        _left_out(engine, reading, len(space) - sum(map(len, families.values()))),
    )


def _by_size(batches: Sequence[BatchLength]) -> str:
    fastest = ", ".join(
        f"{length_of(one.found.score.setting)} for {one.rows}"
        if one.found.score.setting.drafts
        else f"none for {one.rows}"
        for one in batches
    )
    return f"It takes one length for all numbers of texts at once; the fastest are {fastest}."


def _by_kind(bests: Sequence[Score]) -> str:
    speeds = "; ".join(f"{words_of(one.setting)}: {one.tokens_per_second:.1f}" for one in bests)
    return f"Predicted tokens/s of the best setting of each kind: {speeds}."


def _speed(score: Score) -> float:
    return score.tokens_per_second


def _curve(families: dict[str, list[Score]]) -> list[CurvePoint]:
    stopped: dict[int, Score] = {}
    for score in families.get("max-confidence", []):
        cap = length_of(score.setting)
        if cap <= LONGEST and (cap not in stopped or _speed(score) > _speed(stopped[cap])):
            stopped[cap] = score
    return [CurvePoint(score, stopped.get(length_of(score.setting))) for score in families["constant"]]


def _left_out(engine: Engine, reading: Reading, unknown: int) -> list[str]:
    found = []
    if engine.confidence is not None and reading.confidence is None:
        found.append(
            f"{engine.name} compares its threshold with probabilities after temperature and filters, which are known "
            "at temperature 1 without filters only: no threshold was tried"
        )
    if unknown:
        found.append(f"{unknown} settings of {engine.name} draft more tokens than were recorded, and were left out")
    return found
