"""Sampled texts, read as engines with other rules of acceptance would have written them."""

from dataclasses import replace
from math import sqrt

import pytest
import torch

from specctl.decoding.sampling import Sampling
from specctl.export.search import GREEDY, Reading, traces_as
from specctl.models.running.pair import Pair
from specctl.policies import Setting
from specctl.replay.play import rounds
from specctl.replay.recording.sequence_recording import read_sequence
from specctl.replay.trace_files import TraceHeader, TraceSet
from specctl.replay.traces import Trace
from tests.support.toys import TableRunner, related_table, seeded, table
from tests.support.traced import pair_of

WORDS, LENGTH, DEPTH = 14, 400, 8
PROMPT = [3, 1]
SAMPLING = Sampling(0.8)
TARGET = table(5, vocabulary=WORDS)
DRAFT = related_table(TARGET, 6)


def draft_logits(text: list[int]) -> torch.Tensor:
    """The draft's logits ``(V,)`` after a text, told without a runner."""
    return DRAFT[text[-2], text[-1]]


@pytest.fixture(scope="module")
def text() -> list[int]:
    """Drawn from the target alone."""
    generator, found = seeded(7), list(PROMPT)
    while len(found) < len(PROMPT) + LENGTH:
        found.append(int(SAMPLING.probs(TARGET[found[-2], found[-1]]).multinomial(1, generator=generator)))
    return found[len(PROMPT) :]


def read(text: list[int], sampling: Sampling, **options: bool) -> Trace:
    pair: Pair = pair_of(TableRunner(TARGET), TableRunner(DRAFT))
    with torch.inference_mode():
        draft = read_sequence(pair, PROMPT, text, LENGTH, DEPTH, sampling, seeded(1), **options)
    return Trace("p", "c", 0, len(PROMPT), LENGTH, text, draft, 0.0)


@pytest.mark.parametrize("length", [1, 4, DEPTH])
def test_rounds_of_an_engine_whose_draft_takes_the_likeliest_token(text: list[int], length: int) -> None:
    """Compared with the engine's loop, written out: it keeps what equals the tokens that the target draws."""
    expected, start = [], 0
    while start < LENGTH:
        drafted: list[int] = []
        while len(drafted) < min(length, LENGTH - start - 1):
            drafted.append(int(draft_logits([*PROMPT, *text[:start], *drafted]).argmax()))
        kept = next((n for n, token in enumerate(drafted) if token != text[start + n]), len(drafted))
        expected.append((drafted, kept))
        start += kept + 1
    policy = Setting.of({"name": "constant", "draft_length": length}).build()
    played = list(rounds(policy, read(text, GREEDY), frozenset()))
    assert [([step.token for step in one.steps], one.accepted) for one in played] == expected


def test_tokens_that_are_drawn_apart_are_kept_where_they_are_the_same(text: list[int]) -> None:
    """Given the text, its token is the draft's too with the probability that the draft gives it."""
    draft = read(text, SAMPLING, matched=True).draft
    assert draft.along is not None
    assert draft.chances is None
    assert draft.accepted == [drawn == own for drawn, own in zip(draft.along.tokens, text, strict=True)]
    whole = [*PROMPT, *text]
    chances = [
        float(SAMPLING.probs(draft_logits(whole[: place + len(PROMPT)]))[token]) for place, token in enumerate(text)
    ]
    spread = sqrt(sum(chance * (1 - chance) for chance in chances))
    assert abs(sum(draft.accepted) - sum(chances)) < 4 * spread
    jointly = read(text, SAMPLING).draft
    assert sum(jointly.accepted) > sum(chances) + 4 * spread, "drawn jointly with the text, more are kept"


def test_a_softmax_over_ten_logits_is_told_from_the_ten_largest_probabilities(text: list[int]) -> None:
    trace = read(text, GREEDY, tops=True)
    made = TraceSet(TraceHeader(DEPTH, [], ["top_prob"], {}), [trace])

    def no_pair() -> Pair:
        raise AssertionError("the trace has what is needed")

    draft = traces_as(Reading(confidence="top ten"), made, None, no_pair).traces[0].draft  # type: ignore[arg-type]
    assert draft.along is not None
    whole = [*PROMPT, *text]
    expected = [
        float(draft_logits(whole[: place + len(PROMPT)]).topk(10).values.softmax(-1)[0]) for place in range(LENGTH)
    ]
    assert draft.along.top_prob == pytest.approx(expected, abs=1e-6)
    place = next(start for start, tail in enumerate(draft.tails) if tail == 0 and not draft.accepted[start])
    branch = draft.branches[0]
    rejected = [*whole[: place + len(PROMPT)], draft.along.tokens[place]]
    assert branch.top_prob[0] == pytest.approx(float(draft_logits(rejected).topk(10).values.softmax(-1)[0]), abs=1e-6)
    full = trace.draft
    assert full.along is not None
    assert all(ten > all_ for ten, all_ in zip(draft.along.top_prob, full.along.top_prob, strict=True))


def test_the_largest_logit_takes_the_place_of_the_top_probability(text: list[int]) -> None:
    plain, draft = read(text, GREEDY).draft, read(text, GREEDY, logits=True).draft
    assert draft.along is not None
    assert plain.along is not None
    whole = [*PROMPT, *text]
    expected = [float(draft_logits(whole[: place + len(PROMPT)]).max()) for place in range(LENGTH)]
    assert draft.along.top_prob == pytest.approx(expected)
    assert (draft.along.tokens, draft.along.entropy) == (plain.along.tokens, plain.along.entropy)
    place = next(start for start, tail in enumerate(draft.tails) if tail == 0 and not draft.accepted[start])
    rejected = [*whole[: place + len(PROMPT)], draft.along.tokens[place]]
    assert draft.branches[0].top_prob[0] == pytest.approx(float(draft_logits(rejected).max()))


def test_a_sampled_confidence_is_that_of_the_token_that_was_drawn(text: list[int]) -> None:
    trace = read(text, Sampling(1.0))
    made = TraceSet(TraceHeader(DEPTH, [], [], {"sampling": {"temperature": 1.0}}), [replace(trace)])

    def no_pair() -> Pair:
        raise AssertionError("the trace was recorded as this engine keeps tokens")

    reading = Reading("ratio", confidence="chosen")
    draft = traces_as(reading, made, None, no_pair).traces[0].draft  # type: ignore[arg-type]
    assert draft.along is not None
    assert trace.draft.along is not None
    assert draft.along.top_prob == trace.draft.along.token_prob
    assert draft.accepted == trace.draft.accepted
