"""What a text of a batch is given is what a pass over it alone gives."""

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from specctl.models.onnx import passes as passes_module
from specctl.models.onnx.graph import HostMemory
from specctl.models.onnx.passes import AGAIN, RISING, WIDEST, OnnxPasses, PassWays
from specctl.models.running.passes import Request
from specctl.models.running.slot import Slot
from tests.support.few_tokens import trimmed
from tests.support.onnx_models import needs_onnx, onnx_runner
from tests.support.toys import FAMILIES, random_model

pytestmark = [needs_onnx, pytest.mark.usefixtures("inference_mode")]
VOCABULARY, ROWS = 60, 3
ROUNDED = {"gpt-neox"}
"""Families with a function that onnxruntime computes otherwise at the end of a row of numbers, wherever that is; all
others agree bit for bit."""


def runner_of(family: str, quantize: str | None = None) -> Slot:
    runner = onnx_runner(random_model.__wrapped__(family), VOCABULARY, quantize)
    assert runner is not None
    return runner


@pytest.mark.parametrize("width", [None, 16], ids=["packed", "apart"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.representatives("llama-packed", "llama-apart")
def test_rows_are_those_of_each_text_alone(family: str, width: int | None) -> None:
    one = runner_of(family)
    assert one.no_rows is None
    passes, alone = one.over(ROWS, width), [one.fresh() for _ in range(ROWS)]
    draws = random.Random(5)
    for step in range(25):
        requests = []
        expected = {}
        for row in draws.sample(range(ROWS), draws.randint(1, ROWS)):
            after = max(0, alone[row].length - draws.randint(0, 3))
            tokens = [draws.randrange(VOCABULARY) for _ in range(150 if step == 12 and row else draws.randint(1, 6))]
            request = Request(row, after, tokens, draws.randint(0, len(tokens)), hidden=draws.random() < 0.3)
            alone[row].rollback(after)
            requests.append(request)
            expected[row] = alone[row].extend(tokens, request.keep, hidden=request.hidden)
        for request, found in zip(requests, passes.run(requests), strict=True):
            wanted = expected[request.slot]
            error = 1e-5 if family in ROUNDED and width is None else 0.0
            np.testing.assert_allclose(found.rows, np.asarray(wanted.rows)[: request.keep], rtol=0, atol=error)
            assert (found.hidden is None) == (not request.hidden)
            if found.hidden is not None and wanted.hidden is not None:
                np.testing.assert_allclose(found.hidden, wanted.hidden, rtol=0, atol=error)


def test_few_texts_of_many_are_read_alike_however_that_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """Together with fillers, in a graph for fewer, or one after the other."""
    draws, rows = random.Random(7), 9
    monkeypatch.setattr(passes_module, "SIZE_WORTH", 2)
    monkeypatch.setattr(passes_module, "LATELY", 2)
    monkeypatch.setattr(PassWays, "apart", lambda *_: draws.random() < 0.2)
    one = runner_of("llama")
    passes, alone = one.over(rows), [one.fresh() for _ in range(rows)]
    for _ in range(60):
        requests, expected = [], []
        for row in draws.sample(range(rows), draws.choice((1, 2, 3, 4, 5, 8, 9))):
            after = max(0, alone[row].length - draws.randint(0, 2))
            tokens = [draws.randrange(VOCABULARY) for _ in range(draws.randint(1, 4))]
            alone[row].rollback(after)
            requests.append(Request(row, after, tokens, len(tokens), hidden=draws.random() < 0.3))
            expected.append(alone[row].extend(tokens, len(tokens), hidden=requests[-1].hidden))
        for found, wanted in zip(passes.run(requests), expected, strict=True):
            np.testing.assert_array_equal(found.rows, np.asarray(wanted.rows))
            if found.hidden is not None and wanted.hidden is not None:
                np.testing.assert_array_equal(found.hidden, wanted.hidden)
    assert sorted(passes._sessions) == [4, 8, 9]
    assert 4 < len(passes._bound) <= passes_module.MOST_BOUND


@pytest.mark.parametrize("rows", [1, ROWS])
def test_where_memory_runs_out_all_goes_on_in_the_buffers_that_are_there(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(passes_module, "CAPACITY", 16)
    one = runner_of("llama")
    passes, alone = one.over(rows) if rows > 1 else one.passes, one.fresh()
    first, second, rest = list(range(10)), list(range(10, 15)), list(range(15, 40))
    passes.run([Request(0, 0, first, 0)])
    alone.extend(first, 0)
    made: list[object] = []
    zeros = HostMemory.zeros

    def full(memory: HostMemory, shape: Sequence[int], dtype: str) -> npt.NDArray[Any]:
        if made:
            raise MemoryError
        made.append(shape)
        return zeros(memory, shape, dtype)

    with monkeypatch.context() as patched:
        patched.setattr(HostMemory, "zeros", full)
        with pytest.raises(MemoryError):
            passes.run([Request(0, 10, [*second, *rest], 1)])
    assert isinstance(passes, OnnxPasses)
    assert passes.capacity == 16, "a pass would write beyond the buffers"
    for after, tokens in ((10, second), (15, rest)):
        (found,) = passes.run([Request(0, after, tokens, 1)])
        np.testing.assert_array_equal(found.rows, np.asarray(alone.extend(tokens, 1).rows))


def test_where_memory_for_logits_runs_out_the_next_pass_of_that_size_asks_for_it_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = runner_of("llama")
    passes, alone = one.over(ROWS), [one.fresh() for _ in range(ROWS)]

    def requests(texts: list[list[int]], keep: int) -> list[Request]:
        return [Request(row, alone[row].length, tokens, keep) for row, tokens in enumerate(texts)]

    def full(*_: object) -> npt.NDArray[Any]:
        raise MemoryError

    first, second = [[1, 2], [3], [4]], [[5, 6], [7, 8], [9, 10]]
    passes.run(requests(first, 1))
    for row, tokens in enumerate(first):
        alone[row].extend(tokens, 1)
    with monkeypatch.context() as patched:
        patched.setattr(HostMemory, "zeros", full)
        with pytest.raises(MemoryError):
            passes.run(requests(second, 2))
    for row, found in enumerate(passes.run(requests(second, 2))):
        np.testing.assert_array_equal(found.rows, np.asarray(alone[row].extend(second[row], 2).rows))


def counted_steps(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether passes are made by the graph for one token of each text, pass by pass."""
    found: list[bool] = []
    asked = OnnxPasses._steps_together

    def counted(passes: OnnxPasses, chosen: tuple[int, ...], tokens: int) -> bool:
        found.append(asked(passes, chosen, tokens))
        return found[-1]

    monkeypatch.setattr(OnnxPasses, "_steps_together", counted)
    return found


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.representatives("llama")
def test_a_token_of_each_text_is_read_alike_by_a_graph_of_its_own(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of texts of all lengths, behind prompts, drafts and what was taken from another text, in buffers that grow."""
    draws = random.Random(11)
    monkeypatch.setattr(passes_module, "CAPACITY", 16)
    steps = counted_steps(monkeypatch)
    one = runner_of(family)
    assert one.passes.graph.steps is None, "it is opened when it is wanted"
    passes, alone = one.over(ROWS), [one.fresh() for _ in range(ROWS)]
    lengths = []
    for step in range(24):
        requests, expected = [], []
        for row in range(ROWS) if step else (0,):
            count = draws.randint(1, 9) if step in (0, 1, 9) else 1
            tokens = [draws.randrange(VOCABULARY) for _ in range(count)]
            if step == 15 and row == 2:  # as a text that began like another one
                alone[2].rollback(0)
                alone[2].extend(held := [7, 8, 9, 10], 0)
                passes.run([Request(1, 0, held, 0)])
                alone[1].rollback(0)
                alone[1].extend(held, 0)
                requests[1], expected[1] = Request(1, 4, tokens, 1), alone[1].extend(tokens, 1)
                passes.copy(1, 2, 0, 4)
            requests.append(Request(row, alone[row].length, tokens, 1))
            expected.append(alone[row].extend(tokens, 1))
        for found, wanted in zip(passes.run(requests), expected, strict=True):
            error = 1e-5 if family in ROUNDED else 0.0
            np.testing.assert_allclose(found.rows, np.asarray(wanted.rows), rtol=0, atol=error)
        lengths.append(len({each.after for each in requests}))
    assert max(lengths) == ROWS
    assert passes.capacity > 32
    assert steps.count(True) == 21
    session, other = one.passes.graph.steps, one.over(2)
    assert session is not None
    other.run([Request(row, 0, [1], 1) for row in range(2)])
    assert steps.count(True) == 22
    assert one.passes.graph.steps is session, "it is opened once"


def test_texts_that_do_not_lie_side_by_side_have_a_node_each(monkeypatch: pytest.MonkeyPatch) -> None:
    one = runner_of("llama")
    passes = one.over(9)
    monkeypatch.setattr(passes_module, "SIZE_WORTH", 0)
    monkeypatch.setattr(passes_module, "LATELY", 1)
    monkeypatch.setattr(PassWays, "apart", lambda *_: False)
    steps = counted_steps(monkeypatch)
    for rows, expected in ((range(9), 1), (range(3, 7), 2), ((0, 2, 4, 6), 2), (range(4), 3)):
        passes.run([Request(row, 0, [1], 1) for row in rows])
        assert steps.count(True) == expected


def test_a_large_graph_or_one_for_fixed_shapes_is_opened_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes_module, "SIZE_WORTH", 0)
    one = runner_of("llama")
    fixed = one.over(5, 16)
    monkeypatch.setattr(passes_module, "SMALL", 0)
    for passes in (fixed, one.over(5)):
        for _ in range(3):
            passes.run([Request(row, 0, [1], 1) for row in range(2)])
        assert sorted(passes._sessions) == [5]
        assert one.passes.graph.steps is None


@pytest.mark.slow
def test_a_graph_for_trees_reads_one_text() -> None:
    trees = onnx_runner(random_model.__wrapped__("qwen3"), VOCABULARY, trees=True)
    assert trees is not None
    assert trees.no_rows == "its graph reads trees"


@pytest.mark.slow
def test_a_draft_of_few_tokens_is_read_with_others() -> None:
    one = onnx_runner(trimmed("llama", range(0, 64, 2)), VOCABULARY)
    assert one is not None
    (found,) = one.over(2).run([Request(1, 0, [1, 5, 9], 2)])
    wanted = one.extend([1, 5, 9], 2)
    assert found.vocabulary is one.draft_vocabulary is not None
    assert Slot(one.over(2), 1, lambda _: found).draft_vocabulary is one.draft_vocabulary
    np.testing.assert_array_equal(found.columns, np.asarray(wanted.columns))
    assert found.rows.shape == (2, 64), "as many as the draft's target has"


@pytest.fixture
def ways() -> PassWays:
    """Of 16 sequences: a pass over all takes 7 ms, one over a single one 1.3."""
    found = PassWays(16)
    assert not found.apart([1, 1], 14), "a pass over all is timed first"
    found.took(16, 7e-3, alone=False)
    assert found.apart([1, 1], 14), "and then one over a single one"
    found.took(1, 1.3e-3, alone=True)
    return found


def test_as_many_as_take_less_time_than_all_have_passes_of_their_own(ways: PassWays) -> None:
    assert [ways.apart([1] * count, 16 - count) for count in range(1, 10)] == [False, *[True] * 4, *[False] * 4]


def test_more_than_half_of_all_and_prompts_are_read_together(ways: PassWays) -> None:
    ways.took(1, 1e-6, alone=True)
    assert ways.apart([1] * 8, 8)
    assert not ways.apart([1] * 9, 7)
    assert ways.apart([WIDEST, 1], 14)
    assert not ways.apart([WIDEST + 1, 1], 14)


def test_times_are_those_of_the_nearest_number_of_tokens(ways: PassWays) -> None:
    ways.took(5, 4e-3, alone=True)
    assert not ways.apart([5, 4], 14)
    assert ways.apart([2, 1], 14)
    ways.took(23, 9e-3, alone=False)
    assert ways.apart([5, 4], 14)
    ways.took(WIDEST + 1, 1.0, alone=True)
    ways.took(WIDEST * 16 + 1, 1.0, alone=False)
    assert ways.apart([5, 4], 14), "prompts tell nothing"


def test_a_slow_pass_is_soon_forgotten_and_a_slower_machine_noticed(ways: PassWays) -> None:
    ways.took(1, 1.0, alone=True)
    assert ways.apart([1, 1], 14)
    for _ in range(100):
        ways.took(1, 4e-3, alone=True)
    assert not ways.apart([1, 1], 14)
    assert 1.3e-3 * RISING**100 > 4e-3


def test_the_other_way_is_timed_again_now_and_then(ways: PassWays) -> None:
    found = [ways.apart([1, 1], 14) for _ in range(2 * AGAIN)]
    assert [place for place, apart in enumerate(found, start=1) if not apart] == [AGAIN, 2 * AGAIN]


def test_a_graph_for_fewer_sequences_is_tried_and_has_fewer_fillers(ways: PassWays) -> None:
    assert not ways.apart([1, 1], 2)
    ways.took(4, 2e-3, alone=False)
    assert not ways.apart([1, 1], 2)
    assert ways.apart([1, 1], 14)
