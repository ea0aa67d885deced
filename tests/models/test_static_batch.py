"""What torch gives a text of a batch is what it gives that text alone, but for rounding."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from specctl.models.passes.fixed_buffers import RowLayer
from specctl.models.passes.tree_sight import path_to
from specctl.models.running.eager import EagerPasses
from specctl.models.running.graph import GraphPasses
from specctl.models.running.passes import Request
from specctl.models.running.slot import Slot
from specctl.models.running.static import Shape, StaticBatch, StaticPasses
from specctl.models.running.transforms import WIDTH, FixedWidthPasses
from tests.support.few_tokens import trimmed
from tests.support.pretend_cuda.pairs import tiny_model
from tests.support.toys import FAMILIES, Replays, random_model

pytestmark = pytest.mark.usefixtures("inference_mode")
VOCABULARY, ROWS = 60, 3


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("engine", [EagerPasses, StaticPasses])
@pytest.mark.representatives("EagerPasses-llama", "StaticPasses-gpt-neox")
def test_rows_are_those_of_each_text_alone(engine: type[EagerPasses] | type[StaticPasses], family: str) -> None:
    model = random_model(family)
    if (why := Slot(EagerPasses(model, VOCABULARY)).no_rows) is not None:
        assert why == Slot(EagerPasses(model, VOCABULARY)).no_trees
        return
    one = Slot(engine(model, VOCABULARY))
    assert one.no_rows is None
    passes, alone = one.over(ROWS), [Slot(EagerPasses(model, VOCABULARY)) for _ in range(ROWS)]
    draws = random.Random(5)
    for step in range(12):
        requests, expected = [], {}
        for row in draws.sample(range(ROWS), draws.randint(1, ROWS)):
            after = max(0, alone[row].length - draws.randint(0, 3))
            tokens = [draws.randrange(VOCABULARY) for _ in range(270 if step == 6 and row else draws.randint(1, 6))]
            request = Request(row, after, tokens, draws.randint(0, len(tokens)), hidden=draws.random() < 0.3)
            alone[row].rollback(after)
            requests.append(request)
            expected[row] = alone[row].extend(tokens, request.keep, hidden=request.hidden)
        for request, found in zip(requests, passes.run(requests), strict=True):
            wanted = expected[request.slot]
            torch.testing.assert_close(found.logits, wanted.logits, rtol=0, atol=2e-4)
            assert (found.hidden is None) == (not request.hidden)
            if found.hidden is not None:
                torch.testing.assert_close(found.hidden, wanted.hidden, rtol=0, atol=2e-4)


def test_states_that_are_watched_are_cut_by_rows() -> None:
    model = random_model("llama")
    one = Slot(EagerPasses(model, VOCABULARY))
    one.watch([0, -1])
    passes = one.over(2)
    requests = [Request(0, 0, [1, 2, 3], 0), Request(1, 0, [4, 5], 1)]
    for request, found in zip(requests, passes.run(requests), strict=True):
        one.rollback(0)
        wanted = one.extend(request.tokens, request.keep).states
        assert found.states is not None
        assert wanted is not None
        for layer in (0, -1):
            torch.testing.assert_close(found.states[layer], wanted[layer], rtol=0, atol=1e-4)


def test_a_draft_of_few_tokens_is_read_with_others() -> None:
    one = Slot(EagerPasses(trimmed("llama", range(0, VOCABULARY, 2)), VOCABULARY))
    (found,) = one.over(2).run([Request(1, 0, [1, 5, 9], 2)])
    assert found.vocabulary is not None
    torch.testing.assert_close(found.logits, one.extend([1, 5, 9], 2).logits, rtol=0, atol=1e-4)


@pytest.mark.parametrize("engine", [EagerPasses, StaticPasses])
def test_passes_that_were_tried_leave_no_hooks(engine: type[EagerPasses] | type[StaticPasses]) -> None:
    model = random_model("llama", 2, 3)
    one = Slot(engine(model, VOCABULARY))
    one.watch([0, -1])

    def hooks() -> int:
        one.over(2).run([Request(0, 0, [1, 2], 1, hidden=True)])
        return sum(len(part._forward_hooks) + len(part._forward_pre_hooks) for part in model.modules())

    assert hooks() == hooks()


def test_where_memory_runs_out_between_two_layers_the_next_pass_makes_room_in_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one, alone = (Slot(EagerPasses(random_model("llama"), VOCABULARY)) for _ in range(2))
    passes, tokens = one.over(2), [number % VOCABULARY for number in range(300)]
    passes.run([Request(0, 0, tokens[:250], 0)])
    alone.extend(tokens[:250], 0)
    grown: list[RowLayer] = []
    grow = RowLayer.grow

    def full(layer: RowLayer, capacity: int, filled: int) -> None:
        if grown:
            raise MemoryError
        grown.append(layer)
        grow(layer, capacity, filled)

    with monkeypatch.context() as patched:
        patched.setattr(RowLayer, "grow", full)
        with pytest.raises(MemoryError):
            passes.run([Request(0, 250, tokens[250:], 1), Request(1, 0, tokens, 1)])
    (found,) = passes.run([Request(0, 250, tokens[250:], 1)])
    torch.testing.assert_close(found.logits, alone.extend(tokens[250:], 1).logits, rtol=0, atol=2e-4)


def test_captured_passes_of_each_number_of_rows_have_a_capture_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(Replays):
        made: list["Own"] = []  # noqa: RUF012

        def __init__(self, device: torch.device) -> None:
            super().__init__()
            self.made.append(self)
            assert device.type == "cpu"

    monkeypatch.setattr("specctl.models.running.graph.CudaCapture", Own)
    runner = Slot(GraphPasses(random_model("llama"), VOCABULARY, Own(torch.device("cpu"))))
    for number in (2, 3):
        passes = runner.over(2)
        for after in range(2):
            passes.run([Request(0, after, [1], 1)])
        assert [capture.captured for capture in Own.made] == [0, *[1] * (number - 1)]


def test_nothing_is_captured_before_all_buffers_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    capture = Replays()
    passes = Slot(GraphPasses(random_model("llama"), VOCABULARY, capture)).over(2)
    made: list[RowLayer] = []
    buffers = RowLayer.lazy_initialization

    def full(layer: RowLayer, *states: torch.Tensor) -> None:
        if made:
            raise MemoryError
        made.append(layer)
        buffers(layer, *states)

    with monkeypatch.context() as patched:
        patched.setattr(RowLayer, "lazy_initialization", full)
        with pytest.raises(MemoryError):
            passes.run([Request(0, 0, [1], 1)])
    for after in range(2):
        assert capture.captured == 0, "captured passes make no buffers"
        passes.run([Request(0, after, [1], 1)])
    assert capture.captured == 1


def shapes_of(monkeypatch: pytest.MonkeyPatch) -> list[Shape]:
    seen: list[Shape] = []
    network = StaticBatch._network

    def noted(self: StaticBatch, shape: Shape, *more: Any) -> Any:
        seen.append(shape)
        return network(self, shape, *more)

    monkeypatch.setattr(StaticBatch, "_network", noted)
    return seen


@pytest.mark.parametrize("engine", [EagerPasses, StaticPasses, "graph"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.representatives("dtype0-EagerPasses", "dtype1-graph")
def test_passes_of_one_shape_give_a_text_the_same_bit_for_bit_whatever_the_others(
    monkeypatch: pytest.MonkeyPatch, engine: Any, dtype: torch.dtype
) -> None:
    model = tiny_model().to(dtype)
    one = Slot(GraphPasses(model, VOCABULARY, Replays())) if engine == "graph" else Slot(engine(model, VOCABULARY))
    verifier, shapes, draws = Slot(FixedWidthPasses(one)), shapes_of(monkeypatch), random.Random(3)
    texts = [[draws.randrange(VOCABULARY) for _ in range(length)] for length in (9, 240, 40)]
    blocks = [[draws.randrange(VOCABULARY) for _ in range(WIDTH)] for _ in range(6)]

    def read(rows: Sequence[int]) -> dict[int, list[torch.Tensor]]:
        """Blocks of 16 tokens after each text, of these rows only."""
        passes = verifier.over(ROWS)
        found: dict[int, list[torch.Tensor]] = {row: [] for row in rows}
        passes.run([Request(row, 0, texts[row], 0) for row in rows])
        for step, block in enumerate(blocks):
            asked = [Request(row, len(texts[row]) + WIDTH * step, block, WIDTH) for row in rows]
            for request, forward in zip(asked, passes.run(asked), strict=True):
                found[request.slot].append(forward.logits.clone())
        return found

    together = read(range(ROWS))
    for row in range(ROWS):
        (alone,) = read([row]).values()
        assert all(map(torch.equal, alone, together[row])), "bit for bit"
    assert {(shape.count, shape.width) for shape in shapes if shape.width <= WIDTH} == {(ROWS, WIDTH)}
    spans = {shape.span for shape in shapes if shape.width == WIDTH}
    assert spans == {256, 512}, "by classes of a text's own length"


@pytest.mark.parametrize("engine", [EagerPasses, StaticPasses, "graph"])
@pytest.mark.representatives("graph")
def test_trees_of_several_texts_are_those_of_each_alone(engine: Any) -> None:
    """Grown in several passes, with other texts' chains beside them, and gone on from along a path."""
    model, draws = random_model("llama"), random.Random(7)
    made = GraphPasses(model, VOCABULARY, Replays()) if engine == "graph" else engine(model, VOCABULARY)
    passes = made.over(ROWS)
    assert passes.no_trees is None
    alone = [Slot(EagerPasses(model, VOCABULARY)) for _ in range(ROWS)]
    for row in range(ROWS):
        text = [draws.randrange(VOCABULARY) for _ in range(5 + 30 * row)]
        passes.run([Request(row, 0, text, 0)])
        alone[row].extend(text, keep=0)
    for turn in range(6):
        trees = draws.sample(range(ROWS), 2) if turn else range(ROWS)
        starts = {row: alone[row].length for row in trees}
        sizes, above = dict.fromkeys(trees, 0), {row: list[int]() for row in trees}
        for _ in range(3):
            requests, expected = [], {}
            for row in trees:
                before, count = sizes[row], draws.randint(1, 20 if turn == 2 else 4)
                tokens = [draws.randrange(VOCABULARY) for _ in range(count)]
                parents = [draws.randrange(token) for token in range(max(before, 1), before + count)]
                requests.append(Request(row, alone[row].length, tokens, count, parents=parents, before=before))
                expected[row] = alone[row].extend_tree(tokens, parents, before=before).logits
                sizes[row] += count
                above[row] += parents
            for row in set(range(ROWS)) - set(trees):
                requests.append(Request(row, alone[row].length, [3, 4], 2))
                expected[row] = alone[row].extend([3, 4], 2).logits
            passes.run(requests)  # repeated, as where memory ran out in one of them
            for request, found in zip(requests, passes.run(requests), strict=True):
                torch.testing.assert_close(found.logits, expected[request.slot], rtol=0, atol=2e-4)
        for row, start in starts.items():
            path = path_to(above[row], draws.randrange(sizes[row]))
            alone[row].keep_path(path)
            assert passes.keep_path(row, start, path) == alone[row].length
