"""``specctl doctor``: whether a pair can run on this machine, and if not, why."""

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from specctl.commands.flags import JsonOption, PairOptions, RunOptions
from specctl.commands.requests import But, grouped, option
from specctl.errors import ModelError, UsageError
from specctl.files import write_line
from specctl.profile.profile_file import display
from specctl.terminal.output import write_out
from specctl.terminal.progress import TerminalProgress, loading

if TYPE_CHECKING:
    from specctl.doctor.diagnosis import Diagnosis, ModelFacts
    from specctl.doctor.draft_candidates import DraftCandidate, DraftSearch
    from specctl.doctor.expectations import Expectation, Room
    from specctl.doctor.outlook import Bandwidth, Outlook
    from specctl.models.placing.memory import Graphics
    from specctl.models.running.threads import Threads
    from specctl.observing.pass_times import Trial
    from specctl.profile import Profile


Facts = dict[str, str]


USUAL = "profile target draft set_ run devices memory find_draft folders json_"  # The parameters that --help shows


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorRequest:
    """The flags of `specctl doctor`; UsageError for conflicting ones."""

    models: PairOptions
    options: Annotated[RunOptions, But(("check", "force", "foreign_head"))]
    run: bool = option(
        "Load the models and generate a few tokens. Checks that the target forgets rejected tokens, and compares with "
        "and without drafts.",
        "--run",
        default=False,
    )
    devices: bool = option(
        "Show GPUs, memory, engine and the best speedup to expect. Loads no weights; shows what weights and caches "
        "take, how long passes take at least, and the acceptance rate above which drafting pays.",
        "--devices",
        default=False,
    )
    memory: list[str] | None = option(
        "Check another machine: a GPU or its CPU, such as cuda:0=24GiB. Shows what fits there, the devices of the "
        "layers, and the engine; repeatable.",
        "--memory DEVICE=SIZE",
    )
    find_draft: bool = option(
        "List drafts for the target, with what a step costs. Looks in the hub's cache, the target's own files and the "
        "folders of --in, and asks the hub. Reads no weights.",
        "--find-draft",
        default=False,
    )
    folders: list[Path] | None = option("With --find-draft: a folder of models to look into; repeatable.", "--in DIR")
    json_: JsonOption = False

    def __post_init__(self) -> None:
        if self.find_draft and (self.run or self.devices or self.models.draft is not None):
            flag = "--run" if self.run else "--devices" if self.devices else "--draft"
            raise UsageError(f"{flag} needs a pair, and --find-draft looks for a draft", "leave one of them out")
        if self.memory and (self.run or self.find_draft):
            flag = "--run" if self.run else "--find-draft"
            what = f"--memory describes another machine, and {flag} needs this one"
            raise UsageError(what, "leave one of them out")
        if self.folders and not self.find_draft:
            raise UsageError("--in needs --find-draft", "add --find-draft")
        if missing := next((folder for folder in self.folders or () if not folder.is_dir()), None):
            raise UsageError(f"--in {display(missing)}: there is no such folder")


@grouped(usual=USUAL)
def doctor(request: DoctorRequest) -> None:
    """Check a model pair without loading it: files, access, memory, devices, tokenizers.

    Exits with 3 when the pair cannot be loaded, or does not fit on what --memory describes.

    Examples:

    [cyan]specctl doctor --target ./big --draft ./small --devices[/]

    [cyan]specctl doctor --target Qwen/Qwen3-8B --find-draft[/]
    """
    resolved = request.options.resolve(request.models, {"check": request.run or None})
    profile = resolved.profile.model_copy(update={"draft": None}) if request.find_draft else resolved.profile
    found = drafts = tried = None
    with loading(Console(stderr=True), "examining the models"):
        from specctl.doctor.diagnosis import diagnose
        from specctl.models.placing.memory import described
        from specctl.models.running.threads import decided, use

        machine = described(request.memory) if request.memory else None
        report = diagnose(profile, tries=not request.run, machine=machine)  # --run loads all models anyway
        chosen = decided(resolved.profile.threads)
        if request.devices or machine is not None:
            from specctl.models.placing.memory import graphics

            use(resolved.profile.threads)
            found = examine_devices(resolved.profile, report, graphics() if machine is None else None)
            if not report.placed and machine is None:
                report.advice.append("Only facts of the GPUs: the models could not be read.")
        if request.find_draft and report.ready:
            from specctl.doctor.draft_candidates import find_drafts

            drafts = find_drafts(profile, report, request.folders or (), _target_flags(request, profile.target.model))
    if request.run and report.ready:
        tried, chosen = _try_out(resolved.profile)
    told = [
        *(device_sections(found) if found is not None else ()),
        *(draft_sections(drafts) if drafts is not None else ()),
    ]
    if request.json_:
        document: dict[str, object] = {"profile": resolved.name, "ready": report.ready, **asdict(report)}
        document["threads"] = None if chosen is None else asdict(chosen)
        if found is not None:
            document["outlook"] = found.document
        if drafts is not None:
            document["drafts"] = asdict(drafts)
        if tried is not None:
            document["run"] = asdict(tried)
        write_line(sys.stdout, document)
    elif (console := Console()).is_terminal:
        _print_tables(console, report, chosen, told, tried)
    else:
        write_out("\n".join(_plain(resolved.name, report, chosen, told, tried)))
    if not report.ready:
        raise typer.Exit(ModelError.exit_code)


def _try_out(profile: "Profile") -> "tuple[Trial, Threads | None]":
    from specctl.commands.loading import load

    pair = load(profile, TerminalProgress(Console(stderr=True)), expected_tokens=1, torch_weights=True)

    from specctl.observing.pass_times import try_out

    return try_out(pair, profile), pair.threads


def _threads_line(threads: "Threads | None") -> str:
    """The number of threads for passes on the CPU, in one line."""
    from specctl.processes import cores_text, usable_cores

    return f"Threads: {threads or f'measured on {cores_text(usable_cores())} when the models are loaded'}."


def _run_line(tried: "Trial") -> str:
    """The result of a trial, in one line."""
    parts = [f"{tried.tokens} tokens: the target alone {tried.alone_per_second:.1f} tokens/s"]
    if tried.same is not None and tried.drafted_per_second is not None:
        same = "the same tokens" if tried.same else "OTHER tokens (rounding decides between near ties)"
        rate = "none drafted" if tried.acceptance_rate is None else f"{tried.acceptance_rate:.0%} accepted"
        parts.append(f"with drafts {tried.drafted_per_second:.1f} tokens/s, {rate}, {same}")
    parts.append(f"after a rejection the target differs from a fresh read by {tried.difference:.2%}")
    return "; ".join(parts)


def _pass_lines(tried: "Trial") -> list[str]:
    lines = []
    for model, engines in groupby(tried.passes, attrgetter("model")):
        told = []
        for passes in engines:
            (_, one), *more = passes.milliseconds.items()
            told.append(f"{passes.engine} {one:.2f} ms for a token, {', '.join(f'{ms:.2f} for {n}' for n, ms in more)}")
        lines.append(f"Passes of the {model}: {'; '.join(told)}.")
    return lines


def _print_tables(
    console: Console,
    report: "Diagnosis",
    threads: "Threads | None",
    more: "Sequence[Section]",
    tried: "Trial | None",
) -> None:
    from specctl.reporting.console import cell

    models = {facts.key: _model_rows(facts, report) for facts in report.models}
    table = Table("", *models, title="Models", title_justify="left")
    for name in dict.fromkeys(name for rows in models.values() for name in rows):
        table.add_row(name, *(cell(rows.get(name, "-")) for rows in models.values()))
    console.print(table)
    devices = _device_rows(report)
    table = Table("device", *next(iter(devices.values())), title="Devices", title_justify="left")
    for name, rows in devices.items():
        table.add_row(cell(name), *map(cell, rows.values()))
    console.print(table)
    for title, facts in more:
        table = Table(show_header=False, title=title, title_justify="left")
        for row in facts.items():
            table.add_row(*map(cell, row))
        console.print(table)
    console.print(cell(_versions(report), "dim"))
    console.print(cell(_threads_line(threads), "dim"))
    for line, style in verdict(report, tried):
        console.print(cell(line, style))


def _plain(
    profile: str,
    report: "Diagnosis",
    threads: "Threads | None",
    more: "Sequence[Section]",
    tried: "Trial | None",
) -> list[str]:
    lines = [f"profile: {profile}"]
    for facts in report.models:
        lines += ["", facts.key, *(f"  {name}: {value}" for name, value in _model_rows(facts, report).items())]
    for device, rows in _device_rows(report).items():
        lines += ["", device, *(f"  {name}: {value}" for name, value in rows.items())]
    for title, told in more:
        lines += ["", title, *(f"  {name}: {value}" for name, value in told.items())]
    return [*lines, "", _versions(report), _threads_line(threads), "", *(line for line, _ in verdict(report, tried))]


def _head_line(facts: "ModelFacts") -> str:
    """The inputs and outputs of a draft head, in one line."""
    if facts.draft_head is None:
        return "-"
    parts: list[str] = [facts.draft_head]
    if facts.reads_layers:
        names = ["the last state" if layer < 0 else f"layer {layer}" for layer in facts.reads_layers]
        parts.append(f"reads {', '.join(names)}")
    if facts.draft_tokens:
        parts.append(f"drafts {facts.draft_tokens:,} tokens")
    return "; ".join([*parts, f"trained on {facts.trained_on or 'a model its files do not name'}"])


def _tokens_line(facts: "ModelFacts") -> str:
    if facts.covered is None or facts.covers is None or facts.draft_tokens is None:
        return "all tokens"
    told = f"{facts.covered:.1%} of those counted, {facts.covers:.0%} expected of other texts"
    return f"{facts.draft_tokens:,} tokens: {told}"


_CHECKED = {None: "-", True: "as in one pass", False: "checked when it is first loaded"}
"""Whether a target computes the same results for a text however it is split into passes."""


def _model_rows(facts: "ModelFacts", report: "Diagnosis") -> Facts:
    from specctl.doctor.diagnosis import NOT_FOUND
    from specctl.models.placing.absent import size_text
    from specctl.printable import gib

    layers = ", ".join(f"{count} on {device}" for device, count in facts.layers.items())
    if facts.without_files:
        return {"model": facts.model, "found": facts.found}
    if facts.found == NOT_FOUND:
        about = {} if facts.about is None else {"weights": f"about {size_text(facts.about)} in 16 bits, by its name"}
        return {"model": facts.model, "found": f"{facts.found}; the rest is skipped: it needs config.json", **about}
    return {
        "model": facts.model,
        "found": facts.found,
        "architecture": facts.architecture or "-",
        **({"draft head": _head_line(facts)} if any(other.draft_head for other in report.models) else {}),
        **({"adapter": facts.adapter or "-"} if any(other.adapter for other in report.models) else {}),
        "parameters": f"{facts.parameters:,}" if facts.parameters else "-",
        "context": f"{facts.context:,} tokens" if facts.context else "-",
        "output rows": f"{facts.vocabulary:,}" if facts.vocabulary else "-",
        **({"writes": _tokens_line(facts)} if any(other.covered is not None for other in report.models) else {}),
        "weights": ", ".join(f"{dtype} {gib(size)}" for dtype, size in facts.weights_by_dtype.items()) or "-",
        "cache per 1k tokens": gib(facts.cache_per_1k_tokens) if facts.cache_per_1k_tokens else "-",
        "end of sequence ids": ", ".join(map(str, facts.eos_ids)) or "none",
        **({"read in parts": _CHECKED[facts.checked]} if facts.key == "target" else {}),
        "token rules": ", ".join(facts.rules) or ("none" if facts.key == "target" else "the target's"),
        "licence": facts.licence or "not stated",
        "gated": facts.gated or "-",
        "dtype here": ", ".join(filter(None, (facts.quantize, facts.dtype))) or "-",
        **(_gguf_rows(facts) if any(other.gguf for other in report.models) else {}),
        **({"graph": _graph_line(facts)} if any(other.graph for other in report.models) else {}),
        "goes to": ", ".join(facts.devices) or "-",
        **({"layers": layers or "-"} if any(other.layers for other in report.models) else {}),
    }


def _gguf_rows(facts: "ModelFacts") -> Facts:
    from specctl.printable import gib

    if (gguf := facts.gguf) is None:
        return {"files": "-", "runs on": "-", "llama.cpp": "-", "a pass reads": "-", "passes": "-"}
    return {
        "files": str(gguf.files),
        "runs on": gguf.engine,
        "llama.cpp": gguf.library or gguf.install or "-",
        "a pass reads": gib(gguf.pass_bytes),
        "passes": gguf.passes or "-",
    }


def _graph_line(facts: "ModelFacts") -> str:
    from specctl.printable import gib

    if (graph := facts.graph) is None:
        return "-"
    if graph.refused is not None:
        return f"torch rounds its weights: {graph.refused}"
    when = "stored" if graph.stored else "made at first use, about"
    return f"{graph.form} on onnxruntime, {when} {gib(graph.bytes)} on disk and in memory"


def _device_rows(report: "Diagnosis") -> dict[str, Facts]:
    from specctl.printable import gib

    rows = {}
    for device in report.devices:
        here = {facts.key: facts.devices[device.name] for facts in report.models if device.name in facts.devices}
        rows[device.name] = {
            "is": device.label,
            "memory": gib(device.total),
            "free": gib(device.free),
            "would hold": ", ".join(f"{key} {gib(size)}" for key, size in here.items()) or "nothing",
            "left": gib(device.free - sum(here.values())),
        }
    return rows


def _versions(report: "Diagnosis") -> str:
    return ", ".join(f"{name} {version}" for name, version in report.versions.items())


def verdict(report: "Diagnosis", tried: "Trial | None" = None) -> list[tuple[str, str]]:
    """The last lines, each with its style."""
    lines = []
    if report.shared_vocabulary:
        lines.append((f"Tokenizers agree on {report.shared_vocabulary:,} tokens.", ""))
    lines += [(f"Note: {advice}", "yellow") for advice in report.advice]
    for problem in report.problems:
        lines += [(f"Problem: {problem.message}", "red"), (f"  {problem.hint}", "")]
    if tried is not None:
        lines += [(line, "") for line in _pass_lines(tried)]
        lines.append((f"Run: {_run_line(tried)}.", ""))
    if report.ready:
        return [*lines, (f"Verdict: {'ready' if report.here else 'fits'}.", "bold green")]
    count = len(report.problems)
    return [*lines, (f"Verdict: cannot run, {count} problem{'s'[: count > 1]}.", "bold red")]


Section = tuple[str, dict[str, str]]  # A title with its rows


@dataclass(frozen=True, slots=True)
class Devices:
    """A profile's models on a machine's devices; the last four are empty for models with problems."""

    graphics: "Graphics | None"  # the GPUs and torch's support for them; None for another machine
    bandwidths: "Mapping[str, Bandwidth | None]"  # by device
    models: "Sequence[Expectation]"  # the target first
    rooms: "Sequence[Room]"  # by device, the memory that the models need
    outlook: "Outlook | None"  # the possible speedup by drafts; None for models with problems

    @property
    def document(self) -> dict[str, Any]:
        """These facts as plain values."""
        found = asdict(self)
        if self.graphics is not None:
            found["graphics"]["obstacles"] = self.graphics.obstacles
        return found


def examine_devices(profile: "Profile", report: "Diagnosis", graphics: "Graphics | None") -> Devices:
    """The memory that a profile's models need on the diagnosed devices, and their speed limits.

    Devices that torch can use are measured, which takes a fraction of a second each.
    """
    from specctl.doctor.expectations import expectations, rooms
    from specctl.doctor.outlook import bandwidth, outlook
    from specctl.models.placing.memory import DESCRIBED

    if not report.placed:
        return Devices(graphics, {}, (), (), None)
    models = expectations(profile, report)
    taken = rooms(models, report.devices)
    usable = 0 if graphics is None else graphics.usable
    # With another machine's GPUs, only the CPU can be this one's.
    here = {"cpu"} if report.here or report.devices[-1].label != DESCRIBED else set()
    here |= {f"cuda:{index}" for index in range(usable)}
    held = {room.device: room.weights for room in taken}
    bandwidths = {
        device.name: bandwidth(device, held[device.name], here=device.name in here)
        for device in report.devices
        if device.name in held
    }
    return Devices(graphics, bandwidths, models, taken, outlook(models, bandwidths))


def device_sections(found: Devices) -> Iterator[Section]:
    """The sections in order: the GPUs, each device, each model, and the possible speedup by drafts."""
    from specctl.printable import gib

    if found.graphics is not None:
        yield "NVIDIA cards", dict(_cards(found.graphics))
    for room in found.rooms:
        speed = found.bandwidths[room.device]
        yield (
            f"{room.device}, once the models run",
            {
                "reads": "unknown" if speed is None else str(speed),
                "free": gib(room.free),
                "weights": gib(room.weights),
                f"caches of {room.context:,} tokens": gib(room.caches),
                "working room": gib(room.working),
                "left": gib(room.left) if room.left >= 0 else f"{gib(-room.left)} too little",
                **({"room for": f"{room.tokens:,} tokens"} if room.left < 0 and room.tokens is not None else {}),
            },
        )
    for model in found.models:
        yield model.key, dict(_model(model, found))
    if found.outlook is not None:
        yield "what drafts can bring", dict(_gains(found))


def _cards(graphics: "Graphics") -> Iterator[tuple[str, str]]:
    from specctl.printable import gib

    built = "without CUDA" if graphics.built_for is None else f"for CUDA {graphics.built_for}"
    oldest = graphics.oldest_driver
    needs = f", which needs driver {oldest} or newer" if oldest is not None else ""
    yield "torch", f"{graphics.torch_version}, built {built}{needs}"
    yield "driver", graphics.driver or "none found"
    if not graphics.cards:
        yield "cards", "none that nvidia-smi lists; models run on the other devices below"
    for number, card in enumerate(graphics.cards):
        parts = [card.name]
        if card.memory is not None:
            parts.append(gib(card.memory))
        if card.capability is not None:
            parts.append(f"compute capability {card.capability}")
        yield f"card {number}", ", ".join(parts)
    for number, obstacle in enumerate(graphics.obstacles, start=1):
        yield f"problem {number}", obstacle


def _model(model: "Expectation", found: Devices) -> Iterator[tuple[str, str]]:
    from specctl.printable import gib

    yield "engine", f"{model.engine} ({model.why})"
    if found.outlook is None or not model.reads:
        return
    yield "a pass reads", gib(model.reads[0])
    times = [f"{milliseconds(found.outlook.step_ms[model.key])} for a token"]
    if model.key == "target":
        times.append(f"{milliseconds(found.outlook.verify_ms)} for 6")
    yield "takes at least", ", ".join(times)


def _gains(found: Devices) -> Iterator[tuple[str, str]]:
    outlook = found.outlook
    assert outlook is not None
    if len(found.models) < 2:
        yield "can pay", "there is no draft, or its files are not here yet"
        return
    if outlook.cost_ratio is None:
        yield "can pay", "unknown, because a pass has no minimum time"
        return
    what = "a draft" if found.models[1].blocks else "a draft step"
    yield "cost by bytes", f"{what} takes {outlook.cost_ratio:.2f} of a target pass at least"
    yield "can pay", f"if {_from(outlook.pays_from)}, where reading memory takes the time"
    if outlook.pays_from_full != outlook.pays_from:
        yield (
            "can pay at the end",
            f"of a context of {found.models[1].context:,} tokens if {_from(outlook.pays_from_full)}",
        )
    if outlook.layer_ratio is not None:
        yield "cost by layers", f"{outlook.layer_ratio:.2f} of a target pass"
        launched = "where starting kernels takes the time, as in eager passes on a GPU"
        yield "can pay then", f"if {_from(outlook.pays_from_launched)}, {launched}"
    for gain in outlook.gains:
        fast = f"{gain.speedup:.2f} times as fast with {gain.draft_length} tokens a draft"
        yield f"at most, {gain.acceptance_rate:.0%} accepted", fast if gain.draft_length else "no gain"
    if any("cpu" in model.devices for model in found.models):
        yield "on a CPU", "passes over several tokens take longer than reading does; doctor --run times them"


def _from(rate: float | None) -> str:
    return "all were accepted and more" if rate is None else f"more than about {rate:.0%} of the tokens are accepted"


def milliseconds(value: float | None) -> str:
    """A time as text; unknown for None."""
    if value is None:
        return "unknown"
    return f"{value:.2g} ms" if value < 10 else f"{value:,.0f} ms"


SHOWN = 5  # Number of rejected models shown with the reason


def draft_sections(found: "DraftSearch") -> "Iterator[Section]":
    """The sections in order: the candidates, the rejected models, and the command to run next."""
    for one in found.candidates:
        yield f"draft {one.model}", dict(_candidate(one))
    if found.left_out:
        more = len(found.left_out) - SHOWN
        rows = dict([*found.left_out.items()][:SHOWN])
        yield "no drafts for this target", rows | ({"and": f"{more} more (--json shows why)"} if more > 0 else {})
    rows = dict.fromkeys(found.on_hub, "made from this target; `hf download` fetches it, and then more can be said")
    yield "on the hub", rows or {"none": found.hub or "nothing new"}
    if found.compare:
        yield "to compare the first two", {str(number): line for number, line in enumerate(found.compare, start=1)}


def _target_flags(request: DoctorRequest, target: str) -> list[str]:
    """The arguments that name this call's target in another command, with all --set values except the draft's."""
    models = request.models
    name = models.profile or (None if models.target else os.environ.get("SPECCTL_PROFILE"))
    arguments = ["--profile", name] if name else []
    if models.target or not name:
        arguments += ["--target", target]
    kept = [text for text in request.options.set_ or () if text.split(".")[0].strip() not in ("draft", "policy")]
    return [*arguments, *(word for text in kept for word in ("--set", text))]


def _candidate(one: "DraftCandidate") -> Iterator[tuple[str, str]]:
    size = "" if one.parameters is None else f", {one.parameters:,} parameters"
    yield "is", f"{one.kind}{size}"
    yield "tokenizer", one.tokens
    yield "a step reads", f"{one.cost:.2f} of what a target pass reads"
    long = (
        ""
        if one.pays_from_full == one.pays_from
        else f"; {_paying_from(one.pays_from_full)} with {one.full:,} tokens in the caches"
    )
    yield "can pay", f"{_paying_from(one.pays_from)}{long}"
    yield "next", one.command


def _paying_from(rate: float | None) -> str:
    return "never, by the bytes that are read" if rate is None else f"from about {rate:.0%} accepted"
