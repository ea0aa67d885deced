"""Splits a pair into several pairs with shared passes, one for each text of a batch."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from specctl.models.passes.forward import Forward
from specctl.models.passes.tree_sight import grown_tree
from specctl.models.running.context import WORTH_KEEPING, common_beginning
from specctl.models.running.pair import Pair
from specctl.models.running.passes import Passes, Request
from specctl.models.running.slot import Slot
from specctl.policies import Setting
from specctl.text_engine.hub import Decisions, Hub

Texts = dict[int, list[int]]  # Ids by row


class SharedBeginnings(Passes):
    """`Passes` with prefix caching across slots: a cached prefix is copied from another slot, and only the rest is
    read.

    A row keeps the cache of its last text, running or ended, until the next text overwrites it, so this needs no extra
    memory. Token ids decide: only a common prefix is copied.

    Args:
        passes: the model's passes, used by this object alone and without state hooks, because copied tokens give no
            states.

    Attributes:
        kept: by row, the number of requested tokens that were copied instead of read.
    """

    def __init__(self, passes: Passes) -> None:
        self._passes, self.slots = passes, passes.slots
        self.like(passes)
        self._held: Texts = {row: [] for row in range(passes.slots)}
        self._rotated = [0] * passes.slots  # the ids in each row's cache
        self.kept = [0] * passes.slots
        self._read = [0] * passes.slots
        self._trees: list[Sequence[int]] = [()] * passes.slots  # the tokens of each row's last tree

    def copy(self, source: int, slot: int, start: int, stop: int) -> None:
        self._passes.copy(source, slot, start, stop)
        self._held[slot][start:] = self._held[source][start:stop]
        self._rotated[slot] = self._rotated[source]

    def forward(self, requests: Sequence[Request]) -> Sequence[Forward]:
        if not any(_spare(request) for request in requests):
            return self._run(requests)
        before = [self._read[request.slot] for request in requests]
        behind = [self._behind_what_is_held(request) for request in requests]
        if len(requests) > 1:
            behind = self._behind_what_is_led(behind)
        found = self._run(behind)
        for request, read in zip(requests, before, strict=True):
            self.kept[request.slot] += len(request.tokens) - (self._read[request.slot] - read)
        return found

    def _run(self, requests: Sequence[Request]) -> Sequence[Forward]:
        for request in requests:
            del self._held[request.slot][request.after :]  # a failed pass may have overwritten these
            self._rotated[request.slot] = request.rotated_as
        found = self._passes.forward(requests)
        for request in requests:
            slot, tokens = request.slot, request.tokens
            self._read[slot] += len(tokens)
            if request.parents is None:
                self._held[slot] += tokens
            else:
                self._trees[slot] = grown_tree(self._trees[slot], self._held[slot], tokens, request.before)
        return found

    def keep_path(self, slot: int, start: int, path: Sequence[int]) -> int:
        self._held[slot] += [self._trees[slot][place] for place in path[1:]]
        return self._passes.keep_path(slot, start, path)

    def _behind_what_is_held(self, request: Request) -> Request:
        """Copy the longest cached prefix of a request from any slot, and return a request for the rest."""
        if not (spare := _spare(request)):
            return request
        text = self._text(request)
        found = {
            row: common_beginning(held, text)
            for row, held in self._held.items()
            if self._rotated[row] == request.rotated_as
        }
        source = max(found, key=lambda row: (found[row], row == request.slot), default=request.slot)
        stop = min(found.get(source, 0), request.after + spare)
        if stop - request.after < WORTH_KEEPING:
            return request
        if source != request.slot:
            self.copy(source, request.slot, request.after, stop)
        return _from(request, stop)

    def _behind_what_is_led(self, requests: Sequence[Request]) -> list[Request]:
        """Group requests with a common prefix: one of each group reads the prefix, the others wait for its copy."""
        texts: Texts = {}  # requests that may read for others
        asked = {request.slot: request for request in requests}
        follow: list[tuple[int, int, int]] = []  # reader, waiter, and length of the common prefix
        first: dict[int, int] = {}  # how far each reader reads
        for request in requests:
            if not (spare := _spare(request)):
                continue
            text = self._text(request)
            alike = {row: other for row, other in texts.items() if asked[row].rotated_as == request.rotated_as}
            shared, leader = max(((common_beginning(other, text), row) for row, other in alike.items()), default=(0, 0))
            stop = min(shared, request.after + spare)
            if leader in asked and stop:
                stop = min(stop, asked[leader].after + _spare(asked[leader]))
            if stop - request.after < WORTH_KEEPING:
                texts[request.slot] = text
                continue
            follow.append((leader, request.slot, stop))
            first[leader] = max(first.get(leader, 0), stop)
        if led := [_up_to(asked[row], stop) for row, stop in first.items() if stop > asked[row].after]:
            self._run(led)
        behind = {row: max(stop, asked[row].after) for row, stop in first.items()}
        for leader, row, stop in follow:
            self.copy(leader, row, asked[row].after, stop)
            behind[row] = stop
        return [_from(request, behind.get(request.slot, request.after)) for request in requests]

    def _text(self, request: Request) -> list[int]:
        return [*self._held[request.slot][: request.after], *request.tokens]


def _spare(request: Request) -> int:
    """The number of a request's tokens that can be copied if cached; 0 if copying does not pay."""
    spare = len(request.tokens) - max(request.keep, 1)
    return spare if spare >= WORTH_KEEPING else 0


def _from(request: Request, start: int) -> Request:
    return request._replace(after=start, tokens=request.tokens[start - request.after :])


def _up_to(request: Request, stop: int) -> Request:
    return Request(
        request.slot, request.after, request.tokens[: stop - request.after], 0, rotated_as=request.rotated_as
    )


def why_alone(pair: Pair, *settings: Setting) -> str | None:
    """The reason why a pair writes one text at a time, to end a sentence; None if it can write several at once.

    Args:
        pair: loaded.
        settings: of its drafts.
    """
    if any(one.parallel for one in settings):
        return "a draft that writes while the target verifies has a thread of its own"
    if (why := pair.target.no_rows) is not None:
        return f"the target runs on {pair.target.engine}, and {why}"
    for draft in pair.drafts:
        if not draft.bare.multiplies and draft.no_rows is not None:
            return f"a draft runs on {draft.engine}, and {draft.no_rows}"
    return None


def read_models(pair: Pair) -> list[Slot]:
    """The runners whose passes the texts of a batch share, in order of dependence: drafts first, the target last."""
    return [runner for runner in (*reversed(pair.drafts), pair.target) if not runner.bare.multiplies]


def passes_of(pair: Pair, rows: int) -> list[Passes]:
    """Passes of each of the `read_models` over ``rows`` texts, at least 2. `why_alone` must be None for the pair."""
    return [runner.over(rows) for runner in read_models(pair)]


def keeping(pair: Pair, passes: Sequence[Passes]) -> list[Passes]:
    """Add prefix caching across rows to passes: see `SharedBeginnings`.

    Nothing else may use the passes then. Passes whose states a draft head reads stay as they are.
    """
    if any(draft.reads_states for draft in pair.drafts):
        return list(passes)
    return [SharedBeginnings(made) for made in passes]


def split(pair: Pair, passes: Sequence[Passes], *, kept: bool = False) -> tuple[Hub[Any], list[Pair]]:
    """A hub, and for each row a pair over it: the same models with the row's own caches.

    Args:
        pair: a pair for which `why_alone` returns None.
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
            return runner.transformed(runner.bare.fresh())
        made = shared[id(runner)]
        return runner.transformed(Slot(made, row, hub.asker(made)))

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
