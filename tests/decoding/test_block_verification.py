"""Block verification against the paper's algorithm in fractions, in the whole loop, and beside rules that are wrong."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import product
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from law_table import DRAFT, MID, PLAIN, enumerate_decode, error, expected_law

from specctl.decoding.composition import build_drafter
from specctl.decoding.draft import Draft, Drafter
from specctl.decoding.drafters import ModelDrafter
from specctl.decoding.hierarchy import PreVerifiedDrafter
from specctl.decoding.logits import device, host, judging
from specctl.decoding.logits.device import DeviceLogits, draw
from specctl.decoding.logits.host import Acceptance, Floats, by_block, by_token, passing
from specctl.decoding.logits.judging import verify
from specctl.decoding.logits.logits import Verdict
from specctl.decoding.sampling import Sampling
from specctl.decoding.session import Session
from specctl.models.loading.assembly import load_pair
from specctl.policies import Setting
from specctl.policies.published import Constant, Svip
from specctl.profile import resolve
from specctl.profile.schema import Verification
from tests.support.block_in_fractions import Rows, in_fractions
from tests.support.enumeration import COINS, Tossed, law_of, walk
from tests.support.toys import TableRunner, seeded
from tests.support.verdicts import verdict_on

BLOCK = replace(PLAIN, verification="block")
EXACT, BIASED = 3e-7, 3e-4


@pytest.fixture(params=[True, False], ids=["on the host", "as on a device"])
def somewhere(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways to come to a verdict."""
    if not request.param:
        monkeypatch.setattr(judging, "on_host", lambda _: False)


def a_block(seed: int) -> tuple[list[int], Rows, Rows]:
    """A draft of one to four of three tokens; zeros and equal rows are common."""
    random = Random(seed)

    def row() -> list[Fraction]:
        parts = [random.randint(0, 4) for _ in range(3)]
        return [Fraction(part, sum(parts)) for part in parts] if any(parts) else row()

    count = random.randint(1, 4)
    draft = [row() for _ in range(count)]
    target = [*(random.choice([own, row(), row()]) for own in draft), row()]
    return [random.choices(range(3), [float(q) for q in own])[0] for own in draft], draft, target


def as_tensors(tokens: Sequence[int], draft: Rows, target: Rows) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows = (torch.tensor([[float(number) for number in row] for row in part]) for part in (draft, target))
    return (torch.tensor(tokens), *rows)  # type: ignore[return-value]


@pytest.mark.usefixtures("somewhere")
@pytest.mark.parametrize("seed", range(40))
def test_of_a_given_block_the_verdict_has_the_law_of_the_paper(seed: int) -> None:
    block = a_block(seed)
    tensors = as_tensors(*block)

    def play() -> tuple[int, int]:
        verdict = verify(*tensors, None, "block")
        return verdict.accepted, verdict.extra

    found, expected = law_of(walk(play)), in_fractions(*block)
    assert found.keys() >= expected.keys()
    for outcome, probability in found.items():
        assert probability == pytest.approx(float(expected.get(outcome, 0)), abs=EXACT)  # type: ignore[call-overload]


def accepted_on_average(rule: Verification) -> float:
    """Of two tokens of the paper's example, drawn from (2/3, 1/3) and verified by (1/3, 2/3)."""
    draft, target = torch.tensor([[2 / 3, 1 / 3]] * 2), torch.tensor([[1 / 3, 2 / 3]] * 3)

    def play() -> int:
        tokens = torch.stack([device.pick(row, torch.tensor(0.0)) for row in draft])
        return verify(tokens, draft, target, None, rule).accepted

    return sum(accepted * probability for accepted, probability in walk(play))


@pytest.mark.usefixtures("somewhere")
def test_the_example_of_the_paper() -> None:
    assert accepted_on_average("token") == pytest.approx(10 / 9, abs=1e-6)
    assert accepted_on_average("block") == pytest.approx(11 / 9, abs=1e-6)


@pytest.mark.usefixtures("somewhere")
@pytest.mark.parametrize("rule", ["token", "block"])
def test_a_target_that_is_certain_keeps_what_it_would_say(rule: Verification) -> None:
    """One-hot target: tokens are kept up to the first that differs, whatever the coins."""
    draft, target = torch.full((3, 3), 1 / 3), torch.eye(3)[[0, 1, 2, 0]]
    for tokens, verdict in (((0, 1, 2), (3, 0)), ((0, 2, 2), (1, 1)), ((1, 1, 2), (0, 0))):
        for seed in range(20):
            found = verify(torch.tensor(tokens), draft, target, seeded(seed), rule)
            assert (found.accepted, found.extra) == verdict


@pytest.mark.usefixtures("somewhere")
def test_after_a_draft_without_chance_both_rules_follow_the_target() -> None:
    """One-hot draft: both give the target's law, of the first token and of the second behind the drafted first."""
    draft, target = torch.eye(3)[[0, 1]], torch.tensor([[0.5, 0.3, 0.2], [0.2, 0.6, 0.2], [0.1, 0.1, 0.8]])

    def play(rule: Verification) -> tuple[int, ...]:
        verdict = verify(torch.tensor([0, 1]), draft, target, None, rule)
        return (*(0, 1)[: verdict.accepted], verdict.extra)

    by_one, by_both = (law_of(walk(lambda rule=rule: play(rule))) for rule in ("token", "block"))  # type: ignore[misc]
    for found in (by_one, by_both):
        firsts = [sum(p for text, p in found.items() if text[0] == token) for token in range(3)]  # type: ignore[index]
        assert firsts == pytest.approx([0.5, 0.3, 0.2], abs=1e-6)
        seconds = [sum(p for text, p in found.items() if text[:2] == (0, token)) for token in range(3)]  # type: ignore[index]
        assert seconds == pytest.approx([0.1, 0.3, 0.1], abs=1e-6)


# In the whole loop; every policy and more hierarchies are in test_law.py.


class Verifies(PreVerifiedDrafter):
    """A middle model that verifies in its own way, whatever the target does."""

    def __init__(self, rule: Verification) -> None:
        inner = ModelDrafter(TableRunner(DRAFT), Constant(2))
        super().__init__(inner, TableRunner(MID), Svip(c=1.0, threshold=0.87, max_draft=3))
        self._rule = rule

    def begin(self, sampling: Sampling, *others: object) -> None:
        super().begin(replace(sampling, verification=self._rule), *others)  # type: ignore[arg-type]


@pytest.mark.parametrize("inner", ["token", "block"])
@pytest.mark.parametrize("outer", ["token", "block"])
@pytest.mark.representatives("token-block", "block-token")
def test_levels_may_verify_in_different_ways(inner: Verification, outer: Verification) -> None:
    sampling = replace(PLAIN, verification=outer)
    found = enumerate_decode(lambda: Verifies(inner), sampling, length=3, limit=4)
    assert error(found, expected_law(sampling, length=3)) < EXACT
    assert found.stops >= {"policy", "budget", "eos"}


def three_at_once() -> Drafter:
    return ModelDrafter(TableRunner(DRAFT), Constant(3))


Rule = Callable[[Sequence[float], Sequence[float], Floats, Floats, Sequence[float]], Acceptance]


def breaks_at_the_first_failure(
    target_of: Sequence[float],
    draft_of: Sequence[float],
    draft: Floats,
    target: Floats,
    coins: Sequence[float],
    _: None,
) -> Acceptance:
    """Unlawful on purpose: no beginning is looked at behind one that did not pass."""
    weights, chances = passing(target_of, draft_of, draft, target)
    accepted = int((np.array(coins) < np.array(chances)).cumprod().sum())
    return Acceptance(accepted, weights[accepted], chances)


def forgets_the_weight(
    target_of: Sequence[float],
    draft_of: Sequence[float],
    draft: Floats,
    target: Floats,
    coins: Sequence[float],
    _: None,
) -> Acceptance:
    """Unlawful on purpose: the correction is drawn as after the rejection of a single token."""
    return by_block(target_of, draft_of, draft, target, coins)._replace(weight=1.0)


def corrects_as_a_block(
    target_of: Sequence[float],
    draft_of: Sequence[float],
    draft: Floats,
    target: Floats,
    coins: Sequence[float],
    _: None,
) -> Acceptance:
    """Unlawful on purpose: tokens are kept one by one, and the correction is that of a block."""
    kept, (weights, _) = by_token(target_of, draft_of, coins), passing(target_of, draft_of, draft, target)
    return kept._replace(weight=weights[kept.accepted])


@pytest.mark.parametrize("wrong", [breaks_at_the_first_failure, forgets_the_weight, corrects_as_a_block])
def test_a_wrong_rule_is_caught(wrong: Rule, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "by_block", wrong)
    found = enumerate_decode(three_at_once, BLOCK)
    assert error(found, expected_law(BLOCK)) > BIASED


@pytest.mark.parametrize("shared", [False, True])
def test_one_coin_for_two_tokens_is_caught(shared: bool) -> None:
    """Coins of 21 values decide as uniform ones would, for all that they are compared with is a multiple of 1/21."""
    first_draft, first_target = [1 / 2, 1 / 2], [1 / 4, 3 / 4]
    next_draft, next_target = [[1 / 8, 7 / 8], [1 / 2, 1 / 2]], [[3 / 4, 1 / 4], [1 / 2, 1 / 2]]  # by the first token

    def drawn(weights: Sequence[float]) -> int:
        return int(device.pick(torch.tensor(weights), torch.tensor(0.0)))

    def coin() -> int:
        return round((drawn([1.0] * 21) + 0.5) / 21 * COINS)

    def play() -> tuple[int, ...]:
        first = drawn(first_draft)
        draft = torch.tensor([first_draft, next_draft[first]])
        target = torch.tensor([first_target, next_target[first], [1 / 2, 1 / 2]])
        tokens = [first, drawn(next_draft[first])]
        coins = [coin()] * 2 if shared else [coin(), coin()]
        verdict = host.verdict(Draft(tokens, draft.numpy(), (), None), target.numpy(), Tossed(coins), "block")
        text = (*tokens[: verdict.accepted], verdict.extra)
        return text[:2] if len(text) > 1 else (*text, drawn(next_target[text[0]]))  # then the target writes alone

    found = law_of(walk(play))
    wanted = {(0, 0): 3 / 16, (0, 1): 1 / 16, (1, 0): 3 / 8, (1, 1): 3 / 8}
    wrong = max(abs(found[text] - wanted[text]) for text in wanted)
    assert (wrong > BIASED) if shared else (wrong < EXACT)


# Numbers.


@st.composite
def wild_blocks(draw_value: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Drafts of up to 40 tokens of which the verifier thinks up to a million times more or less than the draft."""
    count = draw_value(st.integers(1, 40))
    generator = seeded(draw_value(st.integers(0, 2**32)))
    scores = torch.randn(2, count + 1, 12, generator=generator) * draw_value(st.sampled_from([0.1, 2.0, 7.0]))
    draft, target = scores[0, :count].softmax(-1), scores[1].softmax(-1)
    return torch.randint(12, (count,), generator=generator), draft, target


def on_device(
    tokens: torch.Tensor, draft: torch.Tensor, target: torch.Tensor, generator: torch.Generator, rule: Verification
) -> Verdict:
    return verdict_on(DeviceLogits(target), tokens, draft, generator, rule)


def arrays(tokens: torch.Tensor, draft: torch.Tensor, target: torch.Tensor) -> tuple[Floats, Floats, Floats, Floats]:
    places = torch.arange(len(tokens))
    of_tokens = target[places, tokens].numpy(), draft[places, tokens].numpy()
    return (*of_tokens, draft.numpy(), target.numpy())


@given(wild_blocks())
@settings(deadline=None, derandomize=True)
def test_wild_ratios_leave_a_law(block: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
    """The step of the proof at every place: sum min(w p, q) + (1 - sum min(w p, q)) h = w."""
    numbers = arrays(*block)
    weights, chances = map(np.array, passing(*numbers))
    for found in (weights, chances):
        assert ((found >= 0) & (found <= 1)).all()
    *_, draft, target = (part.astype(np.float64) for part in numbers)
    further = np.minimum(weights[1:-1, None] * target[1:-1], draft[1:]).sum(-1)  # (K - 1,)
    assert further + (1 - further) * chances[:-1] == pytest.approx(weights[1:-1], abs=1e-6)
    for form in (verify, on_device):
        verdict = form(*block, seeded(3), "block")
        assert block[2][verdict.accepted, verdict.extra] > 0
        assert verdict.chances is not None
        assert all(0 <= chance <= 1 for chance in verdict.chances)


@given(wild_blocks())
@settings(deadline=None, derandomize=True)
def test_the_walk_of_a_device_is_the_product_of_the_host(
    block: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    coins = torch.rand(len(block[0]), generator=seeded(1))
    numbers = arrays(*block)
    here = by_block(*numbers, coins.tolist())
    target_of, draft_of, draft, target = map(torch.from_numpy, numbers)

    def surplus(weights: torch.Tensor) -> torch.Tensor:
        return (weights[:, None] * target[1 : len(coins)] - draft[1:]).clamp_min(0).sum(-1)

    there = device.by_block(target_of, draft_of, coins, surplus)
    assert int(there.accepted) == here.accepted
    assert float(there.weight) == pytest.approx(here.weight, rel=1e-6)
    assert there.chances.tolist() == pytest.approx(here.chances, rel=1e-6, abs=1e-9)


@given(st.integers(0, 2**32), st.integers(0, 6), st.sampled_from([0.5, 3.0]))
@settings(deadline=None, derandomize=True)
def test_the_host_and_a_device_come_to_the_same_verdict(seed: int, count: int, spread: float) -> None:
    rows = spread * torch.randn(2, count + 1, 40, generator=seeded(seed))
    sampling = Sampling(1.0, top_p=0.9)
    target, drafted = sampling.probs(rows[0]), sampling.probs(rows.mean(0))[:count]
    tokens = draw(drafted, seeded(seed + 1))
    here, there = (form(tokens, drafted, target, seeded(seed + 2), "block") for form in (verify, on_device))
    assert (here.accepted, here.extra, here.kind) == (there.accepted, there.extra, there.kind)
    assert here.chances == pytest.approx(there.chances, rel=1e-5, abs=1e-7)


@pytest.mark.usefixtures("somewhere")
@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("seed", range(8))
def test_chances_are_those_of_keeping_one_more(rule: Verification, seed: int) -> None:
    """Given the block, of each token that of being kept if those before it are: what the verdicts' own law says."""
    tensors = as_tensors(*a_block(seed))
    verdicts: list[tuple[Verdict, float]] = list(walk(lambda: verify(*tensors, None, rule)))
    at_least = [
        sum(probability for verdict, probability in verdicts if verdict.accepted >= kept)
        for kept in range(len(tensors[0]) + 1)
    ]
    for verdict, _ in verdicts:
        assert verdict.chances is not None
        assert len(verdict.chances) == min(verdict.accepted + 1, len(tensors[0]))
        for place, chance in enumerate(verdict.chances):
            assert chance == pytest.approx(at_least[place + 1] / at_least[place], abs=1e-6)


# On the embedded pair.

OPENINGS = ("Once upon a time", "Tom has 3 red apples and buys", "The little dog was sad because", "One day, Lily")


@pytest.mark.exhaustive
def test_more_of_the_same_drafts_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds of ten draft tokens, each judged by both rules; and the same seeds answered under either."""
    profile = resolve("embedded", overrides=["engine=eager", "sampling.temperature=0.7"]).profile
    pair = load_pair(profile)
    expected: list[tuple[float, float]] = []  # accepted tokens of a draft by single tokens and as a block, on average

    def by_both(*numbers: Any) -> Acceptance:
        target_of, draft_of, *_, coins, _ = numbers
        kept = by_block(*numbers)
        found = (float(np.cumprod(one.chances).sum()) for one in (by_token(target_of, draft_of, coins), kept))
        expected.append(tuple(found))  # type: ignore[arg-type]
        return kept

    monkeypatch.setattr(host, "by_block", by_both)
    session = Session(pair, build_drafter(pair, Setting.of({"name": "constant", "draft_length": 10})))
    accepted = {"token": 0.0, "block": 0.0}
    for rule in accepted:
        rounds = [
            round_
            for seed, opening in product(range(3), OPENINGS)
            for round_ in session.generate(
                pair.tokenizer.encode(opening),
                profile.sampling.model_copy(update={"seed": seed, "max_new_tokens": 64, "verification": rule}),
            ).rounds
        ]
        accepted[rule] = sum(round_.accepted for round_ in rounds) / len(rounds)

    by_one, by_many = np.array(expected).T
    gains = by_many - by_one
    error = gains.std() / len(gains) ** 0.5
    assert gains.mean() > max(0.1, 3 * error)
    assert accepted["block"] > accepted["token"]
