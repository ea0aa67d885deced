"""A pair as several pairs, one for each text of a batch, whose passes are made together."""

from dataclasses import replace
from functools import partial
from typing import Any

from specctl.batching.decisions import Decisions
from specctl.batching.hub import Hub
from specctl.batching.read_passes import ReadPasses
from specctl.batching.row_runner import RowRunner
from specctl.models.running.lookup_runner import LookupRunner
from specctl.models.running.pair import Pair
from specctl.models.running.runner import Runner


def why_alone(pair: Pair) -> str | None:
    """Why a pair writes one text at a time, as the end of a sentence; None if it can write several at once."""
    if (why := pair.target.no_rows) is not None:
        return f"the target runs on {pair.target.engine}, and {why}"
    for draft in pair.drafts:
        if isinstance(draft, LookupRunner):
            continue
        if draft.reads_states:
            return "a draft head reads the states of one text at a time"
        if draft.no_rows is not None:
            return f"a draft runs on {draft.engine}, and {draft.no_rows}"
    return None


def split(pair: Pair, rows: int) -> tuple[Hub[Any], list[Pair]]:
    """A hub, and for each row a pair over it: the same models with caches of the row's own.

    Args:
        pair: of which `why_alone` says nothing.
        rows: how many, at least 2.
    """
    runners = [*reversed(pair.drafts), pair.target]  # who waits for no one comes first
    read = [runner for runner in runners if not isinstance(runner, LookupRunner)]
    passes = {id(runner): ReadPasses(runner.rows(rows)) for runner in read}
    *drafts, target = passes.values()
    decisions = Decisions()
    hub: Hub[Any] = Hub([*drafts, decisions, target])
    ask = hub.asker(decisions)

    def of_row(runner: Runner, row: int) -> Runner:
        if isinstance(runner, LookupRunner):
            return runner.fresh()
        return runner.same_around(RowRunner(runner.bare, row, hub.asker(passes[id(runner)])))

    return hub, [
        replace(
            pair,
            target=of_row(pair.target, row),
            drafts=tuple(of_row(draft, row) for draft in pair.drafts),
            policy=partial(decisions.policy, row=row, ask=ask),
        )
        for row in range(rows)
    ]
