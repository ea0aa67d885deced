"""Draft tokens and their acceptance probability, against enumeration on a toy model."""

from collections import Counter

import pytest
import torch
from scipy.stats import chisquare

from specctl.decoding.draft_tokens import CHUNK, draw_along, predict_acceptance
from specctl.decoding.sampling import Sampling
from specctl.models.running.eager import EagerPasses
from specctl.models.running.slot import Slot
from tests.support.toys import (
    FAMILIES,
    TableRunner,
    noisy_copy,
    random_model,
    random_predictor,
    related_table,
    seeded,
    table,
)

TARGET = table(seed=31)
DRAFT = related_table(TARGET, seed=32)
PROMPT, ANSWER = [1, 2], [3, 4, 0, 1, 1]
PAPER = Sampling(temperature=1.0, top_k=3)


def proposed(sampling: Sampling, seed: int = 0, answer: list[int] = ANSWER) -> list[list[float]]:
    found = draw_along(TableRunner(TARGET), TableRunner(DRAFT), PROMPT, answer, sampling, seeded(seed))
    return [column.tolist() for column in (found.tokens, found.acceptance, *found.signals.unbind(1))]


def contexts(answer: list[int]) -> list[tuple[int, int]]:
    text = [*PROMPT, *answer]
    return [(text[place - 2], text[place - 1]) for place in range(2, len(text))]


@pytest.mark.parametrize("sampling", [PAPER, Sampling(temperature=0.6), Sampling()], ids=["paper", "cold", "greedy"])
def test_each_number_is_that_of_the_text_before_it(sampling: Sampling) -> None:
    tokens, *columns = proposed(sampling)
    for token, accepted, entropy, top, own, context in zip(tokens, *columns, contexts(ANSWER), strict=True):
        p, q = (sampling.probs(logits[context]) for logits in (TARGET, DRAFT))
        raw = DRAFT[context].softmax(-1)
        assert accepted == pytest.approx(min(1.0, float(p[int(token)] / q[int(token)])), abs=1e-5)
        assert entropy == pytest.approx(float(torch.special.entr(raw).sum()), abs=1e-5)
        assert (top, own) == pytest.approx((float(raw.max()), float(raw[int(token)])), abs=1e-5)


def test_draft_tokens_follow_the_draft() -> None:
    counts = Counter(proposed(PAPER, seed)[0][0] for seed in range(600))
    expected = PAPER.probs(DRAFT[PROMPT[0], PROMPT[1]])
    seen = [counts[token] for token in range(5) if expected[token] > 0]
    assert sum(seen) == 600
    wanted = torch.tensor([share for share in expected.tolist() if share > 0], dtype=torch.float64)
    wanted *= 600 / wanted.sum()
    assert chisquare(seen, wanted.tolist()).pvalue > 1e-3


def test_long_answers_are_read_in_chunks() -> None:
    answer = torch.randint(5, (2 * CHUNK + 3,), generator=seeded(4)).tolist()
    tokens, accepted, *_ = proposed(PAPER, answer=answer)
    assert len(tokens) == len(answer)
    context = contexts(answer)[-1]
    ratio = PAPER.probs(TARGET[context])[int(tokens[-1])] / PAPER.probs(DRAFT[context])[int(tokens[-1])]
    assert accepted[-1] == pytest.approx(min(1.0, float(ratio)), abs=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_head_predicts_each_draft_token_after_the_text_before_it(family: str) -> None:
    draft, head = Slot(EagerPasses(random_model(family), 64)), random_predictor(32, spread=0.2)
    prompt, answer = [3, 1], torch.randint(1, 64, (20,), generator=seeded(6)).tolist()
    drawn = draw_along(Slot(EagerPasses(noisy_copy(family), 64)), draft, prompt, answer, PAPER, seeded(0))
    predicted = predict_acceptance(draft, head, prompt, answer, drawn)
    text = [*prompt, *answer]
    for place in (0, 7, 19):
        fresh = Slot(EagerPasses(random_model(family), 64))
        with torch.inference_mode():
            ids = [*text[: len(prompt) + place], int(drawn.tokens[place])]
            hidden = fresh.extend(ids, keep=1, hidden=True).hidden
            assert hidden is not None
            expected = head.accept_prob(hidden[0], drawn.signals[place])
        assert predicted[place].item() == pytest.approx(expected.item(), abs=1e-4)
