"""`specctl analyze`: how well a draft's signals predict acceptance on this pair and these prompts."""

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specctl.commands.flags import (
    FewSamplingOptions,
    PairOptions,
    PromptOptions,
    RunOptions,
    ShowOptions,
    TemplateOption,
    open_report,
    protect_profile,
    warn,
)
from specctl.commands.loading import load
from specctl.commands.requests import But, grouped, option, require_unused
from specctl.errors import UsageError
from specctl.outputs import Outputs

if TYPE_CHECKING:
    from specctl.analysis.readings import Judged, Readings
    from specctl.profile import Profile, ResolvedProfile
    from specctl.prompts.suites import Suite


USUAL = "profile target draft from_ suite input_ limit max_new_tokens temperature report json_"
"""The parameters that --help shows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnalyzeRequest:
    """The flags of `specctl analyze`; UsageError for conflicting ones."""

    ctx: typer.Context
    models: PairOptions
    run: Annotated[RunOptions, But(("check",))]
    from_: list[Path] | None = option("Analyse traces of generate or calibrate; no model runs.", "--from FILE")
    prompts: PromptOptions
    sampling: Annotated[FewSamplingOptions, But(("verification",))]
    chat: TemplateOption = None
    show: ShowOptions

    def __post_init__(self) -> None:
        if self.from_:
            shown = ("report", "force", "json_", "progress", "quiet")
            require_unused(self.ctx, "from_", "runs no prompt", but=shown)

    def resolve(self) -> "ResolvedProfile":
        """The profile with the flags applied; raises UsageError unless its draft is a model."""
        from specctl.profile.validation import require_models

        found = self.run.resolve(self.models, {**self.sampling.flags, "prompt.chat": self.chat})
        if found.profile.draft is None:
            raise UsageError("the profile has no draft to analyse", "name one with --draft or in the profile")
        require_models([found.profile.draft], "analyze", "name a draft model with --draft")
        return found


@grouped(usual=USUAL)
def analyze(request: AnalyzeRequest) -> None:
    """Measure how well the draft's signals predict acceptance, and the bounds between entropy and acceptance.

    The target answers every prompt, then target and draft both read the answer; a draft head drafts at every position.

    Examples:

    [cyan]specctl analyze --target ./big --draft ./small -i prompts.jsonl[/]

    [cyan]specctl analyze --from trace.jsonl --report report[/]
    """
    if request.from_:
        from specctl.analysis.readings import read_traces

        sources: dict[str, Any] = {"command": _command(), "traces": list(map(str, request.from_))}
        with Outputs(force=request.run.force) as outputs:
            for path in request.from_:
                outputs.reads("trace", path)
            open_report(outputs, request.show.report)
            _show(read_traces(request.from_), None, None, sources, request.show)
        return
    found = request.resolve()
    profile = found.profile
    with Outputs(force=request.run.force) as outputs:
        request.prompts.read_by(outputs)
        protect_profile(outputs, found)
        open_report(outputs, request.show.report)
        suite = request.prompts.chosen(profile.sampling.seed)
        judged, readings, facts, failures = _read(profile, suite, request.show, request.run.foreign_head)
        for identity, reason in failures.items():
            warn(f"prompt {identity} is left out: {reason}")
        if judged is None:
            raise UsageError("no prompt produced a token that can be analysed")
        sources = {"command": _command(), **facts, "left_out": failures}
        _show(judged, readings, profile.sampling.temperature == 0, sources, request.show)
    if failures:
        raise typer.Exit(1)


def _command() -> str:
    return shlex.join(["specctl", *sys.argv[1:]])


def _read(
    profile: "Profile", suite: "Suite", show: ShowOptions, foreign_head: bool
) -> tuple["Judged | None", "Readings | None", dict[str, Any], dict[str, str]]:
    """Run the prompts and read the answers."""
    progress = show.bars()
    # In a hierarchy only the draft that the target verifies is analysed.
    drafts = [profile.draft] if profile.draft is not None else []
    pair = load(profile, progress, drafts=drafts, foreign_head=foreign_head)

    pair.require_law("analyze")

    from specctl.analysis.readings import judge
    from specctl.analysis.teacher_forcing import read_prompts, read_rounds
    from specctl.decoding.prompt_format import PromptFormat
    from specctl.observing.results import gather

    facts = gather(pair, profile, suite)
    prompt_format = PromptFormat.of(pair.tokenizer, profile.prompt)
    readings: Readings | None = None
    with progress.counting("prompts", len(suite.prompts)) as advance:
        asked = pair, suite.prompts, profile.sampling, prompt_format
        if pair.drafts[0].drafts_by_round:
            judged, failures = read_rounds(*asked, advance)
        else:
            readings, failures = read_prompts(*asked, advance)
            judged = judge(readings) if readings is not None else None
    names = ("created", "suite", "sampling", "devices", "versions", "profile")
    return judged, readings, {name: getattr(facts, name) for name in names}, failures


def _show(
    judged: "Judged",
    readings: "Readings | None",
    greedy: bool | None,
    sources: dict[str, Any],
    show: ShowOptions,
) -> None:
    from specctl.analysis.report import analysis_tables, distributions, draw_analysis
    from specctl.analysis.signal_quality import analyse
    from specctl.reporting.table import plain

    analysis = analyse(judged, readings)
    shown = analysis_tables(analysis, greedy=greedy)
    about = {} if greedy is None or readings is None else {"distributions": distributions(greedy)}
    source = "traces" if greedy is None else "models"
    show.outcome({"provenance": sources, "source": source, **about, **plain(analysis)}, shown)
    pictures = draw_analysis(analysis, judged, readings)
    show.document("Draft signals and acceptance", shown, pictures, sources, command="analyze")
