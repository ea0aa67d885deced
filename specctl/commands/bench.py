"""`specctl bench`: which policy is fastest on this pair and these prompts, by how much, and why."""

import sys
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import fields
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any

import typer

from specctl.commands.options import JsonOption, ProfileOptions, QuietOption, SetOption
from specctl.errors import UsageError
from specctl.policies import POLICIES
from specctl.profile.wording import did_you_mean

if TYPE_CHECKING:
    from specctl.benchmark.results import Entrant, Header, RunSet
    from specctl.benchmark.suites import Suite
    from specctl.profile import Profile


def bench(
    profile: ProfileOptions = None,
    policy: Annotated[
        list[str] | None,
        typer.Option("--policy", metavar="NAME:KEY=VALUE,...", help="A policy to run; repeatable. none always runs."),
    ] = None,
    set_: SetOption = None,
    suite: Annotated[str, typer.Option(help="Named prompts to run.")] = "embedded",
    data: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A local copy of the suite, in the data set's own format.")
    ] = None,
    input_: Annotated[
        str | None, typer.Option("-i", "--input", metavar="FILE|-", help="Records to run instead of a suite.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first so many prompts.")] = None,
    category: Annotated[list[str] | None, typer.Option(help="Only prompts of this category; repeatable.")] = None,
    samples_per_category: Annotated[
        int | None, typer.Option(min=1, help="A seeded sample of so many prompts of each category.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Run everything so many times.")] = 1,
    max_new_tokens: Annotated[
        int | None, typer.Option("-n", "--max-new-tokens", min=1, help="Most tokens to generate for a prompt.")
    ] = None,
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
        bool, typer.Option("--oracle", help="How near each policy comes to the fewest possible target passes (greedy).")
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
    json_: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Measure policies against each other and against the target alone, prompt by prompt in turn."""
    from specctl.benchmark.results import read_results

    if from_ is not None:
        results = read_results(from_)
    else:
        if resume and output is None:
            raise UsageError("--resume needs to know what is already there", "name the results file with --output FILE")
        flags = {"sampling.max_new_tokens": max_new_tokens, "sampling.temperature": temperature, "sampling.seed": seed}
        pair_profile, policies = _profiles(profile or [None], policy or [], set_ or [], flags)
        from specctl.benchmark.suites import load_records, load_suite

        chosen: dict[str, Any] = {
            "limit": limit,
            "categories": category or [],
            "samples_per_category": samples_per_category,
            "seed": pair_profile.sampling.seed,
        }
        if input_ is not None:
            prompts = load_records(sys.stdin.buffer if input_ == "-" else Path(input_), **chosen)
        else:
            prompts = load_suite(suite, data=data, **chosen)
        entrants = _entrants(policies, peer or [])
        limits = _lengths(lengths) or [pair_profile.sampling.max_new_tokens]
        results = _run(pair_profile, entrants, prompts, limits, repeats, oracle, output, resume, quiet)
    _show(results, report, spec_bench_out, json_)


def _profiles(
    names: Iterable[str | None], texts: Iterable[str], overrides: list[str], flags: dict[str, Any]
) -> tuple["Profile", list[dict[str, Any]]]:
    """The one pair that all profiles name, and every policy to run on it as a table with its name."""
    from specctl.profile import parse_policy, resolve

    resolved = [resolve(name, overrides=overrides, flags=flags).profile for name in names]
    first = resolved[0]
    models = [(p.target.model, p.draft.model if p.draft else None) for p in resolved]
    if len(set(models)) > 1:
        raise UsageError(
            f"the profiles name different models ({', '.join(' + '.join(map(str, m)) for m in models)})",
            "benchmark one pair at a time",
        )
    given = [parse_policy(text) for text in texts]
    own = [{"name": p.draft.policy.name, **p.draft.policy.settings()} for p in resolved if p.draft is not None]
    if not given:
        given = [*own, {"name": "constant"}, {"name": "heuristic"}]
    elif len(resolved) > 1:
        given = [*own, *given]
    return first, given


def _entrants(policies: Iterable[dict[str, Any]], peers: Iterable[str]) -> list["Entrant"]:
    """The baseline, then every policy once, then the peers."""
    from specctl.benchmark.results import BASELINE, Entrant

    found: dict[str, Entrant] = {BASELINE: Entrant(BASELINE, "policy", "none")}
    for table in policies:
        name = table["name"]
        policy = POLICIES[name](**{key: value for key, value in table.items() if key != "name"})
        settings: dict[str, Any] = {}
        changed = []
        for field in fields(policy):  # type: ignore[arg-type]
            if field.init:
                settings[field.name] = getattr(policy, field.name)
                if settings[field.name] != field.default:
                    changed.append(f"{field.name}={settings[field.name]}")
        label = f"{name}:{','.join(changed)}" if changed else name
        found.setdefault(label, Entrant(label, "policy", name, settings))
    if peers:
        from specctl.benchmark.peers import SETTINGS

        for peer in peers:
            if peer not in SETTINGS:
                raise UsageError(f"there is no peer '{peer}'{did_you_mean(peer, list(SETTINGS))}")
            found.setdefault(peer, Entrant(peer, "peer", peer, SETTINGS[peer]))
    return list(found.values())


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
    entrants: list["Entrant"],
    suite: "Suite",
    lengths: list[int],
    repeats: int,
    oracle: bool,
    output: Path | None,
    resume: bool,
    quiet: bool,
) -> "RunSet":
    from rich.console import Console

    from specctl.benchmark.results import RunSet, header_line, read_results
    from specctl.commands.streaming import open_output
    from specctl.jsonl import drop_torn_line, write_line
    from specctl.terminal.bench import BenchProgress
    from specctl.terminal.loading import loading, note

    if oracle and profile.sampling.temperature:
        raise UsageError("--oracle is about greedy decoding", "leave it out, or add -t 0")
    console = Console(stderr=True, quiet=quiet)
    with loading(console, "starting") as say:
        from specctl.benchmark.provenance import describe
        from specctl.decoding.session import warm_up
        from specctl.models.engines import EngineSettings
        from specctl.models.pair import load_pair

        expected = len(suite.prompts) * len(entrants) * sum(lengths) * repeats
        engines = EngineSettings.of(profile, expected, lambda text: note(console, text), say)
        pair = load_pair(profile, progress=lambda what: say(f"loading {what}"), engines=engines)
        if pair.preparing_seconds is not None:
            warm_up(pair, profile.sampling)
        header = describe(pair, profile, suite, entrants, lengths, repeats, oracle)
    results = RunSet(header)
    if resume and output is not None and output.exists():
        drop_torn_line(output)
        results = read_results(output)
        _require_same(results.header, header, output)

    from specctl.benchmark.running import Benchmark
    from specctl.decoding.prompts import PromptFormat

    with ExitStack() as stack:
        sink: IO[str] | None = None
        if output is not None:
            sink = stack.enter_context(open_output(str(output), append=bool(results.runs)))
            if not results.runs:
                write_line(sink, header_line(header))
        prompts = PromptFormat(pair.tokenizer, profile.prompt.chat, profile.prompt.system)

        def emit(line: dict[str, Any]) -> None:
            if sink is not None:
                write_line(sink, line)

        benchmark = Benchmark(pair, results, suite.prompts, profile.sampling, prompts, emit)
        total = len(suite.prompts) * len(entrants) * len(lengths) * repeats
        greedy = not profile.sampling.temperature
        with BenchProgress(console, [e.label for e in entrants], total, results.runs, greedy) as progress:
            for run in benchmark.run(before=progress.start):
                progress.add(run)
    if (seconds := pair.preparing_seconds) is not None:
        note(console, f"compiling and capturing took {seconds:.1f} s, which no figure contains")
    return results


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
    from specctl.jsonl import write_line

    whole = digest(results)
    if as_document:
        write_line(sys.stdout, tables.as_json(whole))
    elif sys.stdout.isatty():
        from specctl.terminal.bench import print_tables

        print_tables(Console(), tables.tables(whole))
    else:
        sys.stdout.write(tables.as_text(tables.tables(whole)))
    written: list[Path] = []
    if report is not None:
        from specctl.benchmark.report import write_report

        written += write_report(results, report)
    if answers is not None:
        from specctl.benchmark.spec_bench import write_answers

        written += write_answers(results, answers)
    for path in written:
        print(f"wrote {path}", file=sys.stderr)
