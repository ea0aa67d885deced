"""Pairs without a tokenizer, and traces of what their target wrote."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from scipy.stats import chi2_contingency
from toys import seeded

from specctl.decoding.sampling import Sampling
from specctl.models.loading.pair import Pair
from specctl.models.running.acceptance_head import AcceptanceHead
from specctl.models.running.runner import Runner
from specctl.records import Round
from specctl.replay.recording import read_sequence
from specctl.replay.traces import Trace


def pair_of(
    target: Runner,
    *drafts: Runner,
    eos: frozenset[int] = frozenset(),
    heads: Sequence[AcceptanceHead | None] | None = None,
) -> Pair:
    named = tuple({} if head is None else {"head": head} for head in heads or [None] * len(drafts))
    return Pair(target, drafts, None, eos, 1 << 20, (), named)  # type: ignore[arg-type]


def trace_of(
    pair: Pair, prompt: Sequence[int], tokens: Sequence[int], limit: int, depth: int, sampling: Sampling, seed: int = 0
) -> Trace:
    with torch.inference_mode():
        line, chances = read_sequence(pair, prompt, tokens, limit, depth, sampling, seeded(seed))
    return Trace(
        prompt="p",
        category="c",
        turn=0,
        prompt_tokens=len(prompt),
        limit=limit,
        tokens=list(tokens),
        line=line,
        prefill_ms=0.0,
        chances=chances,
    )


def shape(played: Round) -> tuple[object, ...]:
    """All of a round but its signals and times, those of its inner rounds too."""
    inner = tuple(map(shape, played.inner))
    return played.drafted, played.accepted, played.stop, played.extra, played.extra_kind, inner


def assert_same_law(live: Counter[Any], replayed: Counter[Any]) -> None:
    """A chi-square test of what was counted in as many live runs as replays; rare outcomes are taken together."""
    keys = sorted(live | replayed, key=lambda k: -(live[k] + replayed[k]))
    common = [k for k in keys if live[k] + replayed[k] >= 20]
    columns = [[counts[k] for k in common] for counts in (live, replayed)]
    for row, counts in zip(columns, (live, replayed), strict=True):
        row.append(counts.total() - sum(row) + 1)
    assert len(common) > 8
    assert chi2_contingency(columns).pvalue > 1e-3
