from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from transformers import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopHLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from specctl.decoding.draws import AT_A_TIME, Uniforms, sibling
from specctl.decoding.logits import judging as module
from specctl.decoding.logits.device import DeviceLogits, draw, pick
from specctl.decoding.logits.host import PART, HostLogits, Softmax, _kept, likeliest, picked
from specctl.decoding.logits.judging import logits_over
from specctl.decoding.sampling import Sampling
from specctl.policies import DISTRIBUTION_SIGNALS
from specctl.profile.schema import FILTERS, SamplingTable
from tests.support.toys import seeded

SHAPED = [
    Sampling(1.0, typical_p=0.9),
    Sampling(0.7, typical_p=0.2),
    Sampling(1.0, epsilon_cutoff=0.02),
    Sampling(1.3, epsilon_cutoff=0.9),
    Sampling(1.0, eta_cutoff=0.05),
    Sampling(1.5, eta_cutoff=0.3),
    Sampling(1.0, top_h=0.6),
    Sampling(1.5, top_h=0.05),
    Sampling(0.8, top_h=0.7, top_k=20),
    Sampling(0.9, 40, 0.97, 0.001, typical_p=0.8, epsilon_cutoff=0.003, eta_cutoff=0.02, top_h=0.9),
]
"""The filters that look at entropies and at probabilities themselves; the last has all in their order."""


def by_transformers(sampling: Sampling, logits: torch.Tensor) -> torch.Tensor:
    """The distribution that ``generate`` would draw from, its warpers in its order."""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(float(sampling.temperature))])
    if sampling.top_h:
        warpers.append(TopHLogitsWarper(sampling.top_h))
    if sampling.top_k:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        warpers.append(MinPLogitsWarper(sampling.min_p))
    if sampling.typical_p < 1:
        warpers.append(TypicalLogitsWarper(sampling.typical_p))
    if sampling.epsilon_cutoff:
        warpers.append(EpsilonLogitsWarper(sampling.epsilon_cutoff))
    if sampling.eta_cutoff:
        warpers.append(EtaLogitsWarper(sampling.eta_cutoff))
    return warpers(torch.empty(0, 0, dtype=torch.int64), logits).softmax(-1)


@pytest.fixture(params=[True, False], ids=["on the host", "as on a device"])
def somewhere(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways to compute a distribution."""
    if not request.param:
        monkeypatch.setattr(module, "on_host", lambda _: False)


@pytest.mark.usefixtures("somewhere")
@pytest.mark.parametrize("vocabulary", [5, 200])
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(1.0),
        Sampling(0.3),
        Sampling(1.7, top_k=1),
        Sampling(0.7, top_k=4),
        Sampling(1.0, top_k=1000),
        Sampling(1.0, top_p=0.9),
        Sampling(0.7, top_p=0.01),
        Sampling(1.3, min_p=0.1),
        Sampling(1.0, min_p=1.0),
        Sampling(0.7, top_k=30, top_p=0.8),
        Sampling(0.8, top_k=30, top_p=0.95, min_p=0.05),
        *SHAPED,
    ],
)
def test_the_distribution_is_the_one_that_transformers_draws_from(sampling: Sampling, vocabulary: int) -> None:
    logits = 3 * torch.randn(300, vocabulary, generator=seeded(1))
    ours, theirs = sampling.probs(logits), by_transformers(sampling, logits)
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)
    assert torch.equal(ours > 0, theirs > 0)


@pytest.mark.parametrize("spread", [0.5, 3.0, 8.0], ids=["flat", "as models are", "steep"])
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(1.0, top_p=0.5),
        Sampling(1.0, top_p=0.99),
        Sampling(0.8, top_k=300, top_p=0.9),
        Sampling(0.8, top_p=0.95, min_p=0.01),
        Sampling(1.0, top_k=40),
        Sampling(0.9, typical_p=0.9),
        Sampling(0.9, eta_cutoff=0.001, top_h=0.8),
    ],
)
def test_a_large_vocabulary_is_filtered_by_looking_at_its_likeliest_tokens(sampling: Sampling, spread: float) -> None:
    """Few stay or many, of those looked at or of all. In float64 the reference's sums tell which is the last."""
    logits = spread * torch.randn(6, 6000, generator=seeded(4))
    ours, theirs = sampling.probs(logits), by_transformers(sampling, logits.double())
    torch.testing.assert_close(ours.double(), theirs, atol=1e-6, rtol=1e-4)
    assert torch.equal(ours > 0, theirs > 0)
    assert torch.equal(sampling.probs(logits.reshape(2, 3, -1)), ours.reshape(2, 3, -1))


@pytest.mark.parametrize("count", [1, 2, 5, 999, 1000])
@pytest.mark.parametrize("last", [False, True])
def test_the_likeliest_are_found_block_by_block(count: int, last: bool) -> None:
    """Of 1000 numbers, which are no whole blocks; of equal ones the first."""
    row = torch.randn(1000, generator=seeded(8)).round(decimals=1).numpy()
    row[990 if last else 70] = 9.0
    expected = sorted(range(1000), key=lambda index: -row[index])[:count]
    assert likeliest(row, count).tolist() == expected


@pytest.mark.parametrize("sampling", [Sampling(1.0), Sampling(0.7, 2, 0.9, 0.1), Sampling(1.0, top_p=0.9), *SHAPED])
def test_what_is_no_number_stays_none(sampling: Sampling) -> None:
    logits = torch.randn(3, 600, generator=seeded(5))
    logits[1, 7] = torch.nan
    probs = sampling.probs(logits)
    assert probs.sum(-1).isnan().tolist() == [False, True, False]
    assert logits_over(logits).best()[0] == logits.argmax(-1).tolist()


@pytest.mark.parametrize(
    "sampling", [Sampling(0.7, 3, 0.9, 0.1), Sampling(1.0, top_p=0.9), Sampling(1.0, top_k=4), *SHAPED]
)
def test_suppressed_tokens_are_never_kept(sampling: Sampling) -> None:
    logits = torch.randn(2, 600, generator=seeded(6))
    logits[:, 2:] = -torch.inf
    probs = sampling.probs(logits)
    assert not probs[:, 2:].any()
    torch.testing.assert_close(probs.sum(-1), torch.ones(2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_first_of_equal_largest_values(dtype: torch.dtype) -> None:
    values = torch.tensor([[1.0, 3.0, 3.0], [2.0, 2.0, 2.0]], dtype=dtype)
    assert logits_over(values).best() == ([1, 0], [3.0, 2.0])


@pytest.mark.usefixtures("somewhere")
@pytest.mark.parametrize("sampling", [Sampling(1.0, top_k=2), Sampling(1.0, top_p=0.5), Sampling(1.0, min_p=0.9)])
def test_ties_are_broken_as_transformers_breaks_them(sampling: Sampling) -> None:
    logits = torch.tensor([[1.0, 1.0, 1.0, -9.0], [0.0, 2.0, 2.0, 2.0]])
    torch.testing.assert_close(sampling.probs(logits), by_transformers(sampling, logits))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0), Sampling(0.7, 20, 0.9, 0.01), SHAPED[-1]])
def test_probabilities_are_float32_whatever_the_logits_are(sampling: Sampling, dtype: torch.dtype) -> None:
    logits = torch.randn(2, 3, 50, generator=seeded(2)).to(dtype)
    probs = sampling.probs(logits)
    assert probs.dtype == torch.float32
    assert torch.equal(probs, sampling.probs(logits.float()))
    torch.testing.assert_close(probs.sum(-1), torch.ones(2, 3))


@pytest.mark.parametrize("sampling", SHAPED)
def test_the_host_and_a_device_keep_the_same_tokens(sampling: Sampling) -> None:
    """Of ties too, but for top-p: rows of few different numbers. Each row has the bits that it has alone."""
    sampling = replace(sampling, top_p=1.0)
    logits = torch.randn(60, 300, generator=seeded(7)).mul(2).round()
    there = DeviceLogits(logits).distributions(sampling).numbers
    here = HostLogits(logits.numpy()).distributions(sampling).numbers
    assert np.array_equal(there.numpy() > 0, here > 0)
    np.testing.assert_allclose(there.numpy(), here, rtol=1e-5, atol=1e-8)
    for rows in (there, here):
        assert np.allclose(np.asarray(rows).sum(-1), 1, atol=1e-5)
    for row in range(0, len(logits), 7):
        assert np.array_equal(HostLogits(logits[row : row + 1].numpy()).distributions(sampling).numbers[0], here[row])
        assert torch.equal(DeviceLogits(logits[row : row + 1]).distributions(sampling).numbers[0], there[row])


def test_a_sampling_has_every_filter_of_a_table() -> None:
    table = SamplingTable(temperature=0.8, typical_p=0.9, epsilon_cutoff=0.1, eta_cutoff=0.2, top_h=0.3, top_k=4)
    found = Sampling.of(table)
    assert all(getattr(found, name) == getattr(table, name) for name in ("temperature", *FILTERS))
    assert not Sampling.of(SamplingTable(temperature=0.8)).filters, "they are off unless asked for"


def test_temperature_zero_is_one_hot_at_the_argmax() -> None:
    logits = torch.tensor([[0.1, 0.3, 0.2], [5.0, -1.0, 5.0]])
    assert Sampling().probs(logits).tolist() == [[0, 1, 0], [1, 0, 0]]


@pytest.mark.parametrize(
    ("sampling", "greedy", "plain"),
    [
        (Sampling(), True, False),
        (Sampling(0.9e-6), True, False),
        (Sampling(1e-6), False, False),
        (Sampling(1.0), False, True),
        (Sampling(0.9), False, False),
        (Sampling(1.0, top_k=5), False, False),
        (Sampling(1.0, top_p=0.9), False, False),
        (Sampling(1.0, min_p=0.1), False, False),
        (Sampling(1.0, typical_p=0.9), False, False),
        (Sampling(1.0, epsilon_cutoff=0.1), False, False),
        (Sampling(1.0, eta_cutoff=0.1), False, False),
        (Sampling(1.0, top_h=0.5), False, False),
    ],
)
def test_greedy_and_plain(sampling: Sampling, greedy: bool, plain: bool) -> None:
    assert (sampling.greedy, sampling.plain) == (greedy, plain)


def test_plain_is_the_softmax_itself() -> None:
    """Drafters take their signals from these probabilities instead of computing the softmax a second time."""
    logits = torch.randn(4, 30, generator=seeded(3))
    assert torch.equal(DeviceLogits(logits).distributions(Sampling(1.0)).numbers, logits.softmax(-1))


@pytest.mark.parametrize(
    "weights",
    [[0.1, 0.2, 0.3, 0.4], [0.0, 0.97, 0.03, 0.0], [1e-8, 3e-8, 0.0, 4e-8], [2.0, 1.0, 5.0, 0.0]],
    ids=["a distribution", "with zeros", "a tiny residual", "not normalised"],
)
def test_draws_are_proportional_to_their_weights(weights: list[float]) -> None:
    row = torch.tensor(weights)
    generator = seeded(13)
    seen = torch.stack([draw(row, generator) for _ in range(8000)]).bincount(minlength=4)
    possible = row > 0
    assert not seen[~possible].any()
    expected = row[possible].double() / row.double().sum() * 8000
    assert chisquare(seen[possible].double(), expected).pvalue > 1e-3


def test_each_index_is_picked_by_the_part_of_the_numbers_that_its_weight_is() -> None:
    """Exactly: the numbers that pick an index are those between the sums before and behind it."""
    row = torch.tensor([0.0, 0.25, 0.0, 1e-12, 0.5, 0.25, 0.0])
    total = 1 + 1e-12
    edges = [0.0, 0.25 / total, (0.25 + 1e-12) / total, (0.75 + 1e-12) / total, 1.0]
    for index, least, end in zip([1, 3, 4, 5], edges, edges[1:], strict=False):
        inside = [least + (end - least) * part for part in (0.01, 0.5, 0.99)]
        assert [int(pick(row, torch.tensor(number, dtype=torch.float64))) for number in inside] == [index] * 3
        assert pick(row.expand(3, -1), torch.tensor(inside, dtype=torch.float64)).tolist() == [index] * 3
        assert picked(row.expand(3, -1).numpy(), inside) == [index] * 3


@pytest.mark.parametrize("count", [40, 64, 65, 700, 5000])
def test_an_index_among_many_is_where_the_running_sum_passes_the_part(count: int) -> None:
    """Numbers are summed by blocks: none of weight 0 is picked, wherever blocks begin and end."""
    weights = torch.rand(count, generator=seeded(4)).numpy()
    weights[weights < 0.7] = 0
    weights[count // 3 : count // 2] = weights[-count // 4 :] = 0
    running = weights.cumsum(dtype=np.float64)
    for number in torch.rand(500, generator=seeded(5), dtype=torch.float64).tolist():
        assert picked(weights[None], [number]) == [int(running.searchsorted(number * running[-1], side="right"))]
    edges = (running / running[-1])[weights > 0]  # where rounding decides between two neighbours
    assert all(weights[picked(weights[None], [float(edge)])] > 0 for edge in [0.0, *edges[:-1], 1 - 2**-53])


@pytest.mark.parametrize("weights", [[0.1, 0.7, 0.0], [0.0, 3e-40, 0.0], [1.0, 1e-30, 0.0]])
def test_the_largest_number_picks_nothing_behind_the_last_weight(weights: list[float]) -> None:
    largest = torch.tensor(1 - 2**-53, dtype=torch.float64)
    row = torch.tensor(weights)
    assert row[int(pick(row, largest))] > 0
    assert row[int(pick(row.expand(2, -1), largest.expand(2))[0])] > 0
    assert row[picked(row[None].numpy(), [float(largest)])] > 0


def test_numbers_taken_many_at_a_time_are_the_generators() -> None:
    numbers = Uniforms(seeded(3))
    taken = [numbers.next() for _ in range(3 * AT_A_TIME)]
    assert len(set(taken)) == len(taken)
    assert sorted(taken) == sorted(torch.rand(3 * AT_A_TIME, dtype=torch.float64, generator=seeded(3)).tolist())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_signals_on_the_host_are_those_of_a_device(dtype: torch.dtype) -> None:
    logits = (4 * torch.randn(5, 300, generator=seeded(8))).to(dtype)
    logits[1, 3:] = -torch.inf
    logits[2, 7] = 1e4
    logits[3, 7] = torch.nan
    tokens = torch.tensor([4, 2, 7, 1, 9])
    wanted = frozenset(DISTRIBUTION_SIGNALS)
    here = {name: torch.from_numpy(values) for name, values in logits_over(logits).signals(tokens, wanted).items()}
    one = [
        {name: torch.from_numpy(values)[0] for name, values in logits_over(row[None]).signals([token], wanted).items()}
        for row, token in zip(logits, tokens.tolist(), strict=True)
    ]
    there = DeviceLogits(logits).signals(tokens, wanted)
    assert list(here) == list(there) == list(DISTRIBUTION_SIGNALS)
    for name, values in here.items():
        torch.testing.assert_close(values, there[name], atol=2e-6, rtol=1e-5, equal_nan=True)
        # One at a time or all together, to the last bit: a replay must decide as the live run did.
        assert torch.equal(torch.stack([row[name] for row in one]).nan_to_num(), values.nan_to_num())


def test_sums_over_a_large_vocabulary_are_made_in_parts() -> None:
    row = torch.randn(3 * PART + 5, generator=seeded(3))
    softmax, expected = Softmax(row[None].numpy()), row.double().softmax(-1)
    entropy = float(-(expected * expected.log()).sum())
    assert softmax.signals(0, 7, set(DISTRIBUTION_SIGNALS)) == pytest.approx(
        [entropy, float(expected.max()), float(expected[7])], rel=1e-5
    )
    np.testing.assert_allclose(softmax.probs(1.0)[0], expected, rtol=1e-5)


def test_the_same_seed_draws_the_same() -> None:
    row = torch.ones(1000)
    first, second = ([int(draw(row, generator)) for _ in range(5)] for generator in (seeded(1), seeded(1)))
    assert first == second
    assert len(set(first)) > 1


def test_a_sibling_on_the_same_device_is_the_generator_itself() -> None:
    generator = seeded(0)
    assert sibling(generator, torch.device("cpu")) is generator
    assert sibling(None, torch.device("cpu")) is None


def test_tokens_that_reach_top_p_exactly_are_enough() -> None:
    """transformers drops what begins where the sum is top_p already."""
    weights = np.array([0.25, 1.0, 0.25, 0.5], dtype=np.float32)
    for top_p, kept in ((0.5, [1]), (0.75, [1, 3])):
        found = _kept(np.log(weights), weights, 0, top_p)
        assert found is not None
        assert found.nonzero()[0].tolist() == kept
    assert _kept(np.log(weights), weights, 0, 0.8) is None, "one of two equal ones"


def test_a_temperature_beyond_float32_draws_from_what_is_allowed_alike():
    softmax = Softmax(np.array([[3.0, -np.inf, -5.0]], dtype=np.float32))
    np.testing.assert_array_equal(softmax.probs(1e308)[0], np.array([0.5, 0, 0.5], dtype=np.float32))
