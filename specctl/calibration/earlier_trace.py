"""Checks that an earlier trace can be used in a calibration: same models and sampling, and deep enough."""

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from specctl.calibration.compared_settings import ComparedSettings
from specctl.errors import UsageError
from specctl.policies import TRAINED_SIGNALS
from specctl.profile.schema import FILTERS, Profile, SamplingTable
from specctl.prompts.suites import Suite
from specctl.replay.trace_files import TraceHeader, require_same_request

_ENGINE_KEYS = ("engine", "compile", "deterministic", "threads")
_WRITES_KEYS = ("tokens", "token_counts")
_SAMPLING_KEYS = ("temperature", *FILTERS)


def require_fits(
    header: TraceHeader,
    profile: Profile,
    asked: ComparedSettings,
    heads: Sequence[str],
    prompts: Suite | None,
    path: Path,
) -> None:
    """Check that an earlier trace fits a calibration: one to continue if there are prompts, else one to search in.

    Raises:
        UsageError: it does not; the message names the difference.
    """
    if prompts is not None:
        require_same_request(header, profile, prompts, asked.depth, heads, path)
    else:
        require_same_pair(header, profile, heads, path)
        require_depth(header, asked, path)


def require_same_pair(header: TraceHeader, profile: Profile, heads: Sequence[str], path: Path) -> None:
    """Check that a trace was recorded with the models, the engine and the sampling of a profile.

    Raises:
        UsageError: it was recorded with others; the message names the difference.
    """
    recorded, asked = header.provenance["profile"], profile.model_dump(mode="json", exclude_none=True)
    for (role, was), (_, now) in zip_longest(_models(recorded), _models(asked), fillvalue=("draft", {})):
        if was.get("model") != now.get("model"):
            raise UsageError(
                f"{path} was recorded with {was.get('model')} as {role}, not {now.get('model')}",
                "name the profile that it was recorded with",
            )
        for key in _WRITES_KEYS:
            if was.get(key) != now.get(key):
                raise UsageError(f"{path} was recorded with another draft.{key}", "record a new trace")
        predicts = not TRAINED_SIGNALS.isdisjoint(header.signals) and now.get("head") is not None
        if predicts and now["head"] not in (was.get("head"), *header.heads):
            raise UsageError(
                f"{path} was recorded with {was.get('head')} as the draft's head, not {now['head']}",
                "record a new trace",
            )
    if missing := [name for name in heads if name not in (recorded["draft"].get("head"), *header.heads)]:
        raise UsageError(f"{path} was recorded without the head {missing[0]}", "record a new trace")
    for key in _ENGINE_KEYS:
        if recorded[key] != asked[key]:
            raise UsageError(
                f"{path} was recorded with another {key}", "its measured costs do not apply: record a new trace"
            )
    for key in _SAMPLING_KEYS:
        if header.provenance["sampling"].get(key, SamplingTable.model_fields[key].default) != asked["sampling"][key]:
            raise UsageError(f"{path} was recorded with another {key}", "record a new trace")


def require_depth(header: TraceHeader, asked: ComparedSettings, path: Path) -> None:
    """Check that the longest draft of the settings compared can be replayed on a trace.

    Raises:
        UsageError: the trace was recorded for shorter drafts.
    """
    if asked.depth > header.depth:
        raise UsageError(
            f"{path} was recorded for drafts of {header.depth} tokens, and these settings draft {asked.depth}",
            "record a new trace, or search other policies or --grid paper",
        )


def _models(profile: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """The table of each model of a profile with the model's role, from the target down."""
    tables = [("target", profile["target"])]
    below = profile.get("draft")
    while below is not None:
        tables.append(("draft", below))
        below = below.get("draft")
    return tables
