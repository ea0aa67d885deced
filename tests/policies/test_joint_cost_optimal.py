"""One decision for all texts of a batch, and one learner."""

import random
from copy import copy
from itertools import combinations
from typing import Any

import pytest

from specctl.policies import NONE, Setting
from specctl.policies.cost_optimal import CROWDED, CostOptimal, CostOptimalBatch, JointRest
from specctl.policies.draft_account import (
    EVERY,
    FIRST_DRAFTS,
    MOST,
    SETTLED,
    UNSEEN_AT_FIRST,
    DraftAccount,
    DraftAllowance,
)
from specctl.policies.round_times import RoundTimes
from specctl.records import DraftStep, ExtraToken, Round, StopReason
from specctl.replay.costs import CostTable
from specctl.replay.play import replay_together
from specctl.text_engine.hub import Decisions, Hub
from tests.support.made_traces import flat_costs, traces

EOS = frozenset({0})


def batch_of(rows: int, rounds: int = 40) -> tuple[CostOptimalBatch, list[CostOptimal]]:
    """A rule that has seen rounds of so many rows, in which passes cost 1 ms and 0.2 ms for each row."""
    joint, chance = CostOptimal().batch, random.Random(3)
    views = [joint.text(lambda _: 0) for _ in range(rows)]
    for _ in range(rounds):
        lengths = [chance.randrange(1, 5) for _ in views]
        passes = [sum(length >= place for length in lengths) for place in range(1, max(lengths) + 1)]
        drafting, verifying = sum(1 + 0.2 * each for each in passes), 5 + 0.3 * sum(lengths)
        for view, length in zip(views, lengths, strict=True):
            steps = tuple(DraftStep(place, 5, 0.4, 0.8) for place in range(1, length + 1))
            shares = drafting / rows / 1e3, verifying / rows / 1e3
            accepted = chance.randrange(length + 1)
            kind = ExtraToken.BONUS if accepted == length else ExtraToken.CORRECTION
            view.observe(Round(0, steps, accepted, 9, kind, StopReason.POLICY, None, *shares, sum(shares), context=30))
        joint.run(views)
        for view in views:
            view.drafted = 0
    return joint, views


def test_drafting_goes_on_with_the_best_set_of_all() -> None:
    joint, views = batch_of(6)
    times, chance, sizes = joint.times, random.Random(1), set()
    for _ in range(60):
        joint._round, joint._drafted = {*views}, chance.randrange(12)
        for view in views:
            view.gain, view.drafted = chance.random() ** 2, 1

        def value(rows: tuple[CostOptimal, ...]) -> float:
            share = joint._share(len(rows), 6)
            price = 6 * times.further(joint._drafted / 6, len(rows) / 6, share) if rows else 0.0
            return sum(row.gain for row in rows) - price

        best = max((value(rows), rows) for size in range(7) for rows in combinations(views, size))[0]
        chosen = tuple(joint._worth(views))
        assert value(chosen) == pytest.approx(best)
        sizes.add(len(chosen))
    assert len(sizes) > 3


def test_what_a_pass_over_fewer_rows_takes_is_learned() -> None:
    joint, _ = batch_of(8, rounds=80)
    assert joint._share(8, 8) == 1
    assert joint._share(2, 8) == pytest.approx(1.4 / 2.6, abs=0.05)


@pytest.mark.parametrize("others", ["draft", "wait for their verification"])
def test_a_text_that_comes_later_has_its_round_with_the_others(others: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DraftAllowance, "longest", lambda *_, **__: 5)
    joint, (one, other, late) = batch_of(3)
    known = copy(joint._pass)
    one.gain = other.gain = late.gain = 0.9
    assert min(joint.run([one, other])) > 0
    one.drafted = other.drafted = 1
    asking = [one, other] if others == "draft" else []
    assert min(joint.run([*asking, late])) > 0, "no draft is cut short"
    assert joint._round == {one, other, late}
    for row, length in ((one, 3), (other, 3), (late, 1)):
        steps = tuple(DraftStep(place, 5, 0.4, 0.8) for place in range(1, length + 1))
        row._seen = int(row is not late)
        row.observe(Round(0, steps, 0, 9, ExtraToken.CORRECTION, StopReason.POLICY, None, 9.0, 1.0, 10.0, context=30))
        row.drafted = 0
    joint.run([one, other])
    assert joint._round == {one, other}
    assert joint._pass == known, "its passes were not those of the others"


def test_a_text_whose_first_round_begins_with_those_of_others_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DraftAllowance, "longest", lambda *_, **__: 5)
    joint, (one, late) = batch_of(2)
    one.observe(Round(0, (), 0, 9, ExtraToken.BONUS, StopReason.POLICY, None, 0.0, 1.0, 1.0, context=30))
    one.drafted, late.drafted, one.gain, late.gain = 0, 1, 0.9, 0.9
    assert min(joint.run([one, late])) > 0
    assert (joint._round, joint._drafted) == ({one, late}, 3)


def test_what_one_text_teaches_all_know_and_each_has_its_own_text() -> None:
    joint, (one, other) = batch_of(2, rounds=3)
    assert one._accepted is other._accepted is joint._policy._accepted
    one._last_token, other._last_token = 4, 5
    one.reset()
    assert one._last_token is None
    assert other._last_token == 5


def test_a_text_asks_with_its_prompt_as_if_there_had_been_none_before() -> None:
    """The one before it may have ended in the middle of a round, with much that its draft had not read."""
    asked: list[tuple[int, int, int | None]] = []

    def ask(row: CostOptimal) -> int:
        asked.append((row.drafted, row.unread, row._last_token))
        return 5

    decisions, setting = Decisions(), Setting("cost-optimal")
    row, other = (decisions.policy(setting, number, ask) for number in (0, 1))  # type: ignore[arg-type]
    hub: Hub[int] = Hub([decisions], decisions.begin)
    for policy in (row, other):
        policy.reset()
        policy.draft_limit()
        policy.observe(Round(0, (), 0, 9, ExtraToken.CORRECTION, StopReason.MAX_DRAFT, None, context=4000))
        policy.draft_limit()
    hub.begin(0, row.draft_limit)
    hub.begin(1, lambda: 0)
    row.reset()
    assert (row.draft_limit(), asked) == (5, [(0, 0, None), (0, 4001, 9)] * 2 + [(0, 0, None)])


def test_rows_of_a_setting_share_a_decision_until_one_begins_anew() -> None:
    decisions, setting = Decisions(), Setting("cost-optimal")
    first, second, again = (decisions.policy(setting, row, lambda _: 0) for row in (0, 1, 0))
    assert isinstance(first, CostOptimal)
    assert isinstance(second, CostOptimal)
    assert isinstance(again, CostOptimal)
    assert first.batch is second.batch is not again.batch
    forgetting = Setting.of({"name": "cost-optimal", "carry_over": False})
    assert isinstance(decisions.policy(forgetting, 0, lambda _: 0), CostOptimal)


def test_texts_of_several_settings_are_decided_about_at_once_each_by_its_own_rule() -> None:
    decisions, order = Decisions(), (2, 0, 3, 1)
    policies = [
        decisions.policy(Setting.of({"name": "cost-optimal", "max_draft": 1 + row % 2}), row, lambda _: 0)
        for row in range(4)
    ]
    rows = [policies[row] for row in order]
    assert decisions.run(rows) == [1, 1, 2, 2]  # type: ignore[arg-type]


def test_times_are_learned_from_those_that_go_on_where_texts_begin_all_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By hand: four rows of which one begins, each going on for 2 ms of a draft pass and 4 ms of a verification."""
    passed: list[bool] = []
    monkeypatch.setattr(RoundTimes, "pass_over", lambda _, drafted: passed.append(drafted))
    joint = CostOptimal().batch
    views, steps = [joint.text(lambda _: 0) for _ in range(4)], (DraftStep(1, 5, 0.4, 0.8),)
    joint.run(views)
    for number in range(CROWDED + 40):
        views[number % 4].reset()
        for place, view in enumerate(views):
            first = place == number % 4
            seconds = (0.05, 0.5) if first else (2e-3, 4e-3)
            drafted = steps[: number % 3]
            drafting = seconds[0] * len(drafted)
            round_ = Round(0, drafted, 0, 9, ExtraToken.CORRECTION, StopReason.POLICY, None, drafting, seconds[1],
                           drafting + seconds[1], context=30)  # fmt: skip
            view.observe(round_)
        joint.run(views)
        for view in views:
            view.drafted = 0
        assert (joint.times.timed > 0) == (number >= CROWDED)
        assert len(passed) == min(number + 1, CROWDED)
    times = joint.times
    assert (times._draft.at(1), times._verify.line.at(1)) == pytest.approx((8e-3, 16e-3), rel=0.05)


def batched(draft: float, target: float, per_row: float) -> CostTable:
    """Prices of four texts, of which each adds its share to both kinds of passes."""
    table = flat_costs(draft, target, per_token=0.2)
    more = flat_costs(draft * (1 + 3 * per_row), target * (1 + 3 * per_row), per_token=0.8)
    return CostTable(**{**vars(table), "batches": {4: more}})


@pytest.mark.parametrize("per_row", [0.02, 0.3])
@pytest.mark.representatives("0.3")
def test_no_constant_length_is_faster_by_more_than_a_hundredth(per_row: float) -> None:
    """Alone, each text takes what it waits for as its own price, and the batch loses a tenth and more."""
    texts, costs = traces(5, prompts=48).traces, batched(1.0, 8.0, per_row)
    rate = replay_together(Setting("cost-optimal"), texts, 4, costs, EOS).tokens_per_second
    lengths = (Setting.of({"name": "constant", "draft_length": length}) for length in range(1, 8))
    best = max(replay_together(each, texts, 4, costs, EOS).tokens_per_second for each in lengths)
    assert rate > 0.99 * best
    assert replay_together(Setting("cost-optimal"), texts, 4, costs, EOS, jointly=False).tokens_per_second < 0.9 * rate


def test_where_drafts_never_pay_a_batch_is_as_fast_as_the_target_alone() -> None:
    texts, costs = traces(1, prompts=48).traces, batched(1.0, 4.0, 0.3)
    none = replay_together(NONE, texts, 4, costs, EOS)
    played = replay_together(Setting("cost-optimal"), texts, 4, costs, EOS)
    assert played.tokens_per_second > 0.985 * none.tokens_per_second
    assert played.draft_passes < played.verifications / 20


def play(joint: CostOptimalBatch, views: list[CostOptimal], length: int, drafting: float, verifying: float) -> None:
    """A round of some rows of which no draft is accepted, in milliseconds of all."""
    steps = tuple(DraftStep(place, 5, 0.4, 0.8) for place in range(1, length + 1))
    shares = drafting / len(views) / 1e3, verifying / len(views) / 1e3
    for view in views:
        view._seen = 2
        view.observe(
            Round(0, steps, 0, 9, ExtraToken.CORRECTION, StopReason.POLICY, None, *shares, sum(shares), context=30)
        )
    joint.run(views)
    for view in views:
        view.drafted = 0


def test_the_end_of_a_run_teaches_nothing_of_rounds_of_all() -> None:
    """A pass over one row takes a quarter of the time: it is not what a pass over eight would take without a draft."""
    joint, views = batch_of(8)
    price, alone = joint.times.lost_step, joint.times._one_pass
    for _ in range(20):
        play(joint, views[:1], 0, 0.0, 1.2)
    joint.run(views)
    assert (joint.times.lost_step, joint.times._one_pass) == (price, alone)
    assert joint._by_size[0]._one_pass == pytest.approx(1.2e-3, rel=0.1)


def test_first_drafts_of_several_texts_risk_no_more_than_their_tokens_may_take() -> None:
    """Of one text they have more tokens, since a wider pass over it waits for the same weights."""
    joint, alone = CostOptimal().batch, CostOptimal().batch
    for each in (joint, alone):
        each.allowance._booked = FIRST_DRAFTS  # which are short for themselves
    views = [joint.text(lambda _: 0) for _ in range(8)]
    assert joint.run(views) == [2] * 8
    assert alone.run([views[0]])[0] > 2
    play(joint, views, 2, 2.0, 30.0)
    assert joint.run(views) == [0] * 8, "a pass of the target alone is timed first"
    for _ in range(2):
        play(joint, views, 0, 0.0, 6.0)
    assert joint.allowance.account.balance > -1.5


def test_where_drafts_have_saved_much_one_round_of_a_few_is_learned_from(monkeypatch: pytest.MonkeyPatch) -> None:
    learned: list[int] = []
    monkeypatch.setattr(CostOptimal, "_learn_verdicts", lambda _, round_: learned.append(round_.index))
    joint, views = batch_of(4)
    passed: list[int] = []
    book = DraftAllowance.book

    def booked(self: DraftAllowance, *told: Any) -> None:
        passed.append(self.passed)
        book(self, *told)

    monkeypatch.setattr(DraftAllowance, "book", booked)
    allowance = joint.allowance
    joint.times.timed, allowance.account.balance = SETTLED, MOST
    allowance.idle = allowance._resting = 0
    allowance.probing = False
    learned.clear()
    for number in range(2 * EVERY + 1):
        steps = (DraftStep(1, 5, 0.4, 0.8),)
        for view in views:
            view.observe(
                Round(number, steps, 1, 9, ExtraToken.BONUS, StopReason.POLICY, None, 1e-3, 1e-3, 2e-3, context=30)
            )
        joint.run(views)
        allowance.probing = False
    assert sorted({*learned}) == [0, EVERY, 2 * EVERY]
    assert passed == [0, EVERY - 1, EVERY - 1]


def test_several_texts_go_without_drafts_sooner_where_these_save_little() -> None:
    times = RoundTimes(0.125)
    times.read_several()
    for _ in range(6):  # a pass of the target alone takes 4 ms, one with two tokens 5, a step 0.5
        times.learn(0, 0, 0.0, 4e-3, 1, 0)
        times.learn(2, 2, 1e-3, 5e-3, 2, 0)
    for kept, rests in ((0.6, [UNSEEN_AT_FIRST, 3 * UNSEEN_AT_FIRST]), (1.2, [])):
        allowance, found = DraftAllowance(times, DraftAccount()), []
        for number in range(1, 4 * UNSEEN_AT_FIRST):
            allowance.book(2, 2, kept, 0)
            if not allowance.longest(pays=True, unread=0) and allowance._resting:
                found.append(number)
                allowance.book(0, 0, 0, 0)
                allowance.book(0, 0, 0, 0)
            allowance.account.balance = MOST
        assert found == rests


def resting(rows: int = 3) -> tuple[CostOptimalBatch, list[CostOptimal], list[list[int]]]:
    """Rows that were decided about together, have had their round, and what was asked so far; they may rest for 7."""
    joint, asked = CostOptimal().batch, []

    def ask(row: CostOptimal) -> int:
        (found,) = joint.run([row])
        asked.append([views.index(row), found])
        return found

    views = [joint.text(ask) for _ in range(rows + 1)]
    joint._limit, joint.allowance.asleep = 0, 7
    joint._round, joint._due = {*views[:rows]}, {*views[:rows]}
    joint.rest.offer(views[:rows])
    for view in views[:rows]:
        view._limit = 0
        tell(view)
        assert view.rests() == 7
    assert len(joint.ended) == rows
    return joint, views, asked


def tell(view: CostOptimal, context: int = 30) -> None:
    view.observe(
        Round(0, (), 0, 9, ExtraToken.CORRECTION, StopReason.MAX_DRAFT, None, 0.0, 4e-3, 4e-3, context=context)
    )


def test_rows_of_a_batch_rest_together_and_ask_nobody() -> None:
    joint, views, asked = resting()
    assert [view.draft_limit() for view in views[:3]] == [0, 0, 0]
    assert not asked
    for view in views[:3]:
        view.rested(7)
    assert (joint.allowance.asleep, joint.allowance.idle) == (0, 7), "counted once"
    assert [view.unread for view in views[:3]] == [7 + 31] * 3
    assert [view.rests() for view in views] == [0] * 4
    assert not joint.rest


def test_a_text_that_begins_while_others_rest_has_no_draft_and_teaches_nothing() -> None:
    joint, views, asked = resting()
    late = views[3]
    assert (late.draft_limit(), late.draft_limit(), asked) == (0, 0, [[3, 0]])
    tell(late)
    assert (len(joint.ended), late.rests(), late.draft_limit(), len(asked)) == (3, 0, 0, 2)


def test_a_text_that_ends_leaves_the_others_at_rest() -> None:
    joint, views, _ = resting()
    views[0].rested(2)
    views[1].rested(0)
    assert (joint.allowance.asleep, joint.allowance.idle) == (5, 2)
    assert joint.rest
    views[0].forget()
    tell(views[0])
    assert len(joint.ended) == 3
    views[2].rested(4)
    assert (joint.allowance.asleep, bool(joint.rest)) == (3, False), "all have ended"
    joint.rest.offer(views)
    assert views[0].rests() == 3
    views[0].rested(1)
    assert joint.allowance.asleep == 2
    joint, views, _ = resting()
    views[0].forget()
    views[1].rested(7)
    assert not joint.rest, "one that is told wakes all"


@pytest.fixture
def allowance() -> DraftAllowance:
    return DraftAllowance(RoundTimes(0.125), DraftAccount(), asleep=7)


@pytest.fixture
def rest(allowance: DraftAllowance) -> "JointRest":
    """Of three rows."""
    found: JointRest = JointRest(allowance)
    assert not found
    assert found.begin("a") == 0, "nothing was offered"
    found.offer("abc")
    assert [found.begin(row) for row in "abcx"] == [7, 7, 7, 0]
    assert found
    return found


def test_a_rest_is_told_of_once(allowance: DraftAllowance, rest: "JointRest") -> None:
    for row in "abc":
        rest.end(row, 7)
    assert (allowance.asleep, allowance.idle, bool(rest)) == (0, 7, False)
    assert [rest.begin(row) for row in "abc"] == [0] * 3, "it was offered for one round"


def test_whoever_ends_at_the_end_ends_it_for_all(rest: "JointRest") -> None:
    rest.end("a", 7)
    assert not rest


def test_texts_that_end_before_leave_the_others_at_rest(allowance: DraftAllowance, rest: "JointRest") -> None:
    rest.end("a", 4)
    rest.end("b", 2)
    rest.end("a", 5)
    assert (allowance.asleep, allowance.idle, bool(rest)) == (3, 4, True)
    rest.end("c", 7)
    assert (allowance.asleep, allowance.idle, bool(rest)) == (0, 7, False)


def test_the_next_rest_is_counted_anew(allowance: DraftAllowance, rest: "JointRest") -> None:
    for row in "abc":
        rest.end(row, 3)
    rest.offer("ab")
    assert [rest.begin(row) for row in "abc"] == [4, 4, 0]
    rest.end("a", 2)
    assert (allowance.asleep, allowance.idle) == (2, 5)


def test_a_row_in_which_another_text_begins_rests_no_more_and_may_not(
    allowance: DraftAllowance, rest: "JointRest"
) -> None:
    for row in "abc":
        rest.leave(row)
    assert not rest
    rest.offer("ab")
    rest.leave("a")
    assert (rest.begin("a"), rest.begin("b"), allowance.idle) == (0, 7, 0)
