"""A pair as several pairs, one for each text of a batch, over passes that they share."""

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
    """`Passes` that copy the keys and values of a beginning that some slot holds, and read what comes after it.

    A row holds its last text until another one takes its place, whether that is still being written or has ended, so
    what is kept takes no memory of its own. Ids decide: nothing is taken from a text but what the new one says too.

    Args:
        passes: of the model, exclusive to this object and without state hooks: tokens that are not read have no states.

    Attributes:
        kept: by row, tokens that were asked for and not read.
    """

    def __init__(self, passes: Passes) -> None:
        self._passes, self.slots = passes, passes.slots
        self.like(passes)
        self._held: Texts = {row: [] for row in range(passes.slots)}
        self._rotated = [0] * passes.slots  # how what each row holds was
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
            del self._held[request.slot][request.after :]  # a pass that fails may have written there
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
        """A request for what follows the longest beginning that any slot holds, which its own slot then holds too."""
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
        """Requests for what follows the beginnings that several share; one of each group reads the beginning."""
        texts: Texts = {}  # of those that may read for others
        asked = {request.slot: request for request in requests}
        follow: list[tuple[int, int, int]] = []  # who reads, who waits, and up to where
        first: dict[int, int] = {}  # up to where each of the former reads
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
    """The number of a request's tokens that need not be read if they are held; 0 where that does not pay."""
    spare = len(request.tokens) - max(request.keep, 1)
    return spare if spare >= WORTH_KEEPING else 0


def _from(request: Request, start: int) -> Request:
    return request._replace(after=start, tokens=request.tokens[start - request.after :])


def _up_to(request: Request, stop: int) -> Request:
    return Request(
        request.slot, request.after, request.tokens[: stop - request.after], 0, rotated_as=request.rotated_as
    )


def why_alone(pair: Pair, *settings: Setting) -> str | None:
    """Why a pair writes one text at a time, as the end of a sentence; None if it can write several at once.

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
    """The runners whose passes texts of a batch share; who waits for no one comes first, the target last."""
    return [runner for runner in (*reversed(pair.drafts), pair.target) if not runner.bare.multiplies]


def passes_of(pair: Pair, rows: int) -> list[Passes]:
    """Passes of each of the `read_models` over ``rows`` texts, at least 2; `why_alone` is None for the pair."""
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
        pair: one whose `why_alone` is None.
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
