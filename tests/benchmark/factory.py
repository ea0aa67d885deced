"""Synthetic results with exact times, for tests of what is computed from them."""

from collections.abc import Iterable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from specctl.benchmark import report
from specctl.benchmark.digest import digest
from specctl.observing.results import Candidate, Header, PassTimes, Run, RunSet
from specctl.policies import Setting, nested
from specctl.records import CompletionSummary, FinishReason, RoundSummary, StopReason
from specctl.reporting.table import Table

DRAFT_MS, TARGET_MS, PREFILL_MS = 2.0, 10.0, 5.0
Shape = tuple[int, int, str]
"""A round: drafted, accepted, stop reason."""


def candidate(label: str, name: str | None = None, **values: Any) -> Candidate:
    """A policy on the first draft."""
    return Candidate(label, Setting.of({"name": name or label, **values}))


def peer(label: str) -> Candidate:
    return Candidate(label, None, peer=label)


def drafted_run(
    label: str, prompt: str, shapes: Iterable[Shape], *, slowdown: float = 1.0, other_ms: float = 0.0, **changes: Any
) -> Run:
    """Rounds that cost DRAFT_MS per draft token and TARGET_MS per pass, times ``slowdown``, plus ``other_ms``."""
    rounds = tuple(
        RoundSummary(drafted, accepted, StopReason(stop), None, DRAFT_MS * drafted * slowdown, TARGET_MS * slowdown)
        for drafted, accepted, stop in shapes
    )
    return _run(label, prompt, rounds, sum(round_.accepted + 1 for round_ in rounds), other_ms, **changes)


MID_MS = 4.0
HIERARCHY = nested([Setting("self-verify"), Setting("self-verify")])
"""Two levels, on the first and the second draft."""


def nested_run(label: str, prompt: str, blocks: Iterable[tuple[int, Sequence[tuple[int, int]]]], **changes: Any) -> Run:
    """Target rounds over a middle model over a draft: accepted by the target, then (drafted, accepted) of each inner
    round. A draft costs DRAFT_MS, a pass of the middle model MID_MS, one of the target TARGET_MS.
    """
    rounds = []
    for accepted, inner in blocks:
        below = tuple(RoundSummary(k, n, StopReason.POLICY, 0.1, DRAFT_MS * k, MID_MS) for k, n in inner)
        drafted = sum(n + 1 for _, n in inner)
        draft_ms = sum(one.draft_ms + one.verify_ms for one in below)
        rounds.append(RoundSummary(drafted, accepted, StopReason.POLICY, 0.2, draft_ms, TARGET_MS, below))
    return _run(label, prompt, tuple(rounds), sum(round_.accepted + 1 for round_ in rounds), 0.0, **changes)


def middle_run(label: str, prompt: str, shapes: Iterable[Shape], **changes: Any) -> Run:
    """The middle model drafting alone."""
    rounds = tuple(
        RoundSummary(drafted, accepted, StopReason(stop), None, MID_MS * drafted, TARGET_MS)
        for drafted, accepted, stop in shapes
    )
    return _run(label, prompt, rounds, sum(round_.accepted + 1 for round_ in rounds), 0.0, **changes)


def plain_run(prompt: str, count: int, label: str = "none", slowdown: float = 1.0, **changes: Any) -> Run:
    """Target-only decoding: one pass per token."""
    rounds = tuple(RoundSummary(0, 0, None, None, 0.0, TARGET_MS * slowdown) for _ in range(count))
    return _run(label, prompt, rounds, count, 0.0, **changes)


def peer_run(label: str, prompt: str, count: int, decode_ms: float, **changes: Any) -> Run:
    return _run(label, prompt, (), count, decode_ms, **changes)


def _run(
    label: str,
    prompt: str,
    rounds: tuple[RoundSummary, ...],
    count: int,
    other_ms: float,
    category: str = "all",
    repeat: int = 0,
    length: int = 64,
    tokens: Sequence[int] | None = None,
    difference: Any = None,
) -> Run:
    decode_ms = sum(round_.draft_ms + round_.verify_ms for round_ in rounds) + other_ms
    first_ms = rounds[0].draft_ms + rounds[0].verify_ms if rounds else decode_ms
    ends = accumulate((round_.draft_ms + round_.verify_ms for round_ in rounds), initial=PREFILL_MS)
    turn = CompletionSummary(
        prompt_tokens=7,
        tokens=tuple(tokens if tokens is not None else range(count)),
        text="",
        finish_reason=FinishReason.LENGTH,
        prefill_ms=PREFILL_MS,
        first_token_ms=PREFILL_MS + first_ms,
        total_ms=PREFILL_MS + decode_ms,
        target_forwards=len(rounds),
        draft_forwards=sum(round_.draft_forwards for round_ in rounds),
        rounds=rounds,
        arrivals_ms=tuple(ends)[1:],
    )
    return Run(label, prompt, category, repeat, length, (turn,), difference)


def run_set(
    candidates: Sequence[Candidate],
    runs: Sequence[Run],
    *,
    temperature: float = 0.0,
    costs: PassTimes | None = None,
    oracle: dict[str, int] | None = None,
    lengths: Sequence[int] = (64,),
    prompts: int | None = None,
    drafts: Sequence[str] = (),
) -> RunSet:
    header = Header(
        created="2026-01-02T03:04:05+00:00",
        argv=["specctl", "bench"],
        versions={"specctl": "0.1.0", "torch": "2.13.0"},
        devices={"target": "cpu", "draft": "cpu"},
        profile={"target": {"model": "big"}, "draft": {"model": "small"}},
        suite={"name": "embedded", "sha256": "0" * 64, **({"count": prompts} if prompts else {})},
        sampling={"temperature": temperature, "max_new_tokens": 64},
        candidates=list(candidates),
        repeats=1,
        lengths=list(lengths),
        oracle=oracle is not None,
        drafts=list(drafts),
    )
    return RunSet(header, list(runs), costs, oracle or {})


def tables(results: RunSet) -> list[Table]:
    return report.tables(digest(results))


def as_json(results: RunSet) -> dict[str, Any]:
    return report.as_json(digest(results))


def write_report(results: RunSet, folder: Path) -> list[Path]:
    return report.write_report(digest(results), folder)
