"""Settings of hierarchies: what they are called and made of, and the search over all levels."""

import json
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from pydantic import TypeAdapter

from specctl.calibration.calibrated import draft_table
from specctl.calibration.compared_settings import (
    ComparedSettings,
    Space,
    compared_settings,
    explore,
    grid,
    level_grids,
    require_fits,
    with_predictors,
)
from specctl.errors import UsageError
from specctl.observing.results import of_request
from specctl.policies import Setting, nested
from specctl.profile import resolve
from specctl.prompts.suites import Suite
from specctl.replay.costs import CostTable, Level, Replay
from specctl.replay.trace_files import TraceHeader
from specctl.replay.traces import DraftSteps, Trace, recorded_by_place

SIGNALS = {"entropy", "top_prob", "token_prob"}
ABOVE, BELOW = Setting("svip", (("threshold", 0.5),)), Setting("self-verify", (("max_draft", 4),))


def test_levels_are_told_from_the_top_down():
    loop, once = nested([ABOVE, BELOW]), nested([Setting("constant", once=True), BELOW])
    assert loop.label == "svip:threshold=0.5 < self-verify:max_draft=4"
    assert (once.label, once.family) == ("constant(once) < self-verify:max_draft=4", "constant(once) < self-verify")
    assert [type(policy).__name__ for policy in (level.build() for level in loop.levels)] == ["Svip", "SelfVerify"]
    assert loop.table["draft"] == {"name": "self-verify", "max_draft": 4}


def test_a_level_that_never_drafts_leaves_the_one_above_alone():
    once = Setting("constant", once=True)
    assert nested([once, Setting("none"), BELOW]) == Setting("constant")
    assert nested([Setting("none"), BELOW]) == Setting("none")


@pytest.mark.parametrize("by", [nested([ABOVE, BELOW]), nested([Setting("constant", once=True), BELOW]), ABOVE])
def test_a_profile_takes_a_setting_and_gives_it_back(by):
    draft = resolve("embedded-hsddw").profile.draft.stopped_by(by)
    assert draft.setting == by
    assert [level.model for level in draft.levels] == ["embedded:mid", "embedded:draft"]
    assert len(draft.at_work().levels) == len(by.levels)


def test_grids_of_levels_hold_both_ways_to_pre_verify():
    upper, lower = level_grids(["svip", "self-verify"], "paper", [SIGNALS, SIGNALS])
    assert {(one.policy, one.once) for one in upper} == {("svip", False), ("constant", True)}
    assert {one.policy for one in lower} == {"self-verify", "none"}


def test_a_setting_is_one_candidate_however_it_is_written():
    settings = {"threshold": 0.65, "max_draft": 10, "min_draft": 1}
    ordered, reversed_ = (
        Setting.of({"name": "specdec++", **dict(pairs)}) for pairs in (settings.items(), reversed(settings.items()))
    )
    assert ordered == reversed_
    assert ordered in grid("specdec++", "dense", {"accept_prob"})


def test_every_level_below_the_first_may_be_left_out():
    options = level_grids(["svip"] * 3, "paper", [SIGNALS] * 3)
    assert [Setting("none") in some for some in options] == [False, True, True]


def test_heads_go_by_what_tells_them_apart():
    ones = [Setting.of({"name": "specdec++"}), Setting.of({"name": "svip"})]
    ones.append(Setting.of({"name": "disco"}))
    names = ["runs/a/d1-w1", "runs/b/d1-w1", "runs/b/d2-w1"]
    found = with_predictors(ones, {**dict.fromkeys(names, "accept_prob"), "runs/c": "own_accept_prob"})
    labels = ["specdec++:head=a/d1-w1", "specdec++:head=b/d1-w1", "specdec++:head=d2-w1", "svip", "disco:head=c"]
    assert [one.label for one in found] == labels
    assert len({one.family for one in found}) == 5


def test_each_head_has_its_price():
    costs = flat(2.0, 10.0, 0.0, head_ms={"small": 0.25, "large": 1.0})
    costs = replace(costs, signal_ms={"accept_prob": 0.25, "entropy": 0.5})
    assert costs.of_predictor(None) is costs.of_predictor("another") is costs
    assert costs.of_predictor("large").signal_ms == {"accept_prob": 1.0, "entropy": 0.5}
    assert costs.of_predictor("large") is costs.of_predictor("large")


def test_exploring_finds_the_best_of_all_combinations():
    options = level_grids(["constant", "constant"], "dense", [SIGNALS, SIGNALS])
    asked = []

    def speed(one: Setting) -> float:
        """A hill whose top depends on how blocks are pre-verified."""
        asked.append(one)
        if one.below is None:
            return -50.0
        long, short = (level.build().draft_length for level in one.levels)
        return -((long - (17 if one.once else 12)) ** 2) - (short - (5 if one.once else 3)) ** 2 + 7 * one.once

    space = Space(options, options)
    explore(space, Setting("none"), speed)
    best = max(map(nested, product(*options)), key=speed)
    assert (
        max(asked[:-1], key=speed) == best == nested([Setting("constant", (("draft_length", 17),), True), best.below])
    )
    assert best.below == Setting("constant")


def test_exploring_begins_next_to_the_setting_that_there_is():
    """At each level that it has; the middle option where it is none of the options."""
    options = [[Setting.of({"name": "constant", "draft_length": length}) for length in (1, 2, 3, 4)]] * 2
    start = nested([Setting("svip"), options[1][3]])
    asked = []
    explore(Space(options, options), start, lambda one: asked.append(one) or 0.0)
    assert asked[:4] == [nested([one, options[1][3]]) for one in options[0]]
    assert asked[4:8] == [nested([options[0][0], one]) for one in options[1]]
    asked.clear()
    explore(Space(options, options), options[0][1], lambda one: asked.append(one) or 0.0)
    assert asked[0] == nested([options[0][0], options[1][2]])


def test_a_fine_search_stays_with_the_policies_of_the_coarse_one():
    coarse, fine = (level_grids(["all", "all"], kind, [SIGNALS, SIGNALS]) for kind in ("paper", "dense"))
    asked = set()

    def speed(one: Setting) -> float:
        asked.add(one)
        return sum(
            (level.policy == "svip") - abs(dict(level.values).get("threshold", 0.3) - 0.72) for level in one.levels
        )

    space = Space(coarse, fine)
    explore(space, Setting("none"), speed)
    assert len(asked) <= space.most < len(fine[0]) * len(fine[1])
    best = max(asked, key=speed)
    assert [dict(level.values)["threshold"] for level in best.levels] == [0.72, 0.72]
    alone = [dict(one.values) for one in asked if one.policy == "constant" and not one.once]
    assert all(settings.get("draft_length") in (None, *range(2, 15)) for settings in alone)


def flat(draft: float, verify: float, rest: float, **more) -> CostTable:
    """Every drafted token and every pass costs the same."""
    lengths = np.array([0.0, 40.0])
    return CostTable(
        np.zeros(1), lengths, draft * lengths[None], np.full((1, 2), verify), {"entropy": 0.25}, rest, **more
    )


def test_every_level_has_its_price():
    costs = flat(100.0, 10.0, 1.0, below=flat(2.0, 5.0, 0.5), reading_ms={"top_prob": 0.125})
    nothing = DraftSteps([], [], [], [])
    trace = Trace("p", "c", 0, 3, 20, [1] * 9, recorded_by_place([], nothing, {}), 0.0)
    found = Replay(trace, (Level([0, 5], [4, 3], [4, 3]), Level([0, 2, 5], [1, 1, 2], [1, 1, 2])))
    expected = 2 * (10 + 1) + 3 * (5 + 0.5 + 0.125) + 4 * (2 + 0.25)
    assert costs.milliseconds([found], {"top_prob"}, {"entropy"}) == pytest.approx(expected)
    again = TypeAdapter(CostTable).validate_python(costs.as_record())
    assert again.milliseconds([found], {"top_prob"}, {"entropy"}) == pytest.approx(expected)
    top, lowest = costs.clocks([{"top_prob"}, {"entropy"}])
    assert top(7, 4, 0) == pytest.approx((0.0, 0.010))
    assert lowest(7, 4, 0) == pytest.approx((4 * 2.25e-3, 5.125e-3))
    alone = Replay(trace, (Level([0, 5], [4, 3], [4, 3]),))
    assert costs.milliseconds([alone], ()) == pytest.approx(2 * 11 + 7 * 100)


def test_what_a_draft_missed_is_priced_when_it_drafts_again():
    """Behind a prompt of 3 tokens it reads 3 + 2 at first, and later the 4 of four rounds: half of what 8 take."""
    costs = replace(flat(2.0, 5.0, 0.5), catch_up_ms={8: 4.0, 16: 6.0})
    nothing = DraftSteps([], [], [], [])
    trace = Trace("p", "c", 0, 3, 20, [1] * 9, recorded_by_place([], nothing, {}), 0.0)
    found = Replay(trace, (Level([0, 1, 2, 4, 5, 6, 7, 8], [0, 0, 1, 0, 0, 0, 0, 1], [0, 0, 1, 0, 0, 0, 0, 1]),))
    assert costs.milliseconds([found], ()) == pytest.approx(8 * 5.5 + 2 * 2 + 4.0 * 5 / 8 + 4.0 / 2)
    assert costs.clock(())(7, 1, 12)[0] == pytest.approx(1e-3 * (2 + 5.0))
    assert costs.catching_up(32) == pytest.approx(12.0)
    again = TypeAdapter(CostTable).validate_json(json.dumps(costs.as_record()))
    assert again.catch_up_ms == costs.catch_up_ms
    from_the_start = Replay(trace, (Level([0, 2], [1, 1], [1, 1]),))
    assert costs.milliseconds([from_the_start], ()) == pytest.approx(2 * 5.5 + 2 * 2)


def test_drafts_that_are_trees_are_not_replayed():
    draft = resolve("embedded").profile.draft.model_copy(update={"tree": 60})
    with pytest.raises(UsageError, match="cannot be replayed") as found:
        compared_settings(draft, None, "paper", [], SIGNALS, {})
    assert "draft.tree=0" in found.value.hint


@pytest.mark.parametrize("drafts", [1, 2, 3])
def test_a_profile_has_a_table_for_each_of_its_drafts(drafts):
    table, names = draft_table(ABOVE, drafts), []
    while table:
        names.append(table["policy"]["name"])
        table = table.get("draft")
    assert names == ["svip", "none", "none"][:drafts]


PROFILE = resolve("embedded").profile
SUITE = Suite("mine", (), "0" * 64)
SETTING = Setting.of({"name": "constant", "draft_length": 7})
PATH = Path("trace.jsonl")


@pytest.mark.parametrize(
    ("depth", "heads", "suite"), [(6, [], SUITE), (7, ["other"], SUITE), (7, [], Suite("mine", (), "1" * 64))]
)
def test_a_trace_to_continue_is_of_the_same_request(depth: int, heads: list[str], suite: Suite) -> None:
    asked = ComparedSettings(SETTING, [], [], None)
    same = TraceHeader(7, [0], [], of_request(PROFILE, SUITE))
    require_fits(same, PROFILE, asked, [], SUITE, PATH)
    other = TraceHeader(depth, [0], [], of_request(PROFILE, suite), heads)
    with pytest.raises(UsageError, match="holds the trace of another calibration"):
        require_fits(other, PROFILE, asked, [], SUITE, PATH)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["draft.model=embedded:mid"], "with embedded:draft as draft, not embedded:mid"),
        (["draft.policy.name=none", "draft.head=other/head"], "with embedded:draft-head as the draft's head"),
        (["engine=static"], "with another engine"),
        (["threads=1"], "with another threads"),
        (["sampling.temperature=1"], "with another temperature"),
        (["sampling.top_k=5"], "with another top_k"),
        ([], "for drafts of 6 tokens"),
    ],
)
def test_a_trace_to_search_in_is_of_the_same_models(changes: list[str], message: str) -> None:
    asked = ComparedSettings(SETTING, [], [], None)
    other = resolve("embedded", overrides=changes).profile
    made = of_request(PROFILE, SUITE)
    require_fits(TraceHeader(7, [0], ["accept_prob"], made), PROFILE, asked, [], None, PATH)
    with pytest.raises(UsageError, match=message):
        require_fits(TraceHeader(7 if changes else 6, [0], ["accept_prob"], made), other, asked, [], None, PATH)


def test_a_head_that_was_recorded_is_taken_and_another_is_not() -> None:
    asked = ComparedSettings(SETTING, [], [], None)
    header = TraceHeader(7, [0], ["accept_prob"], of_request(PROFILE, SUITE), ["mine"])
    require_fits(header, PROFILE, asked, ["mine"], None, PATH)
    with pytest.raises(UsageError, match="without the head yours"):
        require_fits(header, PROFILE, asked, ["mine", "yours"], None, PATH)
