"""What a text of a batch is given is what a pass over it alone gives."""

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from specctl.models.onnx import passes as passes_module
from specctl.models.onnx.graph import HostMemory
from specctl.models.onnx.passes import OnnxPasses
from specctl.models.running.passes import Request
from specctl.models.running.slot import Slot
from tests.support.few_tokens import trimmed
from tests.support.onnx_models import needs_onnx, one_layer, onnx_runner
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


@pytest.mark.parametrize(("quantize", "size"), [(None, 16), ("int8", 16), ("int4", 16), (None, 256), ("int8", 256)])
def test_a_token_is_read_alike_whatever_is_read_with_it(quantize: str | None, size: int) -> None:
    """Among up to 64 tokens, one or many of 9 texts, side by side or not, and of which each has passed over some.

    Passes of 17 tokens leave a single one in the last tile of attention, if it is computed in tiles.
    """
    draws, rows = random.Random(7), 9
    one = onnx_runner(one_layer(size), VOCABULARY, quantize)
    assert one is not None
    passes, whole = one.over(rows), [one.fresh() for _ in range(rows)]
    texts = [[draws.randrange(VOCABULARY) for _ in range(80)] for _ in range(rows)]
    expected = [np.asarray(each.extend(text, len(text)).rows).copy() for each, text in zip(whole, texts, strict=True)]
    read = [0] * rows
    for _ in range(60):
        requests = []
        for row in draws.sample(range(rows), draws.choice((1, 1, 2, 3, 5, 9))):
            after = max(0, read[row] - draws.randint(0, 2))
            tokens = texts[row][after : after + draws.choice((1, 1, 1, 2, 3, 6, 17))]
            requests += [Request(row, after, tokens, draws.randint(0, len(tokens)))] if tokens else []
            read[row] = after + len(tokens)
        for request, found in zip(requests, passes.run(requests), strict=True):
            stop = request.after + len(request.tokens)
            np.testing.assert_array_equal(found.rows, expected[request.slot][stop - request.keep : stop])
    assert min(read) > 20


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


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.representatives("llama")
def test_a_token_of_each_text_is_read_alike(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of texts of all lengths, behind prompts, drafts and what was taken from another text, in buffers that grow."""
    draws = random.Random(11)
    monkeypatch.setattr(passes_module, "CAPACITY", 16)
    one = runner_of(family)
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


def test_texts_up_to_the_end_of_the_context_are_read_with_others() -> None:
    """Padding lies beyond the context, and beyond the tables of angles."""
    one = runner_of("llama")
    passes, alone = one.over(ROWS), [one.fresh() for _ in range(ROWS)]
    draws = random.Random(3)
    text = [draws.randrange(VOCABULARY) for _ in range(one.context)]
    for row, length in enumerate((one.context - 1, 3, one.context - 20)):
        for each in (passes.run([Request(row, 0, text[:length], 0)]), alone[row].extend(text[:length], 0)):
            assert each
    requests = [Request(row, alone[row].length, text[:count], count) for row, count in enumerate((1, 40, 20))]
    for request, found in zip(requests, passes.run(requests), strict=True):
        wanted = alone[request.slot].extend(request.tokens, request.keep)
        np.testing.assert_array_equal(found.rows, np.asarray(wanted.rows))


def test_passes_of_all_kinds_share_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    one = runner_of("llama")
    monkeypatch.setattr("specctl.models.onnx.graph.open_session", None)
    passes = one.over(5)
    for rows in (range(5), range(1), (0, 3)):
        passes.run([Request(row, 0, [1] * (row + 1), 1) for row in rows])


def test_only_so_many_kinds_of_passes_stay_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes_module, "MOST_KINDS", 2)
    passes = runner_of("llama").over(2)
    assert isinstance(passes, OnnxPasses)
    for width in range(1, 10):
        passes.run([Request(row, 0, [1] * width, 1) for row in range(2)])
        assert len(passes._bound) <= 4


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
