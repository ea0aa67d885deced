"""The profile that a calibration writes: it extends the old profile with the chosen setting and its provenance."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import tomli_w

from specctl.calibration.decision import Decision
from specctl.calibration.search import Best
from specctl.policies import NONE, Setting
from specctl.printable import one_line
from specctl.profile import ResolvedProfile
from specctl.profile.schema import Engine
from specctl.profile.writing import overlay
from specctl.replay.trace_files import TraceSet

MOST_RUNNER_UPS = 5


def calibrated_profile(
    resolved: ResolvedProfile,
    decision: Decision,
    facts: Mapping[str, Any],
    output: Path,
    counts: Path | None = None,
) -> dict[str, Any]:
    """The contents of a profile file that extends the resolved profile, if that is a file.

    It includes the changes by flags, ``--set`` and the environment, because the calibration ran with them.

    Args:
        resolved: the profile that was calibrated.
        decision: the outcome.
        facts: when, how and where, for the provenance.
        output: path of the file to write.
        counts: path of the token counts, for a draft that writes few tokens.
    """
    found, advice = decision.found, decision.advice
    setting = decision.setting
    table: dict[str, Any] = {
        "schema_version": 1,
        "description": f"{resolved.name}, calibrated: {setting.label}",
    }
    if resolved.source is not None:
        table["extends"] = _parent(resolved, resolved.source, output)
    for key, origin in resolved.origins.items():
        path = key.split(".")
        if not _of_file(origin) and "policy" not in path and "batch_policies" not in path and path[0] != "provenance":
            _put(table, path, _value(resolved, path))
    table |= measured_engine(resolved.profile.engine, facts)
    draft = resolved.profile.draft
    assert draft is not None
    overlay(table.setdefault("draft", {}), draft_table(setting, len(draft.levels)))
    if counts is not None and draft.levels[-1].tokens is not None:
        _put(table, [*["draft"] * len(draft.levels), "token_counts"], str(counts.resolve()))
    used, predicted = advice.rival_used, advice.predicted(advice.setting)
    speed = used.speedup
    expected: dict[str, Any] = {
        "from": "live runs" if advice.measured else "prediction",
        "tokens_per_second": round(used.tokens_per_second, 1),
        "speedup": round(speed.value, 3),
    }
    if advice.measured and predicted is not None:
        expected["predicted_speedup"] = round(predicted.value, 3)
    if speed.doubt:
        expected["doubt"] = speed.doubt
    if speed.low is not None and speed.high is not None:
        expected |= {"low": round(speed.low, 3), "high": round(speed.high, 3)}
    if decision.sizes:
        expected["batches"] = {str(size.rows): _expected_of(size, decision) for size in decision.sizes}
    table["provenance"] = {
        **facts,
        "chosen_on": len(found.chosen_on),
        "reported_on": len(found.reported_on),
        "left_out": decision.prompts["left_out"] + decision.prompts["failed"],
        "held_out": found.held_out,
        "settings_replayed": found.candidates,
        "expected": expected,
        "oracle_speedup": round(found.oracle.speedup.value, 3),
        "runner_ups": [
            {"policy": score.setting.label, "tokens_per_second": round(score.tokens_per_second, 1)}
            for score in found.choice.near[:MOST_RUNNER_UPS]
        ],
        "warnings": found.warnings,
        "costs": decision.costs.as_record(),
    }
    return table


def _expected_of(size: Best, decision: Decision) -> dict[str, Any]:
    """The expected speeds for several texts at once, measured if there are live runs of the setting to use."""
    setting = decision.setting_of(size)
    live = next((one for one in decision.measured if (one.rows, one.setting) == (size.rows, setting)), None)
    predicted = next((one for one in size.ranking if one.score.setting == setting), size.winner)
    if live is None or live.speedup is None:
        speed, rate, source = predicted.speedup, predicted.score.tokens_per_second, "prediction"
    else:
        speed, rate, source = live.speedup, live.measured, "live runs"
    return {"from": source, "tokens_per_second": round(rate, 1), "speedup": round(speed.value, 3)}


def profile_text(table: Mapping[str, Any], verdict: str) -> str:
    """A calibrated profile as TOML: the verdict in a comment, and the costs last, a line for each list."""
    provenance = dict(table["provenance"])
    costs = provenance.pop("costs")
    lines = [f"{_key(name)} = {_inline(value)}" for name, value in costs.items()]
    text = tomli_w.dumps({**table, "provenance": provenance})
    return "\n".join([f"# {one_line(verdict)}", f"{text}", "[provenance.costs]", *lines, ""])


def _inline(value: Any) -> str:
    """A value of TOML on one line."""
    if isinstance(value, Mapping):
        return f"{{ {', '.join(f'{_key(name)} = {_inline(each)}' for name, each in value.items())} }}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_inline, value))}]"
    return tomli_w.dumps({"x": value}).partition(" = ")[2].rstrip("\n")


def _key(name: str) -> str:
    return tomli_w.dumps({name: 0}).rpartition(" = ")[0]


def facts_of(traces: TraceSet, command: str) -> dict[str, Any]:
    """The conditions of a calibration, for its profile and reports.

    Args:
        traces: of the calibration.
        command: the command line of the calibration.
    """
    recorded = traces.header.provenance
    kept = {key: recorded[key] for key in ("suite", "devices", "engines", "versions")}
    return {"created": recorded["created"], "command": command, **kept}


def measured_engine(asked: Engine, facts: Mapping[str, Any]) -> dict[str, Any]:
    """The values of ``engine`` and ``compile`` that fix the measured engine, where ``auto`` might choose another.

    On a CUDA device a draft step costs another share of a verification with each (0.47 eagerly and 0.31 with graphs, of
    Llama 8B and 1B on an H200), so a setting that is fastest with one is not so with another. Elsewhere ``auto`` stays.

    Args:
        asked: the engine of the profile that was calibrated.
        facts: with ``devices`` and ``engines`` by model.
    """
    on_cuda = any(str(device).startswith("cuda") for device in facts.get("devices", {}).values())
    name = str(facts.get("engines", {}).get("target", ""))
    known = next((engine for engine in get_args(Engine) if name.startswith(engine)), None)
    if asked != "auto" or not on_cuda or known is None:
        return {}
    return {"engine": known, "compile": "compiled" in name}


def draft_table(setting: Setting, drafts: int) -> dict[str, Any]:
    """The ``[draft]`` table of a profile for a setting, with every value of every draft of the profile.

    Drafts below the last level of the setting get the policy ``none``.
    """
    table: dict[str, Any] = {"policy": {"name": setting.policy, **setting.all_values}}
    if setting.batches:
        table["batch_policies"] = {str(least): one.word for least, one in setting.batches}
    if setting.head is not None:
        table["head"] = str(Path(setting.head).resolve()) if Path(setting.head).exists() else setting.head
    if drafts > 1:
        below = setting.below or NONE
        table |= {"pre_verify": setting.pre_verify, "draft": draft_table(below, drafts - 1)}
    return table


def _parent(resolved: ResolvedProfile, source: Path, output: Path) -> str:
    """The new file's reference to the old profile: its name, or its path if it was given by path."""
    if resolved.name == source.stem and output.stem != source.stem:
        return resolved.name
    return str(source.resolve())


def _of_file(origin: str) -> bool:
    return origin == "default" or not origin.startswith(("flag", "--set", "environment"))


def _value(resolved: ResolvedProfile, path: list[str]) -> Any:
    value: Any = resolved.profile.model_dump()
    for name in path:
        value = value[name]
    return value


def _put(table: dict[str, Any], path: list[str], value: Any) -> None:
    if value is None:
        return  # TOML has no null; a missing key means the same
    for name in path[:-1]:
        table = table.setdefault(name, {})
    table[path[-1]] = value
