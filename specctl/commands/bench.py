"""`specctl bench`: which policy is fastest on this pair and these prompts, by how much, and why."""

import sys
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any

import typer

from specctl.commands.options import (
    CategoryOption,
    ForceOption,
    InputOption,
    JsonOption,
    LimitOption,
    MaxNewTokensOption,
    ProfileOptions,
    QuietOption,
    SamplesOption,
    SetOption,
    SuiteDataOption,
    SuiteOption,
    chosen_prompts,
    warn,
)
from specctl.errors import UsageError

if TYPE_CHECKING:
    from specctl.benchmark.entrants import Field
    from specctl.benchmark.running import Benchmark, Emit
    from specctl.models.loading.pair import Pair
    from specctl.observing.results import Header, RunSet
    from specctl.profile import Profile
    from specctl.profile.schema import DraftTable
    from specctl.prompts.suites import Suite


def bench(
    profile: ProfileOptions = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            "--policy",
            metavar="NAME:KEY=VALUE,...",
            help="A policy to run, in a hierarchy at its top draft; repeatable. none always runs.",
        ),
    ] = None,
    set_: SetOption = None,
    suite: SuiteOption = None,
    data: SuiteDataOption = None,
    input_: InputOption = None,
    limit: LimitOption = None,
    category: CategoryOption = None,
    samples_per_category: SamplesOption = None,
    repeats: Annotated[int, typer.Option(min=1, help="Run everything so many times.")] = 1,
    max_new_tokens: MaxNewTokensOption = None,
    temperature: Annotated[
        float | None, typer.Option("-t", "--temperature", min=0, help="0 is greedy decoding.")
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of all random draws.")] = None,
    lengths: Annotated[
        str | None, typer.Option(metavar="N,N,...", help="Run every prompt to each of these lengths.")
    ] = None,
    peer: Annotated[
        list[str] | None,
        typer.Option(
            metavar="hf-constant|hf-heuristic|hf-confidence",
            help="transformers' own assisted generation on the same models; repeatable.",
        ),
    ] = None,
    oracle: Annotated[
        bool,
        typer.Option(
            "--oracle", help="How near each policy comes to the best possible: of all, and of its signals (greedy)."
        ),
    ] = False,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="Write every run here as soon as it ends.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Keep what the output file has and run only the rest.")
    ] = False,
    report: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write report.md, report.html and figures here.")
    ] = None,
    spec_bench_out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write answer files in Spec-Bench's own format here.")
    ] = None,
    from_: Annotated[
        Path | None, typer.Option("--from", metavar="FILE", help="Show earlier results; no model runs.")
    ] = None,
    force: ForceOption = False,
    json_: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Measure policies against each other and against the target alone, prompt by prompt in turn."""
    from specctl.observing.results import read_results

    if from_ is not None:
        results = read_results(from_)
    else:
        if resume and output is None:
            raise UsageError("--resume needs to know what is already there", "name the results file with --output FILE")
        flags = {"sampling.max_new_tokens": max_new_tokens, "sampling.temperature": temperature, "sampling.seed": seed}
        pair_profile, contenders = _contenders(profile or [None], policy or [], set_ or [], flags)
        from specctl.benchmark.entrants import field_of

        prompts = chosen_prompts(suite, data, input_, limit, category, samples_per_category, pair_profile.sampling.seed)
        field = field_of(contenders, peer or [])
        limits = _lengths(lengths) or [pair_profile.sampling.max_new_tokens]
        results = _run(pair_profile, field, prompts, limits, repeats, oracle, output, resume, quiet, force)
    _show(results, report, spec_bench_out, json_)


def _contenders(
    names: Iterable[str | None], texts: Iterable[str], overrides: list[str], flags: dict[str, Any]
) -> tuple["Profile", list["DraftTable"]]:
    """The first profile, and what runs on its target: a draft table each, with the policies of all its levels.

    Every profile brings its own. A policy given by itself takes the place of the first profile's own at the draft that
    the target verifies; what drafts below stays.
    """
    from specctl.benchmark.entrants import model_keys
    from specctl.profile import parse_policy, resolve
    from specctl.profile.schema import PolicyTable

    resolved = [resolve(name, overrides=overrides, flags=flags).profile for name in names]
    first = resolved[0]
    targets = list(dict.fromkeys(p.target.model for p in resolved))
    if len(targets) > 1:
        raise UsageError(
            f"the profiles name different models as target ({', '.join(targets)})", "benchmark one target at a time"
        )
    given = [PolicyTable(**parse_policy(text)) for text in texts]
    own = [p.draft for p in resolved if p.draft is not None]
    draft = first.draft
    if draft is None:
        if given:
            raise UsageError("--policy has no draft to stop", "name a profile with a draft first")
        return first, own

    def with_policy(table: "DraftTable", policy: PolicyTable) -> "DraftTable":
        return table.model_copy(update={"policy": policy})

    if given:
        beside = own if len(resolved) > 1 else []
        return first, [*beside, *(with_policy(draft, policy) for policy in given)]
    if len(resolved) > 1 and any(model_keys(table) != model_keys(draft) for table in own):
        return first, own  # the profiles are the field themselves
    if draft.draft is None:
        return first, [*own, *(with_policy(draft, PolicyTable(name=name)) for name in ("constant", "heuristic"))]
    # Whether a third model pays is to be seen against each of the drafts by itself.
    alone = [level.model_copy(update={"draft": None, "pre_verify": None}) for level in draft.levels]
    return first, [*own, *(with_policy(level, PolicyTable(name="constant")) for level in alone)]


def _lengths(text: str | None) -> list[int]:
    try:
        lengths = [int(part) for part in text.split(",")] if text else []
    except ValueError:
        lengths = [0]
    if any(length < 1 for length in lengths):
        raise UsageError(f"--lengths {text} is not a list of numbers", "e.g. --lengths 128,256,512")
    return sorted(set(lengths))


def _run(
    profile: "Profile",
    field: "Field",
    suite: "Suite",
    lengths: list[int],
    repeats: int,
    oracle: bool,
    output: Path | None,
    resume: bool,
    quiet: bool,
    force: bool,
) -> "RunSet":
    from rich.console import Console

    from specctl.commands.streaming import open_output
    from specctl.files import drop_torn_line
    from specctl.observing.results import RESULTS, RunSet, read_results
    from specctl.terminal.loading import loading, note
    from specctl.terminal.progress import BenchProgress

    if oracle and profile.sampling.temperature:
        raise UsageError("--oracle is about greedy decoding", "leave it out, or add -t 0")
    entrants, drafts = field.entrants, field.drafts
    console = Console(stderr=True, quiet=quiet)
    with loading(console, "starting") as say:
        from specctl.decoding.session import warm_up
        from specctl.models.loading.pair import load_pair
        from specctl.models.running.engines import EngineSettings
        from specctl.observing.facts import describe

        expected = len(suite.prompts) * len(entrants) * sum(lengths) * repeats
        pair = load_pair(
            profile,
            drafts=drafts,
            heads=field.heads,
            on_foreign_head=warn if force else None,
            engines=EngineSettings.of(profile, expected, lambda text: note(console, text), say),
            progress=lambda what: say(f"loading {what}"),
        )
        if pair.preparing_seconds is not None:
            warm_up(pair, profile.sampling)
        names = [draft.model for draft in drafts] if len(drafts) > 1 else []
        header = describe(pair, profile, suite, entrants, lengths, repeats, oracle, names)
    results = RunSet(header)
    if resume and output is not None and output.exists():
        results = read_results(output)
        _require_same(results.header, header, output)
        drop_torn_line(output)

    from specctl.benchmark.running import Benchmark
    from specctl.decoding.prompt_format import PromptFormat

    with ExitStack() as stack:
        sink: IO[str] | None = None
        if output is not None:
            sink = stack.enter_context(open_output(str(output), append=bool(results.runs)))
            if not results.runs:
                RESULTS.append(sink, header)
        prompts = PromptFormat(pair.tokenizer, profile.prompt.chat, profile.prompt.system)

        def emit(record: object) -> None:
            if sink is not None:
                RESULTS.append(sink, record)

        benchmark = Benchmark(pair, results, suite.prompts, profile.sampling, prompts, emit)
        total = len(suite.prompts) * len(entrants) * len(lengths) * repeats
        greedy = not profile.sampling.temperature
        with BenchProgress(console, [e.label for e in entrants], total, results.runs, greedy) as progress:
            for run in benchmark.run(before=progress.start):
                progress.add(run)
        if oracle and pair.drafts and results.signal_bound is None:
            with loading(console, "working out what the draft's signals allow"):
                _find_signal_bound(pair, benchmark, suite, results, emit)
    if (seconds := pair.preparing_seconds) is not None:
        note(console, f"compiling and capturing took {seconds:.1f} s, which no figure contains")
    return results


def _find_signal_bound(pair: "Pair", benchmark: "Benchmark", suite: "Suite", results: "RunSet", emit: "Emit") -> None:
    from specctl.benchmark.cost_model import bare_model, fit
    from specctl.replay.bound import LONGEST
    from specctl.replay.signal_bound import Text, signal_bound

    model = fit(results) or (bare_model(results.costs) if results.costs else None)
    texts = []
    for prompt in suite.prompts:
        if prompt.id in results.skipped:
            continue
        run = benchmark.first_of_baseline(prompt)
        for ids, turn in zip(benchmark.turn_ids(prompt, run), run.turns, strict=True):
            limit = min(run.length, pair.room(ids))
            texts.append(Text(prompt.id, prompt.category, ids, list(turn.tokens), limit))
    if model is None or not texts:
        return
    results.signal_bound = signal_bound(pair, texts, model.table(LONGEST))
    emit(results.signal_bound)


def _require_same(old: "Header", new: "Header", path: Path) -> None:
    """Refuse to mix two benchmarks in one file."""
    for name in ("profile", "suite", "sampling", "entrants", "lengths", "repeats"):
        if getattr(old, name) != getattr(new, name):
            raise UsageError(
                f"{path} holds another benchmark: its {name} differs",
                "resume with the same options, or start a new file",
            )


def _show(results: "RunSet", report: Path | None, answers: Path | None, as_document: bool) -> None:
    from rich.console import Console

    from specctl.benchmark import tables
    from specctl.benchmark.digest import digest
    from specctl.files import write_line
    from specctl.reporting.table import as_text

    whole = digest(results)
    if as_document:
        write_line(sys.stdout, tables.as_json(whole))
    elif sys.stdout.isatty():
        from specctl.reporting.console import print_tables

        print_tables(Console(), tables.tables(whole))
    else:
        sys.stdout.write(as_text(tables.tables(whole)))
    written: list[Path] = []
    if report is not None:
        from specctl.benchmark.report import write_report

        written += write_report(results, report)
    if answers is not None:
        from specctl.benchmark.spec_bench import write_answers

        written += write_answers(results, answers)
    for path in written:
        print(f"wrote {path}", file=sys.stderr)
