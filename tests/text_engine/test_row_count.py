"""How many texts are written at once: as many as passes are made faster by, and memory has room for."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specctl.models.passes.forward import Forward
from specctl.models.running.pair import Pair
from specctl.models.running.passes import Request
from specctl.models.running.threads import Threads
from specctl.text_engine import row_count
from specctl.text_engine.row_count import MOST, chosen_passes, fastest_passes, most_rows, worthwhile
from tests.support.toys import TableRunner, ToldPasses, table

LONG = 1 << 40


class Timed(TableRunner):
    """A runner whose pass of n texts takes ``seconds[n]``, and whose passes take ``making`` to build."""

    def __init__(self, clock: list[float], seconds: dict[int, float], making: float = 0.0) -> None:
        super().__init__(table(1, vocabulary=200))
        self.context = 512
        self.clock, self.seconds, self.making = clock, seconds, making
        self.made: list[int] = []
        self.passes: dict[int, int] = {}
        self.widest = 0

    def extend(self, tokens: Sequence[int], keep: int, *, hidden: bool = False) -> Forward:
        self.clock[0] += self.seconds[1]
        self.widest = max(self.widest, len(tokens))
        return super().extend(tokens, keep, hidden=hidden)

    def over(self, count: int) -> Any:
        self.made.append(count)
        self.clock[0] += self.making
        read = [0] * count

        def run(requests: Sequence[Request]) -> list[Forward]:
            assert [request.slot for request in requests] == list(range(len(requests)))
            for request in requests:
                assert request.after <= read[request.slot], "tokens that no pass has read"
                read[request.slot] = request.after + len(request.tokens)
            self.clock[0] += self.seconds[count]
            self.passes[count] = self.passes.get(count, 0) + 1
            return [Forward(torch.zeros(request.keep, 3)) for request in requests]

        def copy(source: int, row: int, start: int, stop: int) -> None:
            assert start <= read[row]
            assert stop <= read[source]
            read[row] = stop

        return ToldPasses(count, run, copy)


def pair_of(
    monkeypatch: pytest.MonkeyPatch,
    seconds: dict[int, float],
    making: float = 0.0,
    drafting: dict[int, float] | None = None,
) -> tuple[Pair, Timed]:
    clock = [0.0]
    monkeypatch.setattr(row_count, "process_time", lambda: clock[0])
    target = Timed(clock, seconds, making)
    drafts = () if drafting is None else (Timed(clock, drafting),)
    return Pair(target, drafts, None, frozenset(), 512, (), threads=Threads(1, 1, "so"), vocabulary=200), target  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("seconds", "most", "tried", "chosen"),
    [
        ({1: 1.0, 2: 2.0, 4: 4.0, 8: 8.0, 16: 16.0}, MOST, [16, 8, 4, 2], None),
        ({1: 1.0, 2: 1.9, 4: 3.4, 8: 7.0, 16: 15.0}, MOST, [16, 8, 4, 2], None),
        ({1: 1.0, 4: 3.0, 8: 6.5, 16: 15.0}, MOST, [16, 8, 4], 4),
        ({1: 1.0, 4: 1.5, 8: 2.9}, 7, [4], 4),
        ({1: 1.0, 2: 1.1, 4: 1.5}, 3, [2], 2),
        ({1: 1.0}, 1, [], None),
        ({1: 1.0, 16: 3.6, 32: 6.7}, MOST, [16, 32], 16),
        ({1: 1.0, 8: 2.0, 16: 15.0}, MOST, [16, 8], 8),
        (dict.fromkeys((1, 16, 32, 64), 1.0), MOST, [16, 32, 64], 64),
    ],
)
def test_more_rows_are_tried_as_long_as_twice_as_many_bring_a_tenth(
    monkeypatch: pytest.MonkeyPatch, seconds: dict[int, float], most: int, tried: list[int], chosen: int | None
) -> None:
    pair, target = pair_of(monkeypatch, seconds)
    found = fastest_passes(pair, most, LONG, 1)
    assert (None if found is None else found[-1].slots) == chosen
    assert target.made == tried
    assert target.length == 0, "the next text begins at its beginning"


@pytest.mark.parametrize(("step", "passes"), [(0.1, 7), (0.2, 1)])
def test_drafts_are_tried_with_more_rows_where_they_pay_with_fewer(
    monkeypatch: pytest.MonkeyPatch, step: float, passes: int
) -> None:
    """A round of three draft tokens stands for one that writes two, so a step may take a third of a pass."""
    pair, _ = pair_of(monkeypatch, {1: 1.0, 16: 1.0, 32: 1.0}, drafting={1: 0.1, 16: 2 * step, 32: step})
    fastest_passes(pair, 32, LONG, 1)
    draft = pair.drafts[0]
    assert isinstance(draft, Timed)
    assert draft.passes[32] == passes


def test_more_rows_are_not_made_for_a_rest_that_they_cannot_pay_for(monkeypatch: pytest.MonkeyPatch) -> None:
    pair, target = pair_of(monkeypatch, dict.fromkeys((1, 16, 32), 1.0), making=10.0)
    # Sixteen at once write six texts of 100 tokens in 38 seconds and what the end takes, of which 32 could save half.
    # To make and to time them would take 1.4 times the 15 that sixteen took.
    assert fastest_passes(pair, 32, 6, 100)[-1].slots == 16  # type: ignore[index]
    assert target.made == [16]
    assert fastest_passes(pair, 32, 16, 100)[-1].slots == 32  # type: ignore[index]


def test_places_that_stand_empty_at_the_end_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    for texts, chosen in ((1000, 32), (64, 16)):
        pair, _ = pair_of(monkeypatch, {1: 1.0, 16: 2.0, 32: 3.5, 64: 7.0})
        assert fastest_passes(pair, MOST, texts, 1000)[-1].slots == chosen  # type: ignore[index]


@pytest.mark.parametrize(("limit", "held"), [(10, 21), (60, 46), (1 << 20, 144)])
def test_texts_hold_half_of_what_they_may_write_while_they_are_timed(
    monkeypatch: pytest.MonkeyPatch, limit: int, held: int
) -> None:
    pair, target = pair_of(monkeypatch, {1: 1.0, 16: 1.0})
    fastest_passes(pair, 16, 100, limit)
    assert target.widest == held


def test_passes_of_one_shape_do_not_follow_from_how_many_texts_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    pair, target = pair_of(monkeypatch, {1: 1.0})
    target.no_rows = None
    assert chosen_passes(pair, 4, 2, 100)[-1].slots == 2  # type: ignore[index]
    target.fixed_width = 16
    assert chosen_passes(pair, 4, 2, 100)[-1].slots == 4  # type: ignore[index]
    assert chosen_passes(pair, "auto", 9, 100) is None, "it would follow from times"


def test_few_tokens_are_not_worth_a_try(monkeypatch: pytest.MonkeyPatch) -> None:
    pair, _ = pair_of(monkeypatch, {1: 0.5})
    assert not worthwhile(pair, 7)
    assert worthwhile(pair, 8)
    assert pair.target.length == 0, "the next text begins at its beginning"


def test_memory_that_runs_out_ends_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    pair, target = pair_of(monkeypatch, dict.fromkeys((1, 2, 4), 1.0))
    make = target.over

    def over(count: int) -> Any:
        if count > 2:
            raise MemoryError
        return make(count)

    monkeypatch.setattr(target, "over", over)
    assert fastest_passes(pair, 16, LONG, 1)[-1].slots == 2  # type: ignore[index]
    assert target.length == 0
    monkeypatch.setattr(target, "over", lambda _: make(0 / 0))
    with pytest.raises(ZeroDivisionError):
        fastest_passes(pair, 16, LONG, 1)


def test_caches_take_a_part_of_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    pair, target = pair_of(monkeypatch, {})
    memory = SimpleNamespace(name="cpu", free=100_000)
    monkeypatch.setattr(row_count, "device_memory", lambda asked: [memory] if asked == {"cpu"} else [])
    assert most_rows(pair, 8) == MOST, "nothing is known of its cache"
    target.token_bytes = 20  # of 512 tokens, the context
    assert most_rows(pair, 8) == 7
    memory.free = 0
    assert most_rows(pair, 8) == 1
