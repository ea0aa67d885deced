"""A token read by torch or by numpy is the same token, with the same signals."""

import pytest
import torch

from specctl.decoding.draws import uniforms
from specctl.decoding.logits.device import DeviceLogits
from specctl.decoding.logits.host import HostLogits
from specctl.decoding.logits.token_sampler import TokenSampler, packed_signals
from specctl.decoding.sampling import Sampling
from specctl.models.predictors.state_predictor import StatePredictor
from specctl.policies import DISTRIBUTION_SIGNALS
from tests.support.toys import random_predictor, seeded

HERE = torch.device("cpu")


@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(1.0), Sampling(2.0), Sampling(0.7, top_k=9)], ids=["greedy", "1", "2", "0.7"]
)
@pytest.mark.parametrize(
    "head",
    [None, random_predictor(32, reads_signals=False), random_predictor(32)],
    ids=["no head", "a head", "a head that reads signals"],
)
def test_a_row_on_the_host_is_read_as_on_a_device(sampling: Sampling, head: StatePredictor | None) -> None:
    reader = TokenSampler(sampling, frozenset(DISTRIBUTION_SIGNALS), head, foresees=True)
    previous = torch.tensor([1.5, 0.4, 0.3], dtype=torch.float64)
    for seed in range(20):
        logits, hidden = 3 * torch.randn(200, generator=seeded(seed)), torch.randn(32, generator=seeded(seed + 50))
        uniform = None if sampling.greedy else uniforms((), HERE, seeded(seed))
        given = None if head is None else hidden, previous, lambda token: token / 200
        number = None if uniform is None else float(uniform)
        (there,), probs = DeviceLogits(logits[None]).sample(reader, [number], *given)
        (here,), same = HostLogits(logits[None].numpy()).sample(reader, [number], *given)
        assert len(here) == len(reader.fields)
        torch.testing.assert_close(torch.tensor(here, dtype=torch.float64), there, atol=1e-6, rtol=1e-5)
        assert (probs is None) == (same is None) == sampling.greedy
        if probs is not None:
            torch.testing.assert_close(torch.from_numpy(same), probs)
        previous = packed_signals(there)


def test_only_what_is_wanted_is_read() -> None:
    reader = TokenSampler(Sampling(), frozenset({"top_prob"}))
    logits = torch.tensor([0.0, 2.0, 1.0])
    (numbers,), probs = HostLogits(logits[None].numpy()).sample(reader, [None])
    assert (reader.fields, probs) == (("token", "top_prob"), None)
    assert numbers == [1, pytest.approx(float(logits.softmax(-1)[1]))]


def test_signals_of_a_pass_are_not_taken_where_the_largest_probabilities_are_read_too() -> None:
    wanted = frozenset({"entropy", "top_prob"})
    taken = [TokenSampler(Sampling(), wanted, tops=tops).takes_pass_signals for tops in (False, True)]
    assert taken == [True, False]
