"""What drafts may lose is bounded, on simulated times, and a draft that becomes useful is found again."""

import random
from collections.abc import Callable

import pytest

from specctl.policies.cost_optimal import CostOptimal
from specctl.policies.draft_account import ADVANCE, ALLOWANCE, MOST, SHARE, DraftAccount
from specctl.policies.round_times import FEW, RoundTimes
from specctl.records import DraftStep, ExtraToken, Round, StopReason

PASS, STEP, CATCHING_UP, PROMPT = 8.0, 1.0, 0.01, 30


class Simulated:
    """Texts of 96 tokens with a draft that is right with some probability, and what they take."""

    def __init__(
        self,
        policy: CostOptimal,
        right: Callable[[int], float],
        step: float = STEP,
        wider: float = 0.0,
        cold: float = 1.0,
        seed: int = 3,
        start: float = 0.0,
        each: float = 0.0,
    ) -> None:
        self.policy, self._right, self._step, self._wider, self._cold = policy, right, step, wider, cold
        self._each = each  # of a pass, for each draft token
        self._start = start  # by what share of it the run's first round takes longer, and later ones ever less
        self._chance = random.Random(seed)
        self._round_drafted = False
        self.tokens = self.drafted = self.rounds = 0
        self.seconds = 0.0

    def write(self, texts: int, tokens: int = 96) -> "Simulated":
        for _ in range(texts):
            read = PROMPT if self.policy.draft_limit() else 0
            self.policy.reset()
            written = 0
            while written < tokens:
                written += self._round(PROMPT + written, read)
                if self._round_drafted:
                    read = PROMPT + written
        return self

    def _round(self, context: int, read: int) -> int:
        count = 0
        while count < self.policy.draft_limit():
            count += 1
            if self.policy.should_stop(DraftStep(count, token=5, entropy=0.5, top_prob=0.8)):
                break
        right = self._right(self.tokens)
        accepted = next((place for place in range(count) if self._chance.random() >= right), count)
        step = self._step * (1.0 if self._round_drafted else self._cold)
        drafting = step * count + (CATCHING_UP * (context - read) if count else 0.0)
        steps = tuple(DraftStep(place + 1, token=5, entropy=0.5, top_prob=0.8) for place in range(count))
        kind = ExtraToken.BONUS if accepted == count else ExtraToken.CORRECTION
        slow = 1 + self._start * 0.8**self.rounds
        drafting, verifying = slow * drafting, slow * (PASS + self._wider * bool(count) + self._each * count)
        times = drafting, verifying, drafting + verifying
        self.policy.observe(Round(0, steps, accepted, 9, kind, StopReason.POLICY, None, *times, context=context))
        self.tokens += accepted + 1
        self.seconds += drafting + verifying
        self._round_drafted = bool(count)
        self.drafted += bool(count)
        self.rounds += 1
        return accepted + 1

    @property
    def of_none(self) -> float:
        """The speed, as a share of the target's alone."""
        return self.tokens * PASS / self.seconds


@pytest.mark.parametrize("step", [0.2, 1.0, 2.5, 8.0])
def test_a_draft_that_is_never_right_takes_no_more_than_the_bound(step: float) -> None:
    played = Simulated(CostOptimal(), lambda _: 0.0, step).write(60)
    passes = played.tokens
    lost = (played.seconds - passes * PASS) / PASS
    # The price of the first drafts is known only when they were made: they may cost their own time more.
    assert lost <= max(ALLOWANCE, SHARE * passes + ALLOWANCE - ADVANCE) + 2 * step / PASS
    assert played.of_none > 0.985
    assert played.drafted > 3, "it still probes"


@pytest.mark.parametrize("step", [0.2, 1.0])
def test_the_very_first_text_takes_no_more_than_the_bound(step: float) -> None:
    assert Simulated(CostOptimal(), lambda _: 0.0, step).write(1).of_none > 0.98


def test_a_pass_that_a_draft_makes_longer_is_paid_for_from_the_first_one_on() -> None:
    """What the first rejected draft lost is booked when the target's own time is known."""
    played = Simulated(CostOptimal(), lambda _: 0.0, wider=0.4 * PASS).write(1)
    assert (played.seconds - played.tokens * PASS) / PASS < ALLOWANCE + 0.7


@pytest.mark.parametrize("right", [0.3, 0.7, 0.9])
def test_passes_that_take_as_long_for_each_token_as_for_the_first_are_not_made_wider(right: float) -> None:
    """Such are the kernels of llama.cpp on a CPU."""
    played = Simulated(CostOptimal(), lambda _: right, wider=0.2 * PASS, each=1.1 * PASS).write(40)
    assert played.of_none > 0.985


@pytest.mark.parametrize(("step", "least"), [(1.0, 38), (1.5, 36)])
def test_a_first_draft_that_is_slow_as_first_ones_are_keeps_few_good_drafts_away(step: float, least: int) -> None:
    """Steps from cold caches take three times as long as those behind a draft. Some texts begin with rejections."""
    found = 0
    for seed in range(40):
        played = Simulated(CostOptimal(), lambda _: 0.7, step, wider=0.3 * PASS, cold=3.0, seed=seed).write(2)
        found += played.drafted > 0.6 * played.rounds
    assert found >= least


@pytest.mark.parametrize(("start", "least"), [(0.0, 38), (1.0, 37)])
def test_few_single_texts_go_without_a_good_draft_for_what_a_run_begins_with(start: float, least: int) -> None:
    """Its passes are slow and its first drafts may be wrong; in a run of one text nothing is learned for another."""
    found = 0
    for seed in range(40):
        played = Simulated(CostOptimal(), lambda _: 0.75, wider=0.3 * PASS, cold=2.0, seed=seed, start=start).write(1)
        found += played.drafted > 0.6 * played.rounds
    assert found >= least


@pytest.mark.parametrize("cold", [1.0, 3.0])
def test_nor_is_a_bad_one_made_often_for_it(cold: float) -> None:
    played = Simulated(CostOptimal(), lambda _: 0.0, wider=0.3 * PASS, cold=cold).write(40)
    assert played.of_none > 0.98


def test_what_the_first_rounds_add_is_there_from_the_beginning() -> None:
    account = DraftAccount()
    account.book(0.0, probe=False, rounds=round(ADVANCE / SHARE))
    assert account.balance == pytest.approx(ALLOWANCE)
    account.book(0.0, probe=False, rounds=10)
    assert account.balance == pytest.approx(ALLOWANCE + 10 * SHARE)


@pytest.mark.parametrize("right", [0.1, 0.15])
def test_a_draft_that_is_right_too_seldom_costs_next_to_nothing(right: float) -> None:
    """At a price of 1/8 pass a token, which it just earns or nearly."""
    assert Simulated(CostOptimal(), lambda _: right).write(40).of_none > 0.98


def test_a_text_whose_second_half_the_draft_knows_is_drafted_again() -> None:
    half = 1500
    played = Simulated(CostOptimal(), lambda written: 0.9 * (written >= half))
    played.write(1, half)
    before = played.drafted
    assert played.of_none > 0.98
    played.seconds, played.tokens = 0.0, half
    played.write(1, half)
    assert played.drafted > before + 100
    assert (played.tokens - half) * PASS / played.seconds > 1.7


def test_a_draft_that_stops_being_right_is_not_made_for_long() -> None:
    played = Simulated(CostOptimal(), lambda written: 0.9 * (written < 1500)).write(1, 1500)
    saved, played.seconds, played.tokens = played.of_none, 0.0, 1500
    played.write(1, 1500)
    assert saved > 1.5
    assert played.seconds / PASS - (played.tokens - 1500) < MOST + SHARE * 1500


def test_probes_wait_the_longer_the_more_they_lost() -> None:
    account = DraftAccount()

    def wait() -> int:
        rounds = 0
        while not account.probes:
            account.book(0.0, probe=False)
            rounds += 1
        return rounds

    waits = []
    for loss in (0.2, 0.2, 0.4):
        account.book(-loss, probe=True)
        waits.append(wait())
    assert waits == pytest.approx([0.2 / SHARE, 1.5 * 0.2 / SHARE, 2.25 * 0.4 / SHARE], abs=1)
    account.book(0.8, probe=True)
    assert account.probes, "it goes on while it saves"
    account.book(-0.3, probe=True)
    assert account.probes, "what it saved before pays for it"


def test_what_catching_up_takes_is_no_price_of_a_draft_step_but_of_the_draft() -> None:
    def learned(unread: int, drafting: float) -> RoundTimes:
        times = RoundTimes(0.125)
        for _ in range(20):
            times.learn(2, 2, 2.0, 8.0, 2, 0)
        times.learn(2, 2, drafting, 8.0, 2, unread)
        return times

    usual, late = learned(0, 2.0), learned(100, 2.0 + 6.0)
    assert late.price == pytest.approx(usual.price, rel=0.02)
    assert late.catching_up(100) == pytest.approx(6.0 / 8.0, rel=0.1)
    assert late.catching_up(FEW) == 0


def test_a_clock_may_be_too_coarse_for_a_draft() -> None:
    times = RoundTimes(0.125)
    for drafting in (0.0, 0.0, 2.0, 0.0, 2.0):
        times.learn(1, 1, drafting, 8.0, 2, 0)
    assert 0 <= times.price < 1
