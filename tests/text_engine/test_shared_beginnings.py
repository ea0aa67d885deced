"""What several texts have in common from their first token on is read once, and is what each would have read."""

from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
import torch

from specctl.decoding.composition import build_drafter
from specctl.decoding.session import Session
from specctl.models.running.eager import EagerPasses
from specctl.models.running.pair import Pair
from specctl.models.running.passes import Passes, Request
from specctl.models.running.slot import Slot
from specctl.policies import Setting
from specctl.profile.schema import SamplingTable
from specctl.records import Completion
from specctl.text_engine.dispatch import in_order
from specctl.text_engine.engine import whole
from specctl.text_engine.here import HereEngine, Rows
from specctl.text_engine.pair_rows import SharedBeginnings, passes_of
from tests.support.checkpoints import tiny_tokenizer
from tests.support.onnx_models import needs_onnx, one_layer, sure_runner
from tests.support.toys import noisy_copy, random_model, seeded

ROWS = 3
PREFIX = torch.randint(1, 64, (60,), generator=seeded(6)).tolist()
PROMPTS = [[*PREFIX[:length], *tail] for length, tail in [(60, [1]), (60, [2, 3]), (45, [9]), (60, [4]), (10, [5])]]


class Cells(Passes):
    """`Passes` whose cache has in each place the text up to there, and whose answer is what it has of the last ones.

    Attributes:
        read: tokens that passes read.
        cells: by row.
    """

    slots, context, device, engine = ROWS, 1 << 31, torch.device("cpu"), "cells"

    def __init__(self) -> None:
        self.read = 0
        self.cells: list[list[tuple[int, ...]]] = [[] for _ in range(ROWS)]

    def forward(self, requests: Sequence[Request]) -> list[Any]:
        for request in requests:
            assert len(request.tokens) >= max(request.keep, 1)
            self.read += len(request.tokens)
            cells = self.cells[request.slot]
            assert len(cells) >= request.after, "a place was never written"
            del cells[request.after :]
            for token in request.tokens:
                cells.append((*(cells[-1] if cells else ()), token))
        return [self.cells[request.slot][-request.keep :] if request.keep else [] for request in requests]

    def copy(self, source: int, row: int, start: int, stop: int) -> None:
        self.cells[row][start:] = self.cells[source][start:stop]


def ask(row: int, tokens: Sequence[int], after: int = 0, keep: int = 1) -> Request:
    return Request(row, after, tokens, keep)


def test_what_another_row_holds_is_not_read_again() -> None:
    cells = Cells()
    shared = SharedBeginnings(cells)  # type: ignore[arg-type]
    for row, prompt in enumerate(PROMPTS[:3]):
        assert shared.forward([ask(row, prompt)]) == [[tuple(prompt)]]
    assert cells.read == len(PROMPTS[0]) + 2 + 1
    cells.read = 0
    shared.forward([ask(0, [7], after=61)])
    assert shared.forward([ask(0, PROMPTS[0])]) == [[tuple(PROMPTS[0])]]
    assert cells.read == 1 + 1, "its own last text goes on too"
    assert shared.forward([ask(1, PROMPTS[4])]) == [[tuple(PROMPTS[4])]]
    assert cells.read == 2 + len(PROMPTS[4]), "of few tokens in common nothing is kept"


def test_what_several_begin_with_at_once_is_read_by_one_of_them() -> None:
    cells = Cells()
    shared = SharedBeginnings(cells)  # type: ignore[arg-type]
    found = shared.forward([ask(row, PROMPTS[row], keep=row) for row in range(ROWS)])
    assert found == [[], [tuple(PROMPTS[1])], [tuple(PROMPTS[2][: n + 1]) for n in (44, 45)]]
    assert cells.read == len(PROMPTS[0]) + 2 + 2


def test_a_pass_that_fails_leaves_nothing_to_copy() -> None:
    cells = Cells()
    shared = SharedBeginnings(cells)  # type: ignore[arg-type]
    shared.forward([ask(0, PROMPTS[0])])
    whole, cells.forward = cells.forward, lambda _: 1 / 0  # type: ignore[assignment]
    with pytest.raises(ZeroDivisionError):
        shared.forward([ask(0, PREFIX[::-1])])
    cells.forward, cells.read = whole, 0  # type: ignore[method-assign]
    assert shared.forward([ask(1, PROMPTS[0])]) == [[tuple(PROMPTS[0])]]
    assert cells.read == len(PROMPTS[0])


@pytest.mark.parametrize("seed", range(5))
def test_any_texts_are_what_each_has_asked_for(seed: int) -> None:
    random, cells = Random(seed), Cells()
    shared = SharedBeginnings(cells)  # type: ignore[arg-type]
    texts: list[list[int]] = [[] for _ in range(ROWS)]
    asked = 0
    for _ in range(300):
        requests = []
        for row in random.sample(range(ROWS), random.randint(1, ROWS)):
            whole = [*PREFIX[: random.randint(20, 60)], *random.choices(range(3), k=random.randint(0, 20)), 1]
            if not texts[row] or random.random() < 0.7:
                after = random.choice([0, common(texts[row], whole)])
                after = min(after, len(whole) - 1)
            else:
                after = random.randint(0, len(texts[row]))
                whole = [*texts[row][:after], *random.choices(range(3), k=random.randint(1, 40))]
            texts[row] = whole
            asked += len(whole) - after
            requests.append(ask(row, whole[after:], after, random.randint(0, len(whole) - after)))
        for request, found in zip(requests, shared.forward(requests), strict=True):
            text = texts[request.slot]
            ends = range(len(text) - request.keep + 1, len(text) + 1)
            assert found == [tuple(text[:end]) for end in ends]
            assert cells.cells[request.slot][-1] == tuple(text)
    assert cells.read < 0.9 * asked


def common(first: Sequence[int], second: Sequence[int]) -> int:
    return next(
        (n for n, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )


def pair_of(engine: str) -> Pair:
    if engine == "onnx":
        runners = sure_runner(one_layer(), 64), sure_runner(one_layer(seed=1), 64)
    else:
        runners = Slot(EagerPasses(random_model("llama"), 64)), Slot(EagerPasses(noisy_copy("llama"), 64))
    return Pair(runners[0], runners[1:], tiny_tokenizer(), frozenset(), 64, (), ({},))


@pytest.mark.parametrize("engine", ["torch", pytest.param("onnx", marks=needs_onnx)])
def test_rows_write_what_a_fresh_text_writes(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts are the same too."""
    pair, setting = pair_of(engine), Setting("constant")
    passes = passes_of(pair, ROWS)
    read = [0] * len(passes)
    for number, made in enumerate(passes):

        def counted(requests: Sequence[Request], run: Any = made.forward, number: int = number) -> Any:
            read[number] += sum(len(request.tokens) for request in requests)
            return run(requests)

        monkeypatch.setattr(made, "forward", counted)
    table = SamplingTable(max_new_tokens=8, temperature=1.0)
    prompts = [*PROMPTS, *PROMPTS]

    def answer(row: Pair, _: Any) -> Any:
        session = Session(row, build_drafter(row, setting), keep_caches=True)
        return whole(lambda prompt: told(session.generate(prompt, table)))

    alone = [told(Session(pair, build_drafter(pair, setting)).generate(prompt, table)) for prompt in prompts]
    with HereEngine(None, Rows.over(pair, passes, answer, kept=True)) as rows:
        assert [found for _, found in in_order(rows, [(prompt, prompt) for prompt in prompts])] == alone
    decoded = len(prompts) * 8 * 8  # at most so many tokens are drafted and verified behind the prompts
    assert all(count < sum(map(len, prompts)) / 4 + decoded for count in read)


def told(completion: Completion) -> tuple[Any, ...]:
    return completion.tokens, [[step.token for step in round_.steps] for round_ in completion.rounds]
