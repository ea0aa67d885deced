"""Several texts at once: each is what it would be alone, whatever its neighbours are and whatever becomes of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from math import prod
from typing import Any

import pytest
import torch

from specctl.decoding.draft import Drafter
from specctl.decoding.drafters import ModelDrafter
from specctl.decoding.hierarchy import PreVerifiedDrafter
from specctl.decoding.loop import decode
from specctl.decoding.round import prefill
from specctl.decoding.sampling import Sampling
from specctl.models.passes.forward import Forward
from specctl.models.passes.preparation_time import working_seconds
from specctl.models.running.passes import Facts, Passes, Request
from specctl.models.running.slot import Slot
from specctl.policies.published import Constant, Svip
from specctl.text_engine.hub import Hub
from tests.support.enumeration import largest_difference, law_of, walk
from tests.support.toys import EOS, TableRunner, law, related_table, table

PROMPTS = ([1, 2], [2, 1, 2], [2])
GREEDY, PLAIN = Sampling(temperature=0.0), Sampling(temperature=1.0)
TARGET = table(8, eos_logit=-0.5, spread=1.0, vocabulary=3)
DRAFT = related_table(TARGET, seed=9, noise=0.8)
MIDDLE = 0.5 * (TARGET + DRAFT)
TABLES = (DRAFT, MIDDLE, TARGET)
ENDS = frozenset({EOS})


class TableRows(Passes):
    """`Passes` over a table, which checks that no text asks twice of one pass."""

    def __init__(self, table: torch.Tensor, rows: int, fails: Callable[[Request], bool] = lambda _: False) -> None:
        self.slots, self.context, self.device = rows, 1 << 31, torch.device("cpu")
        self.table = table
        self.passes: list[list[int]] = []
        self._texts: list[list[int]] = [[] for _ in range(rows)]
        self._fails = fails

    def forward(self, requests: Sequence[Request]) -> list[Forward]:
        self.passes.append([request.slot for request in requests])
        assert len(set(self.passes[-1])) == len(requests), "a text asks once"
        if any(map(self._fails, requests)):
            raise RuntimeError("no memory for this text")
        found = []
        for request in requests:
            text = self._texts[request.slot]
            assert request.after <= len(text), "what was asked for follows what is cached"
            text[request.after :] = request.tokens
            window = [self.table.shape[-1], *text][len(text) - request.keep :]
            rows = [self.table[pair] for pair in pairwise(window)]
            found.append(Forward(torch.stack(rows) if rows else self.table[0, 0, :0].view(0, self.table.shape[-1])))
        return found


Row = Callable[[Callable[[torch.Tensor], Any]], "Drafter | None"]
"""Makes a row's drafter, given what makes a runner over a table."""


def constant(runner: Callable[[torch.Tensor], Any]) -> Drafter:
    return ModelDrafter(runner(DRAFT), Constant(draft_length=1))


def svip(runner: Callable[[torch.Tensor], Any]) -> Drafter:
    return ModelDrafter(runner(DRAFT), Svip(threshold=0.8, max_draft=3))


def hierarchy(runner: Callable[[torch.Tensor], Any]) -> Drafter:
    return PreVerifiedDrafter(constant(runner), runner(MIDDLE), Constant(draft_length=2))


def alone(_: Callable[[torch.Tensor], Any]) -> None:
    return None


def written(
    rows: Sequence[Row],
    limits: Sequence[int],
    sampling: Sampling,
    fails: Callable[[Request], bool] = lambda _: False,
) -> tuple[dict[int, tuple[int, ...]], list[TableRows]]:
    """What each row writes after its prompt in a batch, and the passes, of which the target's fail as told."""
    passes = [TableRows(table, len(rows), fails if table is TARGET else lambda _: False) for table in TABLES]
    hub: Hub[tuple[int, ...]] = Hub(passes)

    def write(row: int) -> tuple[int, ...]:
        def runner(table: torch.Tensor) -> Slot:
            number = next(number for number, each in enumerate(TABLES) if each is table)
            return Slot(passes[number], row, hub.asker(passes[number]))

        target, drafter = runner(TARGET), rows[row](runner)
        tokens: list[int] = []
        try:
            prefill(target, drafter, PROMPTS[row])
            for played in decode(target, drafter, PROMPTS[row], limits[row], sampling, ENDS, None):
                tokens += played.emitted
        except RuntimeError:
            return (-1,)
        return tuple(tokens)

    for row in range(len(rows)):
        hub.begin(row, lambda row=row: write(row))  # type: ignore[misc]
    found: dict[int, tuple[int, ...]] = {}
    while hub.busy:
        found |= dict(hub.advance())
    return found | dict(hub.advance()), passes


def greedy_alone(row: int, length: int) -> tuple[int, ...]:
    rounds = decode(TableRunner(TARGET), None, PROMPTS[row], length, GREEDY, ENDS, None)
    return tuple(token for played in rounds for token in played.emitted)


@pytest.mark.parametrize("rows", [(constant, svip, alone), (alone, hierarchy, constant)])
def test_three_texts_of_a_batch_have_the_law_of_the_target_each(rows: Sequence[Row]) -> None:
    limits = (2, 2, 1)

    def play() -> tuple[tuple[int, ...], ...]:
        found, _ = written(rows, limits, PLAIN)
        return tuple(found[row] for row in range(3))

    each = [law(TARGET, prompt, limit, PLAIN, ENDS) for prompt, limit in zip(PROMPTS, limits, strict=True)]
    expected = {texts: prod(one[text] for one, text in zip(each, texts, strict=True)) for texts in product(*each)}
    assert largest_difference(law_of(walk(play)), expected) < 3e-7


@pytest.mark.usefixtures("inference_mode")
@pytest.mark.parametrize("rows", [(constant, svip, hierarchy), (hierarchy, alone, svip), (alone, alone, alone)])
def test_greedy_texts_are_those_of_each_alone(rows: Sequence[Row]) -> None:
    found, passes = written(rows, [12] * 3, GREEDY)
    assert found == {row: greedy_alone(row, 12) for row in range(3)}
    assert any(len(asked) == 3 for asked in passes[-1].passes), "a verification waits for all that draft"


@pytest.mark.usefixtures("inference_mode")
def test_a_text_over_which_a_pass_fails_ends_alone() -> None:
    found, _ = written(
        (constant, svip, constant), [12] * 3, GREEDY, lambda request: request.slot == 1 and request.after > 3
    )
    assert found == {0: greedy_alone(0, 12), 1: (-1,), 2: greedy_alone(2, 12)}


@pytest.mark.usefixtures("inference_mode")
def test_an_error_of_a_texts_own_code_reaches_who_runs_the_batch() -> None:
    passes = TableRows(TARGET, 2)
    hub: Hub[int] = Hub([passes])

    def broken() -> int:
        Slot(passes, 1, hub.asker(passes)).extend([1], keep=1)
        raise KeyError("its own")

    hub.begin(1, broken)
    with pytest.raises(KeyError, match="its own"):
        hub.advance()
    assert not hub.busy


@pytest.mark.usefixtures("inference_mode")
def test_texts_that_are_given_up_clean_up_and_leave_their_rows_free() -> None:
    passes = TableRows(TARGET, 2)
    hub: Hub[int] = Hub([passes])
    left: list[int] = []

    def endless(row: int) -> int:
        runner = Slot(passes, row, hub.asker(passes))
        try:
            while True:
                runner.extend([1], keep=1)
        finally:
            left.append(row)

    for row in range(2):
        hub.begin(row, lambda row=row: endless(row))  # type: ignore[misc]
    hub.advance()
    hub.close()
    assert sorted(left) == [0, 1]
    assert not hub.busy
    assert hub.advance() == []


@pytest.mark.usefixtures("inference_mode")
def test_clocks_of_texts_add_up_to_passes_and_own_work(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("specctl.models.passes.preparation_time.perf_counter", lambda: now)

    class Slow(TableRows):
        def forward(self, requests: Sequence[Request]) -> list[Forward]:
            nonlocal now
            now += 12.0
            return super().forward(requests)

    passes = Slow(TARGET, 2)
    hub: Hub[list[float]] = Hub([passes])

    def work(row: int) -> list[float]:
        nonlocal now
        runner, seen = Slot(passes, row, hub.asker(passes)), []
        for _ in range(2):
            began = working_seconds()
            now += 1.0 + row
            runner.extend([1] * (1 + 2 * row), keep=1)
            seen.append(working_seconds() - began)
        return seen

    outside = working_seconds()
    for row in range(2):
        hub.begin(row, lambda row=row: work(row))  # type: ignore[misc]
    found: dict[int, list[float]] = {}
    while hub.busy:
        found |= dict(hub.advance())
    # A pass of 12 seconds over 1 and 3 tokens.
    assert found == {0: [1.0 + 3.0] * 2, 1: [2.0 + 9.0] * 2}
    assert working_seconds() - outside == pytest.approx(now), "the run's own clock does not notice"


@pytest.mark.usefixtures("inference_mode")
def test_a_long_prompt_is_read_in_pieces() -> None:
    asked: list[Request] = []

    def ask(request: Request) -> Forward:
        asked.append(request)
        return Forward(torch.zeros(request.keep, 3))

    runner = Slot(TableRows(TARGET, 1), 0, ask)
    assert runner.extend([1] * (2 * Facts.piece + 3), keep=5).logits.shape == (5, 3)
    assert [(request.after, len(request.tokens), request.keep) for request in asked] == [
        (0, Facts.piece, 0),
        (Facts.piece, Facts.piece, 2),
        (2 * Facts.piece, 3, 3),
    ]
    runner.rollback(7)
    runner.rollback(9)
    assert runner.length == 7


@dataclass(frozen=True)
class Bid:
    row: int
    size: float = 1.0


class Auction:
    """A decision about all that wait, of which one is told an error."""

    def __init__(self) -> None:
        self.held: list[list[int]] = []

    def run(self, bids: Sequence[Bid], /) -> list[str | Exception]:
        self.held.append([bid.row for bid in bids])
        best = max(bid.row for bid in bids)
        return [ValueError("outbid") if bid.row == 0 else str(best) for bid in bids]


@pytest.mark.usefixtures("inference_mode")
def test_a_decision_about_all_texts_has_its_place_in_the_order() -> None:
    first, decision, last = TableRows(TARGET, 3), Auction(), TableRows(TARGET, 3)
    hub: Hub[str] = Hub([first, decision, last])

    def work(row: int) -> str:
        passes = last if row == 2 else first
        Slot(passes, row, hub.asker(passes)).extend([1], keep=1)
        try:
            return hub.asker(decision)(Bid(row))
        except ValueError as error:
            return str(error)

    for row in range(3):
        hub.begin(row, lambda row=row: work(row))  # type: ignore[misc]
    found: dict[int, str] = {}
    while hub.busy:
        found |= dict(hub.advance())
    assert found == {0: "outbid", 1: "1", 2: "2"}
    assert decision.held == [[0, 1], [2]], "before the last pass, after the first"
