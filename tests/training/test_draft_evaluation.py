"""The estimate from texts is the acceptance of rounds, by enumeration."""

from collections.abc import Iterator
from itertools import product

import pytest
import torch

from specctl.decoding.sampling import Sampling
from specctl.models.draft_heads.training import Lesson
from specctl.training.draft_heads import Acceptance, Answer, Drafted, acceptance_in_rounds
from tests.support.toys import seeded

SIZE, LENGTH = 3, 3


def laws(seed: int) -> dict[tuple[int, ...], torch.Tensor]:
    """A law ``(V,)`` after each text."""
    generator = seeded(seed)
    texts = [text for length in range(LENGTH) for text in product(range(SIZE), repeat=length)]
    return {text: (1.5 * torch.randn(SIZE, generator=generator)).softmax(-1) for text in texts}


TARGET, DRAFT = laws(0), laws(1)


class Known:
    """A teacher that knows the target's law after every text."""

    def lesson(self, prompt: torch.Tensor, tokens: torch.Tensor) -> Lesson:
        text = tuple(tokens.tolist())
        logits = torch.stack([TARGET[text[:index]].log() for index in range(len(text))])
        return Lesson(torch.cat([prompt, tokens]).long(), len(prompt), {}, logits)


def draft(answer: Answer, _: Lesson) -> Iterator[Drafted]:
    """A round from the first place: its token ``index`` is drawn given the tokens before it."""
    text = tuple(answer.tokens.tolist())
    for index in range(LENGTH):
        yield Drafted(0, index, DRAFT[text[:index]].log()[None])


def reached(text: tuple[int, ...] = (), chance: float = 1.0) -> list[float]:
    """The probability that the first 1, 2, ... tokens of a round are accepted, by what verification does."""
    if len(text) == LENGTH:
        return []
    both = torch.minimum(TARGET[text], DRAFT[text])
    found = [chance * float(both.sum())] + [0.0] * (LENGTH - len(text) - 1)
    for token in range(SIZE):
        for index, later in enumerate(reached((*text, token), chance * float(both[token]))):
            found[index + 1] += later
    return found


def test_the_mean_over_answers_is_the_acceptance_of_rounds() -> None:
    mean = torch.zeros(LENGTH, dtype=torch.float64)
    for text in product(range(SIZE), repeat=LENGTH):
        chance = float(torch.stack([TARGET[text[:index]][text[index]] for index in range(LENGTH)]).prod())
        answer = Answer(0, False, torch.tensor([0, 0]), torch.tensor(text))
        (found,) = acceptance_in_rounds(Known(), {"draft": draft}, [answer], Sampling(1.0), LENGTH)  # type: ignore[arg-type]
        assert found.rounds == 1
        mean += chance * torch.tensor(found.reached, dtype=torch.float64)
    assert mean.tolist() == pytest.approx(reached(), abs=1e-6)


def test_a_greedy_round_is_accepted_up_to_the_first_difference() -> None:
    text: tuple[int, ...] = ()
    while len(text) < LENGTH:
        text = (*text, int(TARGET[text].argmax()))
    answer = Answer(0, True, torch.tensor([0, 0]), torch.tensor(text))
    (found,) = acceptance_in_rounds(Known(), {"draft": draft}, [answer], Sampling(), LENGTH)  # type: ignore[arg-type]
    agrees = [int(DRAFT[text[:index]].argmax()) == text[index] for index in range(LENGTH)]
    assert found.reached == tuple(float(all(agrees[: index + 1])) for index in range(LENGTH))


def test_acceptance_by_position_and_lengths() -> None:
    found = Acceptance("draft", "greedy", 8, (0.8, 0.4, 0.0, 0.0))
    assert found.by_position == pytest.approx((0.8, 0.5, 0.0, 0.0))
    assert found.lengths == pytest.approx((0.8, 1.2, 1.2, 1.2))
