from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from specctl.decoding.logits import device, judging
from specctl.decoding.logits.device import DeviceLogits, draw
from specctl.decoding.logits.judging import verify
from specctl.decoding.logits.logits import Verdict, verify_greedy
from specctl.decoding.sampling import Sampling
from specctl.profile.schema import Verification
from specctl.records import ExtraToken
from tests.support.enumeration import law_of, walk
from tests.support.toys import seeded
from tests.support.verdicts import verdict_on

BONUS, CORRECTION = ExtraToken.BONUS, ExtraToken.CORRECTION


@pytest.fixture(params=[True, False], ids=["on the host", "as on a device"])
def somewhere(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways to come to a verdict."""
    if not request.param:
        monkeypatch.setattr(judging, "on_host", lambda _: False)


@st.composite
def distribution_pairs(draw_value: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    """Two distributions over the same few tokens; zeros are common, as filters make them."""
    size = draw_value(st.integers(2, 8))
    weight = st.one_of(st.just(0.0), st.floats(1e-6, 1.0))
    rows = st.lists(weight, min_size=size, max_size=size).filter(lambda row: sum(row) > 0)
    return tuple(normalised(draw_value(rows)) for _ in range(2))  # type: ignore[return-value]


def normalised(weights: list[float]) -> torch.Tensor:
    row = torch.tensor(weights, dtype=torch.float64)
    return row / row.sum()


def forced(*kept: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Drafts of token 0 whose fate is certain: accepted where the target agrees, refused where it says 1."""
    draft = torch.tensor([[1.0, 0, 0]] * len(kept)).reshape(-1, 3)
    target = torch.tensor([[1.0, 0, 0] if keep else [0, 1.0, 0] for keep in kept] + [[0, 0, 1.0]])
    return torch.zeros(len(kept), dtype=torch.int64), draft, target


@given(distribution_pairs())
@settings(deadline=None, derandomize=True)
def test_accepting_and_correcting_adds_up_to_the_target(pair: tuple[torch.Tensor, torch.Tensor]) -> None:
    """min(p, q) + (1 - sum min(p, q)) * norm(max(p - q, 0)) = p."""
    target, drafted = pair
    overlap = torch.minimum(target, drafted)
    surplus = (target - drafted).clamp_min(0)
    refused = 1 - overlap.sum()
    residual = surplus / surplus.sum() if surplus.sum() > 0 else target
    torch.testing.assert_close(overlap + refused * residual, target, atol=1e-12, rtol=0)


@given(distribution_pairs(), st.integers(0, 2**32))
@settings(deadline=None, derandomize=True)
def test_only_tokens_the_target_can_say_come_out(pair: tuple[torch.Tensor, torch.Tensor], seed: int) -> None:
    target, drafted = (row.float() for row in pair)
    generator = seeded(seed)
    token = draw(drafted, generator)
    verdict = verify(token[None], drafted[None], torch.stack([target, target]), generator)
    first = int(token) if verdict.accepted else verdict.extra
    assert target[first] > 0
    assert target[verdict.extra] > 0
    if not verdict.accepted:
        assert verdict.extra != int(token), "a refused token has more draft than target probability"


PAIRS = {
    "overlapping": ([0.1, 0.2, 0.3, 0.4], [0.4, 0.3, 0.2, 0.1]),
    "nearly equal": ([0.25, 0.25, 0.25, 0.25], [0.24, 0.26, 0.25, 0.25]),
    "target narrower": ([0.5, 0.5, 0.0, 0.0], [0.25, 0.25, 0.25, 0.25]),
    "draft narrower": ([0.25, 0.25, 0.25, 0.25], [0.0, 0.5, 0.5, 0.0]),
    "disjoint": ([0.5, 0.5, 0.0, 0.0], [0.0, 0.0, 0.3, 0.7]),
}


SECOND = [0.1, 0.6, 0.3, 0.0]


@pytest.mark.usefixtures("somewhere")
@pytest.mark.parametrize(("target", "drafted"), PAIRS.values(), ids=PAIRS.keys())
def test_first_and_second_token_have_the_law_of_the_target(target: list[float], drafted: list[float]) -> None:
    """The law of `verify` itself: first tokens follow p; where the draft was kept, the next follows its own row."""
    rows, draft_row = torch.tensor([target, SECOND]), torch.tensor(drafted)

    def play() -> tuple[int, int | None]:
        token = device.pick(draft_row, torch.tensor(0.0))
        verdict = verify(token[None], draft_row[None], rows, None)
        return (int(token), verdict.extra) if verdict.accepted else (verdict.extra, None)

    found = law_of(walk(play))
    first, second = torch.zeros(4, dtype=torch.float64), torch.zeros(4, dtype=torch.float64)
    for (token, after), probability in found.items():  # type: ignore[misc]
        first[token] += probability
        if after is not None:
            second[after] += probability
    torch.testing.assert_close(first, torch.tensor(target).double(), atol=2e-7, rtol=0)
    kept = torch.tensor([target, drafted]).amin(0).sum()
    torch.testing.assert_close(second, kept * torch.tensor(SECOND).double(), atol=2e-7, rtol=0)


def test_so_have_tokens_that_are_sampled() -> None:
    """Through the race and the coins that a walk decides itself."""
    target, drafted = PAIRS["overlapping"]
    first_row, second_row, draft_row = torch.tensor(target), torch.tensor(SECOND), torch.tensor(drafted)
    rows = torch.stack([first_row, second_row])
    generator = seeded(11)
    first, second = torch.zeros(4), torch.zeros(4)
    for _ in range(3000):
        token = draw(draft_row, generator)
        verdict = verify(token[None], draft_row[None], rows, generator)
        first[int(token) if verdict.accepted else verdict.extra] += 1
        if verdict.accepted:
            second[verdict.extra] += 1
    for seen, wanted in ((first, first_row), (second, second_row)):
        possible = wanted > 0
        assert not seen[~possible].any()
        expected = wanted[possible].double() / wanted.double().sum() * seen.sum()
        assert chisquare(seen[possible].double(), expected).pvalue > 1e-3


@pytest.mark.parametrize("count", [1, 2, 7])
def test_equal_distributions_accept_everything(count: int) -> None:
    rows = Sampling(temperature=1).probs(torch.randn(count + 1, 16, generator=seeded(0)))
    for seed in range(50):
        generator = seeded(seed)
        tokens = torch.stack([draw(row, generator) for row in rows[:-1]])
        verdict = verify(tokens, rows[:-1], rows, generator)
        assert (verdict.accepted, verdict.kind) == (count, BONUS)


@pytest.mark.usefixtures("somewhere")
@pytest.mark.parametrize(
    ("kept", "verdict"),
    [
        ((), Verdict(0, 2, BONUS)),
        ((True,), Verdict(1, 2, BONUS)),
        ((False,), Verdict(0, 1, CORRECTION)),
        ((True, True, True), Verdict(3, 2, BONUS)),
        ((True, False, True), Verdict(1, 1, CORRECTION)),
        ((False, True, True), Verdict(0, 1, CORRECTION)),
    ],
)
def test_the_first_refusal_ends_the_block(kept: tuple[bool, ...], verdict: Verdict) -> None:
    tokens, drafted, target = forced(*kept)
    judged = kept[: verdict.accepted + 1]
    assert verify(tokens, drafted, target, seeded(0)) == replace(verdict, chances=tuple(map(float, judged)))
    assert verify_greedy(tokens.tolist(), target.argmax(-1).tolist()) == verdict


@pytest.mark.usefixtures("somewhere")
def test_a_residual_of_zero_falls_back_to_the_target() -> None:
    """Rounding can refuse a token where max(p - q, 0) is zero everywhere; the extra token is then drawn from p."""
    drafted = torch.tensor([[0.0, 0.0, 1.0]])
    target = torch.tensor([[0.0, 0.0, 0.5], [1.0, 0.0, 0.0]])  # a row whose sum was lost: never above the draft's
    verdicts = [verify(torch.tensor([2]), drafted, target, seeded(seed)) for seed in range(40)]
    refused = [verdict for verdict in verdicts if not verdict.accepted]
    assert refused
    assert {verdict.extra for verdict in refused} == {2}


@pytest.mark.usefixtures("somewhere")
def test_chances_are_those_of_the_judged_tokens() -> None:
    """min(1, p/q) of each drafted token, up to the first refusal: 0.2/0.8, 0.9/0.3 held at 1, 0.1/0.2."""
    drafted = torch.tensor([[0.8, 0.1, 0.1], [0.7, 0.3, 0.0], [0.8, 0.0, 0.2]])
    target = torch.tensor([[0.2, 0.4, 0.4], [0.1, 0.9, 0.0], [0.9, 0.0, 0.1], [0.0, 1.0, 0.0]])
    found = [verify(torch.tensor([0, 1, 2]), drafted, target, seeded(seed)) for seed in range(60)]
    assert {verdict.accepted for verdict in found} == {0, 2, 3}
    for verdict in found:
        assert verdict.chances == pytest.approx((0.25, 1.0, 0.5)[: verdict.accepted + 1])


@pytest.mark.usefixtures("somewhere")
def test_an_empty_block_is_a_draw_from_the_target() -> None:
    row = torch.tensor([[0.2, 0.0, 0.8]])
    generator = seeded(5)
    verdicts = [verify(torch.empty(0, dtype=torch.int64), row[:0], row, generator) for _ in range(2000)]
    assert {(verdict.accepted, verdict.kind) for verdict in verdicts} == {(0, BONUS)}
    seen = [sum(verdict.extra == token for verdict in verdicts) for token in range(3)]
    assert seen[1] == 0
    assert chisquare([seen[0], seen[2]], [400, 1600]).pvalue > 1e-3


@given(st.integers(0, 2**32), st.integers(0, 6), st.sampled_from([0.5, 3.0]))
@settings(deadline=None, derandomize=True)
def test_the_host_and_a_device_come_to_the_same_verdict(seed: int, count: int, spread: float) -> None:
    rows = spread * torch.randn(2, count + 1, 40, generator=seeded(seed))
    sampling = Sampling(1.0, top_p=0.9)
    target, drafted = sampling.probs(rows[0]), sampling.probs(rows.mean(0))[:count]
    tokens = draw(drafted, seeded(seed + 1))
    found = verify(tokens, drafted, target, seeded(seed + 2))
    assert found == verdict_on(DeviceLogits(target), tokens, drafted, seeded(seed + 2))


@pytest.mark.usefixtures("somewhere")
@pytest.mark.parametrize("verification", ["token", "block"])
@pytest.mark.parametrize("kept", [(True,), (False,), (True, True, True), (True, False, True)])
def test_without_a_row_behind_the_draft_nothing_follows_it(kept: tuple[bool, ...], verification: Verification) -> None:
    tokens, drafted, target = forced(*kept)
    whole = verify(tokens, drafted, target, seeded(0), verification)
    found = verify(tokens, drafted, target[:-1], seeded(0), verification)
    if all(kept):
        assert found == replace(whole, extra=None, kind=None)
        assert verify_greedy(tokens.tolist(), target[:-1].argmax(-1).tolist()) == Verdict(len(kept), None, None)
    else:
        assert found == whole
        assert verify_greedy(tokens.tolist(), target[:-1].argmax(-1).tolist()) == replace(whole, chances=None)


@given(st.integers(0, 2**32), st.integers(1, 6), st.sampled_from(["token", "block"]))
@settings(deadline=None, derandomize=True)
def test_without_a_row_behind_the_draft_host_and_device_agree(
    seed: int, count: int, verification: Verification
) -> None:
    rows = torch.randn(2, count, 40, generator=seeded(seed))
    target, drafted = Sampling(1.0).probs(rows[0]), Sampling(1.0).probs(rows.mean(0))
    tokens = draw(drafted, seeded(seed + 1))
    found = verify(tokens, drafted, target, seeded(seed + 2), verification)
    there = verdict_on(DeviceLogits(target), tokens, drafted, seeded(seed + 2), verification)
    assert replace(found, chances=None) == replace(there, chances=None)
    assert found.chances == pytest.approx(there.chances, abs=1e-4)
