"""What is read of several texts at once is what is read of each alone, to the last bit."""

from math import nextafter

import numpy as np
import pytest

from specctl.decoding.logits.host import HostLogits, picked
from specctl.decoding.logits.token_sampler import TokenSampler
from specctl.decoding.sampling import Sampling
from specctl.models.passes.draft_vocabulary import DraftVocabulary
from specctl.models.passes.forward import Forward
from specctl.policies import DISTRIBUTION_SIGNALS

EVERY = frozenset(DISTRIBUTION_SIGNALS)
SAMPLINGS = {
    "greedy": Sampling(0.0),
    "plain": Sampling(1.0),
    "warm": Sampling(0.7),
    "filtered": Sampling(0.9, top_k=7, top_p=0.9, min_p=0.01),
    "shaped": Sampling(0.9, typical_p=0.8, epsilon_cutoff=0.002, eta_cutoff=0.01, top_h=0.9),
}


def logits(rows: int, vocabulary: int) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    found = 4 * np.random.default_rng(vocabulary).standard_normal((rows, vocabulary)).astype(np.float32)
    found[0, 1::2] = -np.inf
    found[1] = 0  # all alike
    found[2, 3] = 90  # a certain token
    return found


@pytest.mark.parametrize("vocabulary", [5, 64, 1000, 4096])
@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_a_row_is_read_as_it_is_alone(sampling: Sampling, vocabulary: int) -> None:
    rows = logits(5, vocabulary)
    uniforms = [None] * 5 if sampling.greedy else [0.3, 0.0, 0.5, nextafter(1.0, 0.0), 0.77]
    ids = DraftVocabulary(range(0, 2 * vocabulary, 2), 2 * vocabulary)
    for sampler in (
        TokenSampler(sampling),
        TokenSampler(sampling, EVERY, tops=True),
        TokenSampler(sampling, frozenset({"top_prob"}), vocabulary=ids),
    ):
        for row, (numbers, law) in enumerate(sampler.read_rows([Forward(rows.copy())], uniforms)):
            (wanted,), alone = HostLogits(rows[row : row + 1]).sample(sampler, [uniforms[row]])
            assert numbers == wanted
            assert (law is None) == (alone is None)
            if law is not None and alone is not None:
                np.testing.assert_array_equal(law, alone[0])


def test_rows_that_hold_no_numbers_are_left_to_who_says_so() -> None:
    rows = logits(3, 100)
    rows[1] = np.nan
    sampler = TokenSampler(Sampling(1.0))
    alone = [HostLogits(rows[row : row + 1]).sample(sampler, [0.4])[0][0] for row in range(3)]
    assert [numbers for numbers, _ in sampler.read_rows([Forward(rows)], [0.4] * 3)] == alone


def test_what_rounds_to_the_whole_is_never_behind_the_last_weight() -> None:
    laws = np.zeros((2, 100), dtype=np.float32)
    laws[0, :3] = laws[1, 97:] = np.float32(1 / 3)
    assert picked(laws, [nextafter(1.0, 0.0)] * 2) == [2, 99]
