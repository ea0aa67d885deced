"""What a pass over several texts asks of a device does not depend on how many they are."""

import warnings
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from specctl.decoding.draft import Draft
from specctl.decoding.draws import generator_on
from specctl.decoding.logits.judging import Drafted, judge_of
from specctl.decoding.logits.token_sampler import TokenSampler
from specctl.decoding.sampling import Sampling
from specctl.models.running.eager import EagerPasses
from specctl.models.running.passes import Passes, Request
from specctl.models.running.slot import Slot
from tests.support.pretend_cuda import Devices, Tally
from tests.support.pretend_cuda.pairs import TEXT, VOCABULARY, on, runner_of
from tests.support.toys import random_model

ROWS = 4
PICKED = 4
"""Kernels of two layers that pick the keys and values of some rows; those of all of them are there already."""
READERS = {
    "greedy": TokenSampler(Sampling(), frozenset({"entropy"})),
    "T=1": TokenSampler(Sampling(1.0), frozenset({"entropy"})),
    "filtered": TokenSampler(Sampling(0.8, top_k=20, top_p=0.9)),
}


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.fixture(scope="module")
def cuda() -> Iterator[Devices]:
    with Devices() as devices:
        yield devices


def begun(cuda: Devices, engine: str) -> Passes:
    """Passes over four texts of different lengths."""
    passes = runner_of(engine, on(cuda, random_model("llama", 2), "cuda:0")).over(ROWS)
    for row in range(ROWS):
        passes.run([Request(row, 0, TEXT[: 20 + row], 0)])
    return passes


def asked(rows: int, width: int, reader: TokenSampler | None = None) -> list[Request]:
    uniform = None if reader is None or reader.sampling.greedy else 0.4
    return [
        Request(row, 20 + row, TEXT[20 + row :][:width], 1 if reader else width, reader=reader, about=uniform)
        for row in range(rows)
    ]


def drafted(rows: int, sampling: Sampling, width: int = 4) -> list[Request]:
    """Verifications of drafts of other lengths, with distributions of their own."""
    found = []
    for row, request in enumerate(asked(rows, width + 1)):
        count = width - row % 2
        probs = torch.full((count, VOCABULARY), 1 / VOCABULARY, device="cuda:0")
        draft = Draft(list(request.tokens[1 : count + 1]), None if sampling.greedy else probs, (), None)
        generator = None if sampling.greedy else generator_on(torch.device("cuda:0"), row)
        about = Drafted(draft, generator)
        found.append(
            request._replace(tokens=request.tokens[: count + 1], keep=count + 1, reader=judge_of(sampling), about=about)
        )
    return found


def tally(cuda: Devices, passes: Passes, requests: list[Request]) -> Tally:
    """Of the second pass of a kind."""
    passes.run(requests)
    cuda.ledger.clear()
    passes.run(requests)
    return cuda.ledger.tally()


@pytest.mark.parametrize("engine", ["eager", "graph"])
@pytest.mark.parametrize("name", READERS)
@pytest.mark.representatives("T=1-graph")
def test_draft_tokens_of_all_texts_cost_the_calls_of_two(cuda: Devices, engine: str, name: str) -> None:
    passes = begun(cuda, engine)
    two, three, four = (tally(cuda, passes, asked(rows, 1, READERS[name])) for rows in (2, 3, 4))
    assert two == three
    assert (four.copies, four.waits) == (two.copies, two.waits) == ((2, 1) if name == "greedy" else (3, 1))
    if engine == "graph":
        assert two == four
        assert four.launches < 30, "a replay and the reading"
    else:
        assert two.launches - four.launches == PICKED


@pytest.mark.parametrize("engine", ["eager", "graph"])
@pytest.mark.representatives("graph")
def test_a_verification_is_a_pass_whatever_its_texts(cuda: Devices, engine: str) -> None:
    passes = begun(cuda, engine)
    one, four = (tally(cuda, passes, asked(rows, 5)) for rows in (1, 4))
    assert (four.copies, four.waits) == (one.copies, one.waits) == (1, 0)
    assert one.launches - four.launches == (PICKED if engine == "eager" else 0)
    if engine == "graph":
        assert four.launches == 2, "the replay, and one kernel that keeps its logits"


def test_replayed_passes_give_what_eager_ones_give(cuda: Devices) -> None:
    passes, alone = begun(cuda, "graph"), Slot(EagerPasses(on(cuda, random_model("llama", 2), "cuda:0"), VOCABULARY))
    for rows, width in ((3, 1), (4, 3), (2, 12), (4, 1), (1, 40), (3, 2)):
        for request, found in zip(asked(rows, width), passes.run(asked(rows, width)), strict=True):
            alone.rollback(0)
            alone.extend(TEXT[: request.after], keep=0)
            wanted = alone.extend(request.tokens, keep=width).logits
            torch.testing.assert_close(found.logits.cpu(), wanted.cpu(), rtol=0, atol=2e-4)  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["greedy", "T=1", "block", "filtered"])
@pytest.mark.representatives("block")
def test_drafts_of_all_texts_are_judged_with_one_wait(cuda: Devices, name: str) -> None:
    sampling = replace(READERS.get(name, READERS["T=1"]).sampling, verification="block" if name == "block" else "token")
    passes, found = begun(cuda, "graph"), []
    for rows in (2, 4):
        passes.run(drafted(rows, sampling))
        requests = drafted(rows, sampling)
        cuda.ledger.clear()
        passes.run(requests)
        found.append(cuda.ledger.tally())
    two, four = found
    assert (four.copies, four.waits) == (two.copies, two.waits) == ((2, 1) if sampling.greedy else (3, 1))
    own = 0 if sampling.greedy else 1  # a text's numbers come from its own generator
    assert four.launches - two.launches == 2 * own


def test_prompts_of_a_card_share_passes_of_a_thousand_tokens() -> None:
    """Where launches take longer than their work; of a text each gets the same as alone."""
    prompts = [[Request(row, 0, (TEXT * 10)[row : row + length], 1)] for row, length in enumerate((300, 60, 320, 290))]
    with Devices() as cuda:
        model = on(cuda, random_model("llama", 2), "cuda:0")
        alone, passes = (runner_of("graph", model).over(ROWS) for _ in range(2))
        wanted = [alone.run(prompt)[0] for prompt in prompts]
        cuda.ledger.clear()
        found = passes.run([request for prompt in prompts for request in prompt])
        assert cuda.ledger.tally().launches < 3 * 110
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one.logits.cpu(), other.logits.cpu(), rtol=0, atol=2e-4)  # type: ignore[union-attr]


def test_of_long_texts_each_has_what_it_says_next_in_a_pass_of_its_own() -> None:
    """Their caches are copied for a pass together."""
    with Devices() as cuda:
        passes = runner_of("eager", on(cuda, random_model("llama", 2), "cuda:0")).over(ROWS)
        for row in (0, 1):
            passes.run([Request(row, 0, (TEXT * 20)[:600], 0)])
        turns = [Request(row, 600, TEXT[:20], 1) for row in (0, 1)]
        one, both = (tally(cuda, passes, turns[:count]) for count in (1, 2))
        assert (both.launches, both.copies) == (2 * one.launches, 2 * one.copies)
