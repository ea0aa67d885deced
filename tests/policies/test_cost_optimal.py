"""The rule that learns what a draft is worth and what it costs."""

import random
from copy import deepcopy
from dataclasses import replace
from math import exp, sqrt

import numpy as np
import pytest

from specctl.policies.cost_optimal import AHEAD, CostOptimal
from specctl.policies.draft_account import EVERY, FIRST_DRAFTS, LULL, MOST, SETTLED, SHARE
from specctl.policies.estimators import (
    ACCEPTED,
    NEXT,
    OnlineLogistic,
    RunningLine,
    TokenRates,
    WidthTimes,
    features,
    log_odds,
)
from specctl.records import DraftStep, ExtraToken, Round, StopReason


def sigmoid(score: float) -> float:
    return 1 / (1 + exp(-score))


def played(
    accepted: int, drafted: int, step_seconds: float = 1.0, target_seconds: float = 8.0, **more: object
) -> Round:
    steps = tuple(DraftStep(place + 1, token=5, entropy=0.4, top_prob=0.8) for place in range(drafted))
    kind = ExtraToken.BONUS if accepted == drafted else ExtraToken.CORRECTION
    draft = step_seconds * drafted
    return replace(
        Round(0, steps, accepted, 9, kind, StopReason.POLICY, None, draft, target_seconds, draft + target_seconds),
        **more,
    )


def after(policy: CostOptimal, rounds: int, **settings: float) -> CostOptimal:
    """The policy after rounds in which a draft is right nine times of ten, as long as it wishes to draft."""
    chance = random.Random(1)
    for _ in range(rounds):
        count = 0
        while count < policy.draft_limit():
            count += 1
            if policy.should_stop(DraftStep(count, token=5, entropy=0.4, top_prob=0.8)):
                break
        accepted = next((place for place in range(count) if chance.random() > 0.9), count)
        policy.observe(played(accepted, count, **settings))
    return policy


def trusted(policy: CostOptimal) -> CostOptimal:
    """The policy as if its drafts had saved time before."""
    policy.batch.allowance.account.balance, policy.batch.allowance._booked = MOST, FIRST_DRAFTS
    policy.batch.times._longest = policy.max_draft
    policy.reset()
    return policy


def learned(policy: CostOptimal) -> list[object]:
    """What it knows of acceptance."""
    return [policy._accepted, policy._next, policy._first, policy._rates]


def length(policy: CostOptimal) -> int:
    """How far it drafts where every step looks alike."""
    steps = range(1, policy.draft_limit() + 1)
    return next((k for k in steps if policy.should_stop(DraftStep(k, token=5, entropy=0.4, top_prob=0.8))), len(steps))


def test_one_more_token_is_drafted_while_it_pays() -> None:
    """By hand, from the prior: S_k a against rho t_d, where a round drafts 2, emits 1.8 and takes 1 + 2 / 8."""
    policy = trusted(CostOptimal(cost_ratio=0.125))
    price = 0.125 * 1.8 / 1.25
    assert policy.current_threshold == pytest.approx(price)
    mean, _ = ACCEPTED
    kept = sigmoid(mean[0] + mean[1] * log_odds(0.8) + mean[2] * sqrt(0.4))
    following = sigmoid(NEXT[0][0] + NEXT[0][1] * sqrt(0.4))
    expected = next(k for k in range(1, 99) if kept**k * following <= price)
    assert 2 < expected < 40
    assert length(policy) == expected


def test_the_dearer_a_draft_step_the_shorter_the_draft() -> None:
    lengths = [length(after(CostOptimal(), 200, step_seconds=seconds)) for seconds in (0.2, 1.0, 3.0)]
    assert lengths[0] > lengths[1] > lengths[2] >= 1


def test_a_target_pass_that_widens_counts_as_the_draft_step_does() -> None:
    policy = CostOptimal()
    for place in range(400):
        count = 1 + place % 6
        policy.observe(played(count, count, 1.0, 8.0 + 2.0 * count))
    # rho of these rounds: (1 + k) tokens in 8 + 3 k seconds, k = 3.5 on average; one more costs 1 + 2.
    assert policy.current_threshold == pytest.approx(3 * 4.5 / 18.5, rel=0.05)


def test_widths_that_are_cheap_are_gone_to() -> None:
    """Passes over 1 to 4 tokens take alike, then 5 to 8: a draft of 3 or 7 tokens fills them, and all others waste."""
    policy, chance, lengths = CostOptimal(), random.Random(4), []
    for _ in range(800):
        count = length(policy)
        accepted = next((place for place in range(count) if chance.random() > 0.8), count)
        policy.observe(played(accepted, count, 0.5, 8.0 + 3.0 * (count // 4)))
        lengths.append(count)
    assert sum(count in (3, 7) for count in lengths[-300:]) > 280


def test_costs_that_change_are_followed() -> None:
    policy = after(CostOptimal(), 200, step_seconds=0.2)
    long = length(policy)
    after(policy, 200, step_seconds=3.0)
    assert length(policy) < long / 2


def test_a_machine_that_is_slow_for_some_rounds_changes_no_price() -> None:
    """Stretches of ten rounds in which another program takes two thirds of the processor, and every time triples."""
    quiet, busy = CostOptimal(), CostOptimal()
    chance, prices = random.Random(2), []
    for place in range(600):
        count = 1 + chance.randrange(8)
        slow = 3.0 if place // 10 % 3 == 0 else 1.0
        quiet.observe(played(count // 2, count, 1.0, 8.0 + 0.2 * count))
        busy.observe(played(count // 2, count, slow, slow * (8.0 + 0.2 * count)))
        prices.append(busy.current_threshold / quiet.current_threshold)
    assert all(0.65 < price < 1.3 for price in prices[200:])


def test_drafts_that_take_no_time_are_learned_from() -> None:
    policy = after(CostOptimal(), 20, step_seconds=0.0)
    assert policy.current_threshold < 0.01
    assert length(policy) == policy.max_draft


def test_a_width_that_differs_from_the_line_is_learned_and_noise_is_not() -> None:
    chance = random.Random(6)

    def learned(noise: float) -> list[float]:
        times = WidthTimes(RunningLine(0.95))
        for place in range(400):
            k = place % 8
            times.learn(k, (5.0 + k - (2.0 if k == 3 else 0.0)) * (1 + noise * chance.uniform(-1, 1)))
        return [times.at(k) for k in range(12)]

    plain, noisy = learned(0.0), learned(0.6)
    assert plain[2] - plain[3] > 0.5
    assert plain[5] - plain[4] == pytest.approx(1.0, abs=0.4)
    assert plain[11] - plain[10] == pytest.approx(1.0, abs=0.2)  # never seen: as the line says
    surplus = [noisy[k] - (noisy[11] - (11 - k) * (noisy[11] - noisy[10])) for k in range(8)]
    assert max(map(abs, surplus)) < 1.0


def test_where_no_token_pays_it_drafts_next_to_nothing_and_still_probes() -> None:
    policy = CostOptimal()
    drafted = rounds = 0
    for place in range(2000):
        count = length(policy) if policy.draft_limit() else 0
        if place >= 200:
            drafted += count
            rounds += 1
        policy.observe(played(0, count))
    assert 0 < drafted <= 1.2 * SHARE * rounds * 8


def test_rounds_that_it_rests_in_may_be_told_together() -> None:
    one, together = CostOptimal(), CostOptimal()
    rested, longest = [], 0
    for place in range(400):
        round_ = replace(played(0, min(2, one.draft_limit())), index=place % 90, context=60 + place % 90)
        if not place % 90:
            one.reset()
            together.rested(len(rested))
            together.reset()
            rested = []
        one.observe(round_)
        if rested or together.rests():
            assert not round_.steps
            rested.append(round_)
            if len(rested) == together.rests():
                together.rested(len(rested))
                rested = []
        else:
            together.observe(round_)
        if not rested:
            assert one == together
            longest = max(longest, one.rests())
    assert longest > LULL


def test_what_a_draft_costs_stays_known_while_none_is_made() -> None:
    """A pass behind a draft is one from cold caches: passes behind others tell nothing of it."""
    policy = CostOptimal()
    for place in range(60):
        policy.observe(replace(played(0, policy.draft_limit(), 0.5, 12.0), index=place + 1, context=40 + place))
    step = policy.batch.times.price / policy.batch.times._speed  # in seconds
    for place in range(2000):
        policy.observe(replace(played(0, 0, 0.0, 8.0), index=place + 61, context=100 + place))
        assert policy.batch.times.price / policy.batch.times._speed == pytest.approx(step)
    assert policy.batch.times.lost(1, 1) == pytest.approx((0.5 + 4.0) / 8.0, rel=0.1)
    for place in range(2000):  # the target alone becomes as slow as a pass behind a draft is
        policy.observe(replace(played(0, 0, 0.0, 12.0), index=place + 181, context=220 + place))
    assert policy.batch.times.lost(1, 1) == pytest.approx(0.5 / 12.0, rel=0.2)


def test_a_machine_that_slows_down_while_drafts_are_made_slows_the_target_alone_too() -> None:
    policy = CostOptimal()
    for place in range(12):
        policy.observe(replace(played(0, 0, 0.0, 8.0), index=place + 1, context=40 + place))
    for place in range(400):
        slow = 1 + min(place, 200) / 200
        policy.observe(replace(played(2, 3, slow, 10.0 * slow), index=place + 13, context=60 + 3 * place))
    assert policy.batch.times.lost(3, 3) == pytest.approx((3 + 10 - 8) / 8, rel=0.2)


def test_what_was_measured_long_ago_counts_less() -> None:
    policy = CostOptimal()
    for place in range(60):
        policy.observe(replace(played(2, 3, 2.0, 16.0), index=place + 1, context=40 + place))
    for place in range(600):
        policy.observe(replace(played(0, 0, 0.0, 6.0), index=place + 61, context=100 + place))
    assert policy.batch.times._verify.at(3) > 14
    policy.observe(replace(played(2, 3, 0.5, 8.0), index=661, context=700))
    assert policy.batch.times._verify.at(3) == pytest.approx(8.0, rel=0.1), "a machine that is twice as fast"


def test_it_drafts_again_once_that_pays() -> None:
    policy = CostOptimal()
    for _ in range(300):
        policy.observe(played(0, 1 if policy.draft_limit() else 0))
    assert policy.current_threshold > 0
    after(policy, 600)
    limits = []
    for _ in range(10):
        limits.append(policy.draft_limit())
        policy.observe(played(1, 1) if limits[-1] else played(0, 0))
    assert min(limits) > 0


def test_tokens_behind_a_rejection_teach_nothing() -> None:
    short, long = CostOptimal(), CostOptimal()
    short.observe(played(1, 2, 0.0, 0.0))
    long.observe(played(1, 7, 0.0, 0.0))
    assert learned(short) == learned(long)


def test_where_there_is_chance_the_chance_is_the_lesson() -> None:
    """A token rejected by bad luck teaches the same as a token accepted by good luck."""
    lucky, unlucky = CostOptimal(), CostOptimal()
    lucky.observe(played(1, 1, 0.0, 0.0, chances=(0.7,)))
    unlucky.observe(played(0, 1, 0.0, 0.0, chances=(0.7,)))
    assert learned(lucky) == learned(unlucky)
    assert lucky.batch.allowance.account == unlucky.batch.allowance.account
    certain = CostOptimal()
    certain.observe(played(1, 1, 0.0, 0.0))
    assert learned(certain) != learned(lucky)


def test_a_new_sequence_keeps_what_was_learned_unless_told_otherwise() -> None:
    kept, fresh = (after(CostOptimal(carry_over=carry), 50) for carry in (True, False))
    kept.reset()  # all rounds are learned from then
    price = kept.current_threshold
    kept.reset()
    fresh.reset()
    assert kept.current_threshold == price
    assert fresh == CostOptimal(carry_over=False)


def test_where_drafts_have_saved_much_one_round_of_a_few_stands_for_all() -> None:
    policy = CostOptimal()
    taught, balances = [], []
    for place in range(400):
        before, known = policy.batch.times.timed, deepcopy(learned(policy))
        policy.observe(replace(played(2, 3, 0.5, 8.0), index=place + 1, context=30 + 3 * place))
        taught.append(policy.batch.times.timed > before)
        assert taught[-1] == (learned(policy) != known)
        balances.append(policy.batch.allowance.account.balance)
    settled = balances.index(MOST) + SETTLED
    assert all(taught[:SETTLED])
    assert taught[settled:].count(True) == pytest.approx((400 - settled) / EVERY, abs=1)
    # What was saved is booked for those between, too: a sudden change of the text is noticed as soon in passes.
    for place in range(3):  # the target's own time
        policy.observe(replace(played(0, 0), index=place + 1, context=3000 + place))
    for place in range(200):
        if policy.batch.allowance.account.balance < 5:
            break
        policy.observe(replace(played(0, 3, 0.5, 8.0), index=place + 4, context=3003 + place))
    assert place * policy.batch.times.lost(3, 3) == pytest.approx(MOST - 5, abs=EVERY)


def test_a_texts_first_round_is_not_timed_even_if_others_drafted_it() -> None:
    """In a chain a policy is told of the rounds alone in which its model drafted."""
    read, copied = CostOptimal(), CostOptimal()
    read.observe(played(1, 2, 0.5, 9.0))
    copied.observe(replace(played(1, 2, 0.5, 9.0), index=3))
    assert (read.batch.times.timed, copied.batch.times.timed) == (0, 1)


def test_logistic_regression_finds_the_weights_and_follows_them() -> None:
    chance, model = random.Random(3), OnlineLogistic([0.0, 0.0], (1.0, 1.0), 1e-3)
    for bias in (1.0, -1.0):
        for _ in range(4000):
            x = chance.uniform(-2, 2)
            model.learn(float(chance.random() < sigmoid(bias + 1.5 * x)), x)
        assert model.weights[:2] == pytest.approx([bias, 1.5], abs=0.35)


def test_one_newton_step_by_hand() -> None:
    """w = 0, P = 1, x = 2, o = 1: v = 1/4, 1 + v x P x = 2; w = P x (1 - 1/2) / 2 = 1/2; P = 1 - 1/4 * 4 / 2 = 1/2."""
    model = OnlineLogistic([0.0, 0.0], (0.0, 1.0), 0.0)  # a constant that is known to be 0
    model.learn(1.0, 2.0)
    assert model.weights == pytest.approx((0.0, 0.5, 0.0, 0.0))
    assert model._covariance[4] == pytest.approx(0.5)


def test_the_written_out_sums_are_those_of_matrices() -> None:
    chance, drift = random.Random(5), 1e-2
    means, variances = np.array([0.3, -0.2, 0.5, 0.1]), np.array([1.0, 0.5, 0.2, 0.8])
    model = OnlineLogistic(means.tolist(), variances.tolist(), drift)
    weights, covariance = means.copy(), np.diag(variances)
    for _ in range(200):
        features = np.array([1.0, *(chance.uniform(-2, 2) for _ in range(3))])
        outcome = chance.random()
        growing = np.diag(covariance) < variances
        covariance += np.diag(growing * drift * variances)
        predicted = sigmoid(weights @ features)
        variance = predicted * (1 - predicted)
        direction = covariance @ features
        scale = 1 + variance * features @ direction
        weights = weights + direction * (outcome - predicted) / scale
        covariance = covariance - variance / scale * np.outer(direction, direction)
        model.learn(outcome, *features[1:].tolist())
        assert model.predict(*features[1:].tolist()) == pytest.approx(sigmoid(weights @ features))
    assert model.weights == pytest.approx(weights)
    assert model._covariance == pytest.approx(covariance[np.triu_indices(4)])


def test_a_fourth_feature_is_refused() -> None:
    with pytest.raises(ValueError, match="4 features; at most 3"):
        OnlineLogistic([0.0] * 5, [1.0] * 5, 0.0)


def test_a_line_is_found_in_spite_of_outliers_and_after_a_change() -> None:
    chance, line = random.Random(5), RunningLine(0.95)
    for base, slope in ((8.0, 0.5), (20.0, 2.0)):
        for place in range(300):
            k = chance.randrange(8)
            stray = 10.0 if place % 25 == 24 else 1.0
            line.learn(k, stray * (base + slope * k))
        assert (line.base, line.slope) == (pytest.approx(base, rel=0.15), pytest.approx(slope, rel=0.35))


def test_an_anchored_line_goes_through_the_origin_until_k_varies() -> None:
    line, fixed, varied = (RunningLine(0.95, anchor=1.0) for _ in range(3))
    for k in (1, 4, 2):
        line.learn(k, 3.0 * k)
    assert (line.base, line.slope) == (pytest.approx(0.0), pytest.approx(3.0))
    for place in range(200):
        fixed.learn(4, 6.0)
        varied.learn(1 + place % 8, 6.0)
    assert (fixed.base, fixed.slope) == (pytest.approx(0.0, abs=1e-6), pytest.approx(1.5))
    base, slope = varied.base, varied.slope
    assert base == pytest.approx(6.0, rel=0.25)
    assert slope < 0.3


class Block:
    """A draft that takes its time whatever it drafts, and is right with some probability at each token."""

    def __init__(self, seconds: float, right: float, longest: int = 8) -> None:
        self.seconds, self.right, self.longest = seconds, right, longest
        self._chance = random.Random(2)

    def play(self, policy: CostOptimal, rounds: int) -> list[int]:
        """The lengths of the drafts."""
        lengths = []
        for _ in range(rounds):
            count = min(length(policy), self.longest) if policy.draft_limit() else 0
            accepted = next((place for place in range(count) if self._chance.random() > self.right), count)
            seconds = self.seconds / max(1, count)
            policy.observe(played(accepted, count, seconds, 8.0))
            lengths.append(count)
        return lengths


def test_a_block_whose_time_does_not_depend_on_its_length_is_not_cut_short_for_it() -> None:
    lengths = Block(4.0, 0.8).play(CostOptimal(), 600)
    assert sum(lengths[-200:]) / 200 > 6


def test_a_block_that_saves_less_than_it_costs_is_not_drafted() -> None:
    """Right one time of three, it saves half a token on average, and takes as long as a pass of the target."""
    policy = CostOptimal()
    lengths = Block(8.0, 0.33).play(policy, 800)
    drafting = [count for count in lengths[-400:] if count]
    assert 0 < len(drafting) < 400 * 0.1


def test_a_tokens_record_is_shrunk_to_the_whole() -> None:
    rates = TokenRates(2.0)
    assert rates.surplus(7) == 0
    assert rates.surplus(None) == 0
    rates.learn(7, 0.0)
    once = rates.surplus(7)
    rates.learn(7, 0.0)
    assert rates.surplus(7) < once < 0
    assert rates.surplus(8) == 0


def test_a_heads_prediction_counts_one_token_later() -> None:
    sure, unsure = CostOptimal(use_head=True), CostOptimal(use_head=True)
    assert sure.signals == CostOptimal().signals | {"accept_prob"}
    for policy, p in ((sure, 0.99), (unsure, 0.0005)):
        assert not policy.should_stop(DraftStep(1, 0, entropy=0.1, top_prob=0.97, accept_prob=1.0))
        assert policy.should_stop(DraftStep(2, 0, entropy=0.1, top_prob=0.97, accept_prob=p)) == (p < 0.5)


def test_what_a_heads_prediction_means_is_learned_from_the_verdict_on_its_token() -> None:
    """The second token is always rejected, and the head's prediction for it, known at the third, is always wrong."""
    policy = CostOptimal(use_head=True)
    steps = tuple(
        DraftStep(place, place, entropy=0.5, top_prob=0.8, accept_prob=predicted)
        for place, predicted in enumerate((1.0, 0.05, 0.95), start=1)
    )
    before = policy._accepted_as_predicted.predict(*features(steps[1]), log_odds(0.95))
    for _ in range(60):
        policy.observe(Round(0, steps, 1, 9, ExtraToken.CORRECTION, StopReason.POLICY))
    assert policy._accepted_as_predicted.predict(*features(steps[1]), log_odds(0.95)) < 0.3 < before
    assert policy._accepted_as_predicted.predict(*features(steps[0]), log_odds(0.05)) > 0.6


def test_foresight_reads_no_distribution_and_stops_before_a_token_that_is_predicted_to_fail() -> None:
    sure, unsure = CostOptimal(use_foresight=True), CostOptimal(use_foresight=True)
    assert sure.signals == {"next_accept_prob"}
    for policy, p in ((sure, 0.95), (unsure, 0.001)):
        assert policy.should_stop(DraftStep(1, 0, next_accept_prob=p)) == (p < 0.5)
    with pytest.raises(ValueError, match="exclude each other"):
        CostOptimal(use_foresight=True, use_head=True)


def test_with_foresight_doubt_adds_up_along_the_draft() -> None:
    """Each token alone would be worth its time."""
    policy = CostOptimal(use_foresight=True)
    lengths = []
    for p in (0.6, 0.8, 0.95):
        steps = (DraftStep(place, 0, next_accept_prob=p) for place in range(1, 41))
        lengths.append(next((step.index for step in steps if policy.should_stop(step)), 40))
    assert 1 < lengths[0] < lengths[1] < lengths[2]


def test_what_a_foresight_means_is_learned_from_the_verdict_on_the_token_after_it() -> None:
    """The draft is sure of its second token, which is always rejected."""
    policy = CostOptimal(use_foresight=True)
    steps = (DraftStep(1, 7, next_accept_prob=0.9), DraftStep(2, 8, next_accept_prob=0.2))
    assert not policy.should_stop(steps[0])
    for _ in range(60):
        policy.observe(Round(0, steps, 1, 9, ExtraToken.CORRECTION, StopReason.POLICY))
    assert policy.should_stop(steps[0])


def test_a_level_of_a_tree_is_priced_by_the_depth() -> None:
    """Every tree that is two levels deep or deeper has 59 tokens: a further level takes no time to verify."""

    def grown(trees: bool) -> CostOptimal:
        policy, chance = CostOptimal(), random.Random(2)
        for _ in range(300):
            count = 1 + chance.randrange(8)
            widths = (10, *[49 // (count - 1)] * (count - 1)) if count > 1 else (10,)
            verifying = 20.0 if count > 1 else 12.0
            round_ = played(count // 2, count, 1.0, verifying)
            policy.observe(replace(round_, tree=widths, path=(0,) * (count // 2)) if trees else round_)
        return policy

    deep = grown(trees=True)
    spent = deep.batch.times.upto(9)
    assert spent[7] - spent[6] == pytest.approx(deep.current_threshold, rel=0.6)
    assert spent[2] - spent[1] > 2 * (spent[7] - spent[6]), "the second level makes the pass wide"
    chains = grown(trees=False).batch.times.upto(9)
    assert spent[:9] == chains[:9], "as chains of that many tokens whose passes take that long"


def test_a_cheap_width_is_seen_eight_tokens_ahead_and_not_nine() -> None:
    """Every token but the cheap one costs a little more than it gains."""
    policy = CostOptimal()
    for ahead, goes_on in ((AHEAD, True), (AHEAD + 1, False)):
        spent = policy.batch.times.upto(30)
        spent[:] = [1.01 * count for count in range(len(spent))]
        spent[2 + ahead] = 0.95 * ahead + spent[2]
        assert policy.goes_on(2, 1.0, 1.0) is goes_on


@pytest.mark.parametrize(("price", "goes_on"), [(1.74, True), (1.76, False)])
def test_each_token_ahead_is_kept_only_if_those_before_it_are(price: float, goes_on: bool) -> None:
    """Three tokens of which each next one is kept half the time gain 1 + 0.5 + 0.25."""
    policy = CostOptimal()
    spent = policy.batch.times.upto(30)
    spent[:] = [1.01 * count for count in range(len(spent))]
    spent[5] = spent[2] + price
    assert policy.goes_on(2, 1.0, 0.5) is goes_on


def test_a_draft_without_entropy_cannot_be_judged() -> None:
    assert features(DraftStep(1, token=5, entropy=0.0, top_prob=0.5)) == (0.0, 0.0)
    assert features(DraftStep(1, token=5, entropy=4.0, top_prob=0.5)) == (0.0, 2.0)
    with pytest.raises(ValueError, match="did not compute a signal"):
        features(DraftStep(1, token=5, top_prob=0.5))


def test_a_long_draft_that_is_rejected_is_paid_for_once() -> None:
    """One round of a few is learned from, and the others count by what they were."""
    policy = trusted(CostOptimal())
    policy.batch.times.timed = SETTLED
    policy._decide()
    for place in range(4 * EVERY):
        policy.observe(replace(played(6, 6), index=place + 1, context=40 + 7 * place))
    balance, booked = policy.batch.allowance.account.balance, []
    for place in range(EVERY):
        accepted, drafted = (6, 6) if place < EVERY - 1 else (0, 30)
        booked.append((drafted, len(policy._passed)))
        policy.observe(replace(played(accepted, drafted), index=50 + place, context=200 + 7 * place))
    assert booked[-1] == (30, EVERY - 1), "the one that is learned from"
    lost = policy.batch.times.lost(30, 30)
    assert lost > 3
    assert policy.batch.allowance.account.balance > balance - lost


def test_a_pass_of_the_target_alone_behind_a_prompt_tells_nothing() -> None:
    policy = CostOptimal()
    for seconds in (40.0, 30.0):  # of the prompt's pass, and of the one behind it
        policy.observe(replace(played(0, 0, 0.0, seconds), context=40))
    assert not policy.batch.times.knows_target
    assert policy.batch.times._one_pass == 1.0, "as before anything was timed"
    policy.observe(replace(played(0, 0, 0.0, 8.0), context=42))
    assert policy.batch.times._one_pass == pytest.approx(8.0)
