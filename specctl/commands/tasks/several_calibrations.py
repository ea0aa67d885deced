"""`specctl calibrate --against`: the drafts of several profiles on one target, side by side."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from specctl.commands.option_groups import ShowOptions
from specctl.commands.options import warn, warn_unused
from specctl.commands.tasks.calibration_run import calibrate_one, command_facts, write_calibrated
from specctl.commands.tasks.pair_loading import load
from specctl.commands.tasks.replication import Replication
from specctl.errors import UsageError
from specctl.outputs import OutputFile
from specctl.terminal.output import write_out

if TYPE_CHECKING:
    from specctl.batching.row_count import Batch
    from specctl.calibration.compared_settings import ComparedSettings, Grid
    from specctl.calibration.several_drafts import Entrant, Standing
    from specctl.profile import Profile, ResolvedProfile
    from specctl.prompts.suites import Suite


def with_tokens(
    counts: str, resolved: "ResolvedProfile", resolve: "Callable[[dict[str, int]], ResolvedProfile]"
) -> "list[ResolvedProfile]":
    """A profile with its lowest draft writing each of several numbers of tokens.

    Args:
        counts: numbers, or ``all``, with commas between them.
        resolved: the profile, with a draft.
        resolve: gives it with other values, by dotted key.

    Raises:
        UsageError: something else is named.
    """
    assert resolved.profile.draft is not None
    key = f"{'draft.' * len(resolved.profile.draft.levels)}tokens"
    found = []
    for name in (part.strip() for part in counts.split(",")):
        if name != "all" and not name.isdecimal():
            raise UsageError(
                f"--tokens {counts}: {name!r} is neither a number nor all", "such as --tokens all,2048,1024"
            )
        # Of no more than there are, which is told once the models are known.
        one = resolve({} if name == "all" else {key: int(name)})
        if name == "all" and one.profile.draft is not None and one.profile.draft.levels[-1].tokens is not None:
            raise UsageError(f"--tokens all: the profile {one.name} sets {key}", "take it out of the profile")
        found.append(replace(one, name=f"{resolved.name}, {name} tokens"))
    return found


def calibrate_several(
    resolved: "Sequence[ResolvedProfile]",
    policy: str | None,
    grid: "Grid",
    prompts: "Suite",
    output: OutputFile | None,
    show: ShowOptions,
    *,
    counted: OutputFile | None = None,
    verify: bool,
    foreign_head: bool,
    replication: Replication | None = None,
    batch: "Batch" = 1,
    given: int | None = None,
) -> None:
    """Calibrate each profile's drafts on the same prompts, run the chosen settings in turn, and show which to use.

    Args:
        resolved: the profiles, the first with the prompts' sampling settings.
        policy: as in `compared_settings`, for every profile.
        grid: of the settings.
        prompts: that all are calibrated on.
        output: where to write the calibrated profile of the fastest.
        show: the report, and whether one JSON object is printed.
        counted: as of `write_calibrated`.
        verify: whether to run the chosen settings live.
        foreign_head, replication, batch, given: as in `calibrate_one`.

    Raises:
        UsageError: the profiles have other targets, or one has no draft or a hierarchy with a draft head.
    """
    from specctl.calibration.compared_settings import compared_settings, computed_by, recordable
    from specctl.calibration.several_drafts import Entrant, candidates_of_entrants, predicted, run_live
    from specctl.observing.candidates import require_one_target

    require_one_target(one.profile for one in resolved)
    warn_unused(resolved)
    resolved = [one.under(resolved[0].profile, "--against") for one in resolved]
    if len({one.name for one in resolved}) < len(resolved):
        raise UsageError("a profile is named twice", "name each once")
    compared: list[tuple[Profile, ComparedSettings]] = []
    for one in resolved:
        own = one.profile
        if own.draft is None:
            raise UsageError(f"the profile {one.name} has no draft to calibrate", "leave it out")
        computed = computed_by(own.draft, (), None)
        compared.append((own, compared_settings(own.draft, policy, grid, [], recordable(own), computed)))
    progress = show.bars()
    entrants: list[Entrant] = []
    for one, (own, asked) in zip(resolved, compared, strict=True):
        pair = partial(load, own, progress.console, foreign_head=foreign_head, progress=progress)
        decision = calibrate_one(
            own,
            asked,
            [],
            prompts,
            pair,
            progress,
            verify=False,
            foreign_head=foreign_head,
            replication=replication,
            batch=batch,
            given=given,
        )
        entrants.append(Entrant(one.name, own, decision))
    standings, interrupted = predicted(entrants), False
    candidates = candidates_of_entrants(entrants)
    if verify and candidates.drafts:
        together = load(
            entrants[0].profile,
            progress.console,
            drafts=candidates.drafts,
            above=candidates.above,
            heads=candidates.heads,
            foreign_head=foreign_head,
            progress=progress,
        )
        live, interrupted = run_live(together, candidates, entrants, progress)
        standings = live or standings
    _show(resolved, entrants, standings, output, show, counted)
    if interrupted:
        raise KeyboardInterrupt


def _show(
    resolved: "Sequence[ResolvedProfile]",
    entrants: "Sequence[Entrant]",
    standings: "Sequence[Standing]",
    output: OutputFile | None,
    show: ShowOptions,
    counted: OutputFile | None,
) -> None:
    from rich.console import Console

    from specctl.calibration.calibration_report import as_document, calibration_tables, plain_interval
    from specctl.calibration.several_drafts import standings_table, verdict_of
    from specctl.files import write_line
    from specctl.reporting.console import print_tables

    facts = command_facts(entrants[0].decision.traces)
    tables = {one.name: calibration_tables(one.decision) for one in entrants}
    live = {one.entrant.name: one.decision for one in standings}
    if show.json_:
        document = {
            "provenance": facts,
            "verdict": verdict_of(standings),
            "profiles": {one.name: as_document(live.get(one.name, one.decision)) for one in entrants},
            "side_by_side": [
                {
                    "profile": one.entrant.name,
                    "policy": one.entrant.setting.table,
                    "predicted_tokens_per_second": round(one.entrant.ranked.score.tokens_per_second, 2),
                    "measured_tokens_per_second": None if one.measured is None else round(one.measured, 2),
                    "speedup": plain_interval(one.speedup),
                }
                for one in standings
            ],
        }
        write_line(sys.stdout, document)
    else:
        for name, shown in tables.items():
            write_out(f"== {name} ==")
            print_tables(Console(), shown[:1])
        print_tables(Console(), [standings_table(standings)])
        write_out(verdict_of(standings))
    for one in entrants:
        for warning in one.found.warnings:
            warn(f"{one.name}: {warning}")
    if output is not None:
        best = standings[0].entrant
        source = next(one for one in resolved if one.name == best.name)
        write_calibrated(source, standings[0].decision, facts, output, counted, quiet=show.quiet)
    if show.report is not None:
        from specctl.reporting.document import write_document

        together = [standings_table(standings), *(shown[0] for shown in tables.values())]
        paths = write_document(
            "Calibration", together, {}, facts, show.report, command="calibrate", verdict=verdict_of(standings)
        )
        show.written(paths)
