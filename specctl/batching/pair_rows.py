"""A pair as several pairs, one for each text of a batch, whose passes are made together."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from specctl.batching.decisions import Decisions
from specctl.batching.hub import Hub
from specctl.batching.shared_beginnings import SharedBeginnings
from specctl.models.running.pair import Pair
from specctl.models.running.passes import Passes
from specctl.models.running.slot import Slot
from specctl.policies import Setting


def why_alone(pair: Pair, *settings: Setting) -> str | None:
    """Why a pair writes one text at a time, as the end of a sentence; None if it can write several at once.

    Args:
        pair: loaded.
        settings: of its drafts.
    """
    if any(one.parallel for one in settings):
        return "a draft that writes while the target verifies has a thread of its own"
    if any(one.tree is not None for one in settings):
        return "several texts are read in chains, without trees"
    if (why := pair.target.no_rows) is not None:
        return f"the target runs on {pair.target.engine}, and {why}"
    for draft in pair.drafts:
        if not draft.bare.multiplies and draft.no_rows is not None:
            return f"a draft runs on {draft.engine}, and {draft.no_rows}"
    return None


def read_models(pair: Pair) -> list[Slot]:
    """The runners whose passes texts of a batch share; who waits for no one comes first, the target last."""
    return [runner for runner in (*reversed(pair.drafts), pair.target) if not runner.bare.multiplies]


def passes_of(pair: Pair, rows: int) -> list[Passes]:
    """Passes of each of the `read_models` over so many texts, at least 2; `why_alone` says nothing of the pair."""
    return [runner.over(rows) for runner in read_models(pair)]


def keeping(pair: Pair, passes: Sequence[Passes]) -> list[Passes]:
    """Passes that do not read again what a text has in common with another one, that is written or was its row's last.

    Nothing else may make passes then. Where a draft head reads the states of all tokens, rows read by themselves.
    """
    if any(draft.reads_states for draft in pair.drafts):
        return list(passes)
    return [SharedBeginnings(made) for made in passes]


def split(pair: Pair, passes: Sequence[Passes], *, kept: bool = False) -> tuple[Hub[Any], list[Pair]]:
    """A hub, and for each row a pair over it: the same models with caches of the row's own.

    Args:
        pair: of which `why_alone` says nothing.
        passes: of `passes_of`.
        kept: whether passes are `keeping`.
    """
    if kept:
        passes = keeping(pair, passes)
    shared = {id(runner): made for runner, made in zip(read_models(pair), passes, strict=True)}
    *drafts, target = shared.values()
    decisions = Decisions()
    hub: Hub[Any] = Hub([*drafts, decisions, target], decisions.begin)
    ask = hub.asker(decisions)

    def of_row(runner: Slot, row: int) -> Slot:
        if runner.bare.multiplies:
            return runner.same_around(runner.bare.fresh())
        made = shared[id(runner)]
        return runner.same_around(Slot(made, row, hub.asker(made)))

    return hub, [
        replace(
            pair,
            target=of_row(pair.target, row),
            drafts=tuple(of_row(draft, row) for draft in pair.drafts),
            policy=partial(decisions.policy, row=row, ask=ask),
            texts=passes[-1].slots,
        )
        for row in range(passes[-1].slots)
    ]
