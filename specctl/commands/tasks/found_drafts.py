"""What ``specctl doctor --find-draft`` tells: what could draft for a target, and what to run next."""

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specctl.commands.option_groups import PairOptions, RunOptions
    from specctl.commands.tasks.device_report import Section
    from specctl.doctor.draft_candidates import DraftCandidate, DraftSearch

SHOWN = 5
"""Models that are no candidates of which the reason is shown."""


def sections(found: "DraftSearch") -> "Iterator[Section]":
    """What is shown, in order: each candidate, what was left out, and what to run next."""
    for one in found.candidates:
        yield f"draft {one.model}", dict(_candidate(one))
    if found.left_out:
        more = len(found.left_out) - SHOWN
        rows = dict([*found.left_out.items()][:SHOWN])
        yield "no drafts for this target", rows | ({"and": f"{more} more (--json tells why)"} if more > 0 else {})
    rows = dict.fromkeys(found.on_hub, "made from this target; `hf download` fetches it, and then more can be said")
    yield "on the hub", rows or {"none": found.hub or "nothing new"}
    if found.compare:
        yield "to compare the first two", {str(number): line for number, line in enumerate(found.compare, start=1)}


def given(models: "PairOptions", options: "RunOptions", target: str) -> list[str]:
    """The arguments that name this call's target in another command, with all that --set says but of the draft."""
    name = models.profile or (None if models.target else os.environ.get("SPECCTL_PROFILE"))
    arguments = ["--profile", name] if name else []
    if models.target or not name:
        arguments += ["--target", target]
    kept = [text for text in options.set_ or () if text.split(".")[0].strip() not in ("draft", "policy")]
    return [*arguments, *(word for text in kept for word in ("--set", text))]


def _candidate(one: "DraftCandidate") -> Iterator[tuple[str, str]]:
    size = "" if one.parameters is None else f", {one.parameters:,} parameters"
    yield "is", f"{one.kind}{size}"
    yield "tokenizer", one.tokens
    yield "a step reads", f"{one.cost:.2f} of what a target pass reads"
    long = (
        ""
        if one.pays_from_full == one.pays_from
        else f"; {_from(one.pays_from_full)} with {one.full:,} tokens in the caches"
    )
    yield "can pay", f"{_from(one.pays_from)}{long}"
    yield "next", one.command


def _from(rate: float | None) -> str:
    return "never, by the bytes that are read" if rate is None else f"from about {rate:.0%} accepted"
