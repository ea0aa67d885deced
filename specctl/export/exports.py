"""Exports of one calibration: the request, and the outcome for every engine."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from specctl.calibration.calibration_report import plain_interval, speedup_cells
from specctl.calibration.compared_settings import ComparedSettings
from specctl.calibration.decision import Decision
from specctl.calibration.search import Ranked, Score, search
from specctl.decoding.sampling import Sampling
from specctl.export.engines import Engine, Pairing, length_of, other_version, rule_space, threshold_of, words_of
from specctl.export.search import Exported, Reading, reading_of, search_rule, traces_as
from specctl.models.running.pair import Pair
from specctl.observing.progress import SILENT, Progress
from specctl.profile.schema import Profile
from specctl.replay.costs import CostTable
from specctl.replay.trace_files import TraceSet
from specctl.reporting.table import DEFINITIONS, UNKNOWN, UP, Table

LONGEST_PRICED = 1000  # The longest draft in a table of given costs


@dataclass(frozen=True, slots=True)
class GivenCosts:
    """The pass times of an engine in milliseconds."""

    draft: float  # of a draft step
    target: float  # of a target pass over one token
    per_token: float  # of each further token in such a pass
    alone: float  # of a target pass where nothing was drafted

    def __str__(self) -> str:
        wider = f" + {self.per_token:g} n" if self.per_token else ""
        alone = "" if self.alone == self.target else f", {self.alone:g} ms without a draft"
        passes = f"{self.target:g}{wider} ms for a target pass of 1 + n tokens{alone}"
        return f"{self.draft:g} ms for a draft step and {passes}"

    def table(self, rows: int = 1) -> CostTable:
        """The cost table of rounds of a number of texts."""
        return CostTable.flat(self.draft, self.target, LONGEST_PRICED, self.per_token * rows, self.alone)


@dataclass(frozen=True, slots=True)
class ExportRequest:
    """The engines to export to, their costs (for several texts by batch size), and the kind of draft head."""

    engines: tuple[Engine, ...]
    costs: GivenCosts | None = None
    batches: Mapping[int, GivenCosts] = field(default_factory=dict)
    head: str | None = None


@dataclass(frozen=True, slots=True)
class Exports:
    """The outcome for every engine, with specctl's own setting for comparison."""

    found: Sequence[Exported]  # an entry for each engine
    here: Ranked  # the setting that specctl itself would use, with the same costs
    costs: GivenCosts | None  # of the engine; None for those of this machine
    reported_on: int  # number of prompts reported on
    held_out: bool  # whether these prompts were held out from the choice


def export_to(
    request: ExportRequest,
    profile: Profile,
    asked: ComparedSettings,
    decision: Decision,
    pair: Callable[[], Pair],
    progress: Progress = SILENT,
) -> Exports:
    """Search every engine's rule. With given costs, search specctl's own policies again too.

    Args:
        request: the engines.
        profile: of a target and one draft.
        asked: the candidate settings of specctl.
        decision: the calibration.
        pair: loads the models; called only if an engine's draft tokens differ from those of the traces.
        progress: receives a count of settings.

    Raises:
        UsageError: an engine's rule for sampling cannot be replayed.
    """
    assert profile.draft is not None
    traces, calibration = decision.traces, decision.found
    sampling = replace(Sampling.of(profile.sampling), verification=traces.header.verification)
    readings = [reading_of(engine, sampling) for engine in request.engines]
    costs, here = decision.costs, calibration.winner
    if request.costs is not None:
        costs = replace(request.costs.table(), batches={rows: one.table(rows) for rows, one in request.batches.items()})
        here = search(traces, asked.candidates, None, costs, asked.also_ranked).winner
    target, draft, temperature = profile.target.checkpoint, profile.draft.checkpoint, profile.sampling.temperature
    prompts = calibration.chosen_on, calibration.reported_on
    read: dict[Reading, TraceSet] = {}
    found = []
    together = list(zip(request.engines, readings, strict=True))
    sizes = [size.rows for size in decision.sizes]
    count = sum(len(rule_space(engine, how.confidence, traces.header.depth, request.head)) for engine, how in together)
    count += sum(len(sizes) * (len(engine.lengths(traces.header.depth)) + 1) for engine in request.engines)
    with progress.counting("settings of other engines", count) as advance:
        for engine, how in together:
            if how not in read:
                read[how] = traces_as(how, traces, profile, pair)
            named = Pairing(target, draft, request.head, temperature, how.blocks)
            found.append(search_rule(engine, how, read[how], prompts, costs, named, advance, sizes))
    return Exports(found, here, request.costs, len(calibration.reported_on), calibration.held_out)


_BAR = 20


def export_tables(exports: Exports) -> list[Table]:
    """A table of all engines, and one curve over the longest draft for each group of engines with the same values."""
    alike: dict[tuple[str, ...], list[Exported]] = {}
    for one in exports.found:
        alike.setdefault(_kinds(one), []).append(one)
    by_size = [_by_size(exports)] if any(one.batches for one in exports.found) else []
    return [_summary(exports), *by_size, *map(_curve, alike.values())]


def _by_size(exports: Exports) -> Table:
    rows = (
        [one.engine.name, each.rows, words_of(each.found.score.setting), *_speeds(each.found)]
        for one in exports.found
        for each in one.batches
    )
    return Table.filled(
        "Best lengths in other engines by texts at once",
        ("engine", "texts", "setting", "tokens/s", "speedup", "95% interval"),
        rows,
        labels=3,
        note="Of all texts together, by replaying that many at once.",
    )


def _kinds(one: Exported) -> tuple[str, ...]:
    """The fastest setting of each kind of rule with its speed; engines with the same rule share it."""
    return tuple(f"{words_of(score.setting)}: {score.tokens_per_second:.1f}" for score in one.kinds)


def _summary(exports: Exports) -> Table:
    here = exports.here
    best = here.score.tokens_per_second
    entries = [(one.engine.name, words_of(one.found.score.setting), one.found) for one in exports.found]
    entries.append(("specctl", here.score.setting.label, here))
    rows = (
        [engine, setting, *_speeds(entry), f"{entry.score.tokens_per_second / best:.0%}"]
        for engine, setting, entry in entries
    )
    prompts = "prompts that did not choose the settings" if exports.held_out else "the prompts that chose the settings"
    return Table.filled(
        "Best settings in other engines",
        ("engine", "setting", "tokens/s", "speedup", "95% interval", "of specctl"),
        rows,
        labels=2,
        note=f"{DEFINITIONS} Predicted on {exports.reported_on} {prompts}, with {_costs(exports)}.",
    )


def _costs(exports: Exports) -> str:
    return "the costs of specctl on this machine" if exports.costs is None else str(exports.costs)


def _speeds(entry: Ranked) -> list[object]:
    return [entry.score.tokens_per_second, *speedup_cells(entry.speedup)]


def _curve(alike: Sequence[Exported]) -> Table:
    one = alike[0]
    fastest = max(max(point.constant.tokens_per_second, _speed(point.stopped)) for point in one.curve)
    thresholds = any(point.stopped is not None for point in one.curve)
    rows = []
    for point in one.curve:
        speed = point.constant.tokens_per_second
        row = [
            str(length_of(point.constant.setting)),
            "█" * max(1, round(_BAR * speed / fastest)),
            f"{speed:.1f}",
            f"{speed / one.baseline.tokens_per_second:.2f}",
        ]
        if thresholds and point.stopped is not None:
            row += [f"{_speed(point.stopped):.1f}", f"{threshold_of(point.stopped.setting):g}"]
        elif thresholds:
            row += [UNKNOWN, UNKNOWN]
        rows.append(tuple(row))
    further = (f"tokens/s with a threshold{UP}", "best threshold") if thresholds else ()
    return Table(
        f"{', '.join(each.engine.name for each in alike)}: tokens/s by K",
        ("K", "", f"tokens/s{UP}", f"speedup{UP}", *further),
        tuple(rows),
        labels=2,
        note=f"{one.settings} settings of the rule were replayed. Fastest of each kind: {'; '.join(_kinds(one))}.",
    )


def _speed(score: Score | None) -> float:
    return 0.0 if score is None else score.tokens_per_second


def text_of(one: Exported) -> str:
    """The text to copy, below comments on its place and the engine's version."""
    engine = one.engine
    lines = [f"{engine.name} {engine.version} ({engine.released}), by {engine.source}, read {engine.read}"]
    if not one.pays:
        lines.append("Drafting does not pay with these costs: run it without a draft. The best setting that drafts:")
    lines += [f"Place: {one.written.place}", *one.written.notes]
    return "\n".join([*(f"# {line}" for line in lines), one.written.text])


def export_warnings(exports: Exports) -> list[str]:
    """Warnings about the exports."""
    found = []
    if exports.costs is None:
        found.append(
            "exported lengths follow what passes cost in specctl here; the best ones follow the engine's own: measure "
            "them there and give --costs"
        )
    for one in exports.found:
        found += one.left_out
        if (other := other_version(one.engine)) is not None:
            found.append(
                f"{one.engine.name} {other} is installed here, and the setting was written for {one.engine.version}: "
                "names and rules may differ"
            )
    return found


def export_document(exports: Exports) -> list[dict[str, Any]]:
    """An entry for each engine as plain values."""
    here = exports.here
    return [
        {
            "engine": one.engine.name,
            "version": one.engine.version,
            "released": one.engine.released,
            "source": one.engine.source,
            "read": one.engine.read,
            "place": one.written.place,
            "text": one.written.text,
            "notes": list(one.written.notes),
            "pays": one.pays,
            "rule": one.best.setting.table,
            **_plain(one.found),
            "costs": None if exports.costs is None else asdict(exports.costs),
            "settings": one.settings,
            "batches": [
                {"texts": each.rows, "rule": each.found.score.setting.table, **_plain(each.found)}
                for each in one.batches
            ],
            "curve": [
                {
                    "draft_length": length_of(point.constant.setting),
                    **_point(point.constant, one.baseline),
                    "with_threshold": None
                    if point.stopped is None
                    else {
                        "threshold": threshold_of(point.stopped.setting),
                        **_point(point.stopped, one.baseline),
                    },
                }
                for point in one.curve
            ],
            "specctl": {"policy": here.score.setting.table, **_plain(here)},
        }
        for one in exports.found
    ]


def _plain(entry: Ranked) -> dict[str, Any]:
    return {
        "tokens_per_second": round(entry.score.tokens_per_second, 2),
        "speedup": plain_interval(entry.speedup),
    }


def _point(score: Score, baseline: Score) -> dict[str, float]:
    return {
        "tokens_per_second": round(score.tokens_per_second, 2),
        "speedup": round(score.tokens_per_second / baseline.tokens_per_second, 4),
    }
