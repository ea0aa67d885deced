"""``specctl doctor``: whether a pair can run on this machine, and if not, why."""

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from specctl.commands.options import DraftOption, JsonOption, ProfileOption, SetOption, TargetOption, chosen_profile
from specctl.errors import ModelError

if TYPE_CHECKING:
    from specctl.models.loading.diagnosis import Diagnosis, ModelFacts

Facts = dict[str, str]


def doctor(
    profile: ProfileOption = None,
    target: TargetOption = None,
    draft: DraftOption = None,
    set_: SetOption = None,
    json_: JsonOption = False,
) -> None:
    """Check a model pair without loading it: files, access, memory, devices, tokenizers.

    Exits with 3 when the pair cannot be loaded.
    """
    resolved = chosen_profile(profile, target, draft, set_)
    with Console(stderr=True).status("Examining the models"):
        from specctl.models.loading.diagnosis import diagnose

        report = diagnose(resolved.profile)
    if json_:
        typer.echo(json.dumps({"profile": resolved.name, "ready": report.ready, **asdict(report)}, ensure_ascii=False))
    elif (console := Console()).is_terminal:
        _print_tables(console, report)
    else:
        typer.echo("\n".join(_plain(resolved.name, report)))
    if not report.ready:
        raise typer.Exit(ModelError.exit_code)


def _print_tables(console: Console, report: "Diagnosis") -> None:
    models = {facts.key: _model_rows(facts) for facts in report.models}
    table = Table("", *models, title="Models", title_justify="left")
    for name in next(iter(models.values())):
        table.add_row(name, *(Text(rows[name]) for rows in models.values()))
    console.print(table)
    devices = _device_rows(report)
    table = Table("device", *next(iter(devices.values())), title="Devices", title_justify="left")
    for name, rows in devices.items():
        table.add_row(name, *map(Text, rows.values()))
    console.print(table)
    console.print(Text(_versions(report), style="dim"))
    for line, style in verdict(report):
        console.print(Text(line, style=style))


def _plain(profile: str, report: "Diagnosis") -> list[str]:
    lines = [f"profile: {profile}"]
    for facts in report.models:
        lines += ["", facts.key, *(f"  {name}: {value}" for name, value in _model_rows(facts).items())]
    for device, rows in _device_rows(report).items():
        lines += ["", device, *(f"  {name}: {value}" for name, value in rows.items())]
    return [*lines, "", _versions(report), "", *(line for line, _ in verdict(report))]


def _model_rows(facts: "ModelFacts") -> Facts:
    from specctl.models.loading.memory import gib

    return {
        "model": facts.model,
        "found": facts.found,
        "architecture": facts.architecture or "-",
        "parameters": f"{facts.parameters:,}" if facts.parameters else "-",
        "context": f"{facts.context:,} tokens" if facts.context else "-",
        "output rows": f"{facts.vocabulary:,}" if facts.vocabulary else "-",
        "weights": ", ".join(f"{dtype} {gib(size)}" for dtype, size in facts.weights_by_dtype.items()) or "-",
        "cache per 1k tokens": gib(facts.cache_per_1k_tokens) if facts.cache_per_1k_tokens else "-",
        "end of sequence ids": ", ".join(map(str, facts.eos_ids)) or "none",
        "licence": facts.licence or "not stated",
        "gated": facts.gated or "-",
        "dtype here": facts.dtype or "-",
        "goes to": ", ".join(facts.devices) or "-",
    }


def _device_rows(report: "Diagnosis") -> dict[str, Facts]:
    from specctl.models.loading.memory import gib

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


def verdict(report: "Diagnosis") -> list[tuple[str, str]]:
    """The closing lines, each with its style."""
    lines = []
    if report.shared_vocabulary:
        lines.append((f"Tokenizers agree on {report.shared_vocabulary:,} tokens.", ""))
    lines += [(f"Note: {advice}", "yellow") for advice in report.advice]
    for problem in report.problems:
        lines += [(f"Problem: {problem.message}", "red"), (f"  {problem.hint}", "")]
    if report.ready:
        return [*lines, ("Verdict: ready.", "bold green")]
    count = len(report.problems)
    return [*lines, (f"Verdict: cannot run, {count} problem{'s'[: count > 1]}.", "bold red")]
