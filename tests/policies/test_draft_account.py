"""What drafts may lose is bounded, on simulated times, and a draft that becomes useful is found again."""

import random
from collections.abc import Callable

import pytest

from specctl.policies.draft_account import ADVANCE, ALLOWANCE, MOST, SHARE, DraftAccount
from specctl.policies.draft_allowance import RESTING, DraftAllowance
from specctl.policies.round_times import FEW, RoundTimes
from specctl.policies.rules.cost_optimal import CostOptimal
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
        reading: float = CATCHING_UP,
    ) -> None:
        self.policy, self._right, self._step, self._wider, self._reading = policy, right, step, wider, reading
        self._chance = random.Random(3)
        self.tokens = self.drafted = self.begun = 0
        self.seconds = 0.0

    def write(self, texts: int, tokens: int = 96) -> "Simulated":
        for _ in range(texts):
            self.policy.reset()
            read = PROMPT if self.policy.draft_limit() else 0
            self.seconds += self._reading * read
            self.begun += read > 0
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
        drafting = self._step * count + (self._reading * (context - read) if count else 0.0)
        steps = tuple(DraftStep(place + 1, token=5, entropy=0.5, top_prob=0.8) for place in range(count))
        kind = ExtraToken.BONUS if accepted == count else ExtraToken.CORRECTION
        verifying = PASS + self._wider * bool(count)
        times = drafting, verifying, drafting + verifying
        self.policy.observe(Round(0, steps, accepted, 9, kind, StopReason.POLICY, None, *times, context=context))
        self.tokens += accepted + 1
        self.seconds += drafting + verifying
        self._round_drafted = bool(count)
        self.drafted += bool(count)
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


@pytest.mark.parametrize("reading", [0.5, 20.0])
def test_prompts_that_take_the_draft_longer_than_it_saves_are_read_a_few_times(reading: float) -> None:
    """8 tokens of each text, all of them as the draft says. A prompt of 30 takes it 2 passes, or 75."""
    played = Simulated(CostOptimal(), lambda _: 1.0, reading=reading).write(40, 8)
    prompt = reading * PROMPT / PASS
    assert (played.seconds - played.tokens * PASS) / PASS <= 3 * prompt + ALLOWANCE
    assert played.begun <= 3 or played.of_none > 1


@pytest.mark.parametrize("reading", [0.01, 0.1])
def test_prompts_that_the_draft_reads_fast_are_read_from_the_first_text_on(reading: float) -> None:
    played = Simulated(CostOptimal(), lambda _: 0.8, reading=reading).write(30, 32)
    assert played.begun == 29, "in the second text it begins a round later, which tells what reading takes"
    assert played.of_none > 1.7


@pytest.mark.parametrize("step", [0.2, 1.0])
def test_the_very_first_text_takes_no_more_than_the_bound(step: float) -> None:
    assert Simulated(CostOptimal(), lambda _: 0.0, step).write(1).of_none > 0.98


def test_a_pass_that_a_draft_makes_longer_is_paid_for_from_the_first_one_on() -> None:
    """What the first rejected draft lost is booked when the target's own time is known."""
    played = Simulated(CostOptimal(), lambda _: 0.0, wider=0.4 * PASS).write(1)
    assert (played.seconds - played.tokens * PASS) / PASS < ALLOWANCE + 0.7


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
    steps = tuple(DraftStep(place + 1, 5) for place in range(2))

    def told(unread: int, drafting: float) -> RoundTimes:
        times = RoundTimes(0.125)
        for _ in range(20):
            round_ = Round(0, steps, 1, 9, ExtraToken.CORRECTION, StopReason.POLICY, None, 2.0, 8.0, 10.0)
            times.learn(round_, 2, 0)
        late = Round(0, steps, 1, 9, ExtraToken.CORRECTION, StopReason.POLICY, None, drafting, 8.0, 8.0 + drafting)
        times.learn(late, 2, unread)
        return times

    usual, late = told(0, 2.0), told(100, 2.0 + 6.0)
    assert late.price == pytest.approx(usual.price, rel=0.02)
    assert late.catching_up(100) == pytest.approx(6.0 / 8.0, rel=0.1)
    assert late.catching_up(FEW) == 0


def test_a_clock_may_be_too_coarse_for_a_draft() -> None:
    times = RoundTimes(0.125)
    for drafting in (0.0, 0.0, 2.0, 0.0, 2.0):
        steps = (DraftStep(1, 5),)
        round_ = Round(0, steps, 1, 9, ExtraToken.BONUS, StopReason.POLICY, None, drafting, 8.0, 8.0 + drafting)
        times.learn(round_, 2, 0)
    assert 0 <= times.price < 1


def timed(drafting: float, drafted: int = 2, accepted: int = 1, **more: int) -> Round:
    """A round whose pass takes 8 seconds; without a draft, one of the target alone."""
    steps = tuple(DraftStep(place + 1, 5, 0.5, 0.8) for place in range(drafted))
    kind = ExtraToken.BONUS if accepted == drafted else ExtraToken.CORRECTION
    return Round(0, steps, accepted, 9, kind, StopReason.POLICY, None, drafting, PASS, PASS + drafting, **more)


def learned(*readings: tuple[int, float]) -> RoundTimes:
    """The times of drafts of two tokens, a quarter of a pass each, some of which read so many tokens in such a time."""
    times = RoundTimes(0.125)
    for unread, seconds in [(0, 0.0)] * 20 + list(readings):
        times.learn(timed(2.0 + seconds), 2, unread)
    for _ in range(4):
        times.learn(timed(0.0, 0, 0), 1, 0)
    return times


def test_what_short_readings_took_says_nothing_of_long_ones() -> None:
    short = [(8, 0.0)] * 3
    assert learned(*short).catching_up(300) > 1, "more tokens take longer"
    assert learned().catching_up(300) > 5 * learned().catching_up(FEW + 1)
    times = learned(*short, (300, 240.0))
    assert times.catching_up(300) == pytest.approx(30, rel=0.05)
    assert times.catching_up(8) < 1


def test_what_a_round_read_is_booked_as_it_was_timed() -> None:
    times = learned((100, 8.0))
    times.learn(timed(2.0 + 16.0), 2, 100)
    assert times.caught_up(100) == pytest.approx(2.0, rel=0.1)
    assert times.caught_up(100) < 1.5, "the next one is not known yet"


def test_a_long_time_without_drafts_makes_no_reading_cheaper() -> None:
    times = learned((300, 240.0))
    allowance = DraftAllowance(times, DraftAccount(3.5), idle=311)
    assert allowance.longest(False, FEW) > 0
    assert allowance.longest(False, 300) == 0


def test_a_reading_is_booked_even_if_drafts_have_saved_enough_for_any() -> None:
    times = learned((300, 240.0))
    allowance = DraftAllowance(times, DraftAccount(10.0), probing=False)
    assert allowance.longest(True, 300) > 0
    allowance.book(2, 2, 2.0, 300)
    assert allowance.account.balance < -15
    assert allowance.longest(True, 0) > 0, "the text has been read: its drafts go on"
    allowance.begin()
    assert allowance.longest(True, 0) == 0, "the next one's do not"


def test_a_first_draft_that_fails_is_booked_with_what_it_read_and_the_next_one_waits() -> None:
    times = RoundTimes(0.125)
    allowance = DraftAllowance(times, DraftAccount(3.0))
    assert allowance.longest(False, 200) > 0
    allowance.book(1, 1, 0.0, 200)
    for _ in range(RESTING):
        allowance.book(0, 0, 0.0, 0)
    assert allowance.account.balance < 3.0 - 1.0
    assert not allowance.account.probes


@pytest.mark.parametrize("first", [0, 2])
def test_the_pass_behind_a_texts_first_draft_is_none_of_the_target_alone(first: int) -> None:
    policy = CostOptimal()
    policy._times._drafted_before = False
    policy.observe(timed(1.0 * first, first, 0, context=30))
    policy.observe(timed(0.0, 0, 0, context=31))
    assert policy._times.knows_target is (first == 0)
