"""`specctl calibrate`: the fastest policy and threshold for this pair, this machine and these prompts."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from specctl.commands.grouped_command import But, grouped, option
from specctl.commands.option_groups import FewSamplingOptions, PairOptions, RunOptions, ShowOptions
from specctl.commands.options import TemplateOption, warn
from specctl.commands.prompt_options import PromptOptions
from specctl.commands.tasks.calibration_run import COUNTS, calibrate_one, show_calibration
from specctl.commands.tasks.command_files import open_report, spare_profile
from specctl.commands.tasks.export_request import export_order
from specctl.commands.tasks.pair_loading import load
from specctl.commands.tasks.replication import PANEL, BareReplicaOptions, batch_sizes
from specctl.commands.tasks.several_calibrations import calibrate_several, with_tokens
from specctl.errors import ProfileError, UsageError
from specctl.outputs import Outputs
from specctl.terminal.output import tell

if TYPE_CHECKING:
    from specctl.models.running.pair import Pair
    from specctl.profile import ResolvedProfile
    from specctl.prompts.suites import Suite
    from specctl.replay.trace_files import TraceSet


USUAL = (
    "profile target draft policy against suite input_ samples max_new_tokens temperature output trace report "
    "export json_"
)
"""The parameters that --help shows."""


@grouped(usual=USUAL)
def calibrate(
    *,
    models: PairOptions,
    policy: str | None = option(
        "Policy to calibrate, or all. Default: the profile's. In a hierarchy it applies to every draft; or name "
        "one for each with commas, the target's own draft first.",
        "NAME|all",
    ),
    against: list[str] | None = option(
        "Calibrate this profile's drafts too, and say which to use; repeatable. Its target must be the same.",
        "PROFILE",
    ),
    tokens: str | None = option(
        "Calibrate with a draft that can write N tokens, for each N or all, and say which to use.",
        "N,N,...",
    ),
    head: list[str] | None = option(
        "Also try this trained head, or those of train-head --sweep in a folder; repeatable. Without --policy, "
        "specdec++ is calibrated.",
        "PATH",
    ),
    run: Annotated[RunOptions, But(("check",))],
    replicas: BareReplicaOptions,
    batch: str | None = option(
        "Records per forward pass: choose a setting for each of these numbers too. auto: answer as many at once as is "
        "fastest, and choose for one.",
        "N,N,...|auto",
        panel=PANEL,
    ),
    prompts: Annotated[PromptOptions, But(("limit", "samples_per_category"))],
    samples: int = option("Prompts that choose the setting. As many others report on it.", "N", default=10, min=1),
    grid: Literal["paper", "dense"] = option(
        "Values to try: the papers', or fine steps over every setting.", default="dense"
    ),
    sampling: FewSamplingOptions,
    chat: TemplateOption = None,
    output: Path | None = option("Write the calibrated profile here.", "-o --output FILE"),
    trace: Path | None = option(
        "Write a trace here, from which an interrupted run continues. With --force it starts over.", "FILE"
    ),
    from_: Path | None = option("Search in an earlier trace instead of recording one.", "--from FILE"),
    verify: bool = option(
        "Run the chosen setting live and compare with the prediction.", "--verify/--no-verify", default=True
    ),
    export: list[str] | None = option(
        "Also find the best setting of this engine's own rule; repeatable. It is shown as the engine reads it: "
        "transformers, vllm, vllm-plugin, sglang, llama.cpp, tensorrt-llm, mlx-lm, openvino, exllamav3 or "
        "onnxruntime-genai.",
        "ENGINE",
    ),
    costs: list[str] | None = option(
        "For --export: milliseconds in the engine of a draft step, of a target pass over one token, of each further "
        "token in it, and of a pass without a draft; N: the same with N texts at once, repeatable. Default: those of "
        "specctl here.",
        "[N:]DRAFT,TARGET[,TOKEN[,ALONE]]",
    ),
    show: ShowOptions,
) -> None:
    """Find the stopping policy and threshold that are fastest on this pair, this machine and these prompts.

    The models run once. Every setting is replayed exactly on what they wrote and priced with costs measured here. Half
    of the prompts choose the setting, the other half report its speed.

    Examples:

    [cyan]specctl calibrate --target ./big --draft ./small --policy all -o fast.toml[/]

    [cyan]specctl calibrate -p my-profile -i prompts.jsonl -o fast.toml --report report[/]
    """
    if trace is not None and from_ is not None:
        raise UsageError("--trace and --from exclude each other", "leave one of them out")
    if (against or tokens) and (trace or from_ or head or export):
        flag = "--against" if against else "--tokens"
        raise UsageError(
            f"{flag} goes with neither --trace, --from, --head nor --export", "calibrate one profile with these"
        )
    if against and tokens:
        raise UsageError("--against and --tokens exclude each other", "leave one of them out")
    replication, (rows, sizes) = replicas.replication, batch_sizes(batch)
    if replication is not None and rows != 1:
        raise UsageError("--batch is for texts of one process, and --workers starts several", "leave one out")
    if sizes and (against or tokens or head):
        raise UsageError(
            "--batch with numbers of texts goes with neither --against, --tokens nor --head", "calibrate one draft"
        )
    from specctl.calibration.compared_settings import (
        compared_settings,
        computed_by,
        heads_among,
        heads_in,
        recordable,
        require_fits,
    )
    from specctl.export.engines import LONGEST
    from specctl.replay.play import replayable
    from specctl.replay.trace_files import TRACES, read_traces

    flags = {**sampling.flags, "prompt.chat": chat}
    given = heads_in(head or [])
    resolved = _resolved(partial(run.resolve, models), flags, given)
    own = resolved.profile
    if own.draft is None:
        raise UsageError("the profile has no draft to calibrate", "name one with --draft or in the profile")
    if sizes and own.draft.draft is not None:
        raise UsageError("--batch chooses settings of one draft, and the profile has several", "leave --batch out")
    heads = heads_among(given, own.draft)
    drafting = own.draft.model_copy(update={"head": heads[0] if heads else own.draft.head})
    own = own.model_copy(update={"draft": drafting})
    with Outputs(force=run.force) as outputs:
        prompts.read_by(outputs)
        outputs.reads("earlier trace", from_)
        spare_profile(outputs, resolved)
        for name in heads:
            outputs.spare("head", name)
        calibrated = outputs.file("output", output)
        few = tokens is not None or drafting.levels[-1].tokens is not None
        counted = outputs.file("token counts", output.with_suffix(COUNTS)) if output is not None and few else None
        traced = outputs.file("trace", trace, resumed=not run.force)
        open_report(outputs, show.report)
        earlier: TraceSet | None = None
        if from_ is not None:
            earlier = read_traces(from_)
        elif traced is not None and TRACES.continues(traced):
            earlier = read_traces(traced.path)
        recorded = set(earlier.header.signals) if earlier is not None and from_ is not None else recordable(own)
        computed = computed_by(drafting, heads, earlier.header if earlier is not None and from_ is not None else None)
        asked = compared_settings(drafting, policy, grid, heads, recorded, computed)
        if (order := export_order(export or [], costs or [], own, sizes)) is not None and from_ is None:
            asked = replace(asked, at_least=LONGEST)
        if against or tokens:
            if tokens:
                rivals = with_tokens(tokens, resolved, lambda more: run.resolve(models, {**flags, **more}))
            else:
                rivals = [resolved, *(run.resolve(PairOptions(name), flags) for name in against or ())]
            for rival in rivals:
                spare_profile(outputs, rival)
            offered = prompts.chosen(own.sampling.seed)
            calibrate_several(
                rivals,
                policy,
                grid,
                _drawn(offered, samples, own.sampling.seed, show),
                calibrated,
                show,
                counted=counted,
                verify=verify,
                foreign_head=run.foreign_head,
                replication=replication,
                batch=rows,
                given=len(offered.prompts),
            )
            return
        suite, count = None, None
        if from_ is None:
            offered = prompts.chosen(own.sampling.seed)
            suite, count = _drawn(offered, samples, own.sampling.seed, show), len(offered.prompts)
        if earlier is not None and (path := from_ or trace) is not None:
            require_fits(earlier.header, own, asked, heads, suite, path)
        if not replayable(asked.old, sampled=own.sampling.temperature > 0):
            warn(
                "the current setting cannot be replayed (keep_trigger = false on a middle draft while sampling); "
                "it is only measured live"
            )
        progress = show.bars()
        named = [heads] if heads else None

        @cache
        def pair() -> "Pair":
            return load(own, progress.console, heads=named, foreign_head=run.foreign_head, progress=progress)

        decision = calibrate_one(
            own,
            asked,
            heads,
            suite,
            pair,
            progress,
            verify=verify,
            foreign_head=run.foreign_head,
            traced=traced,
            earlier=earlier,
            replication=replication,
            batch=rows,
            sizes=sizes,
            given=count,
        )
        exports = None
        if order is not None:
            from specctl.export.exports import export_to

            exports = export_to(order, own, asked, decision, pair, progress)
        show_calibration(resolved, decision, exports, calibrated, show, counted)
    if decision.traces.failures:
        raise typer.Exit(1)


def _drawn(offered: "Suite", samples: int, seed: int, show: ShowOptions) -> "Suite":
    """The prompts that choose and report; how many others there are is said, unless nothing is to be said."""
    from specctl.prompts.suites import sample

    suite, count = sample(offered, 2 * samples, seed), len(offered.prompts)
    if (left := count - len(suite.prompts)) and not show.quiet:
        tell(
            f"{left} of the {count} prompts are left out, drawn at random: --samples {samples} takes {2 * samples}. "
            f"--samples {-(-count // 2)} takes all.",
            "note",
        )
    return suite


def _resolved(
    choose: "Callable[[Mapping[str, Any]], ResolvedProfile]", flags: dict[str, Any], heads: list[str]
) -> "ResolvedProfile":
    """The profile, whose policy may need a head that only --head names."""
    try:
        return choose(flags)
    except ProfileError:
        if not heads:
            raise
        return choose({**flags, "draft.head": heads[0]})
