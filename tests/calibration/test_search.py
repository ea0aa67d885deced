"""Which setting is chosen, and how sure that is, against counts by hand."""

import tomllib
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from pydantic import TypeAdapter

from specctl.calibration.calibrated import calibrated_profile, profile_text
from specctl.calibration.calibration_report import _curve, as_document, calibration_tables, curve, plain_interval
from specctl.calibration.compared_settings import Space, grid
from specctl.calibration.decision import Advice, Decision
from specctl.calibration.search import NONE, Score, choose, score, score_oracle, search, split
from specctl.errors import UsageError
from specctl.policies import POLICIES, Setting
from specctl.profile import resolve
from specctl.replay.bounds import _linear
from specctl.replay.costs import CostTable, Level, Replay
from specctl.replay.traces import Trace, recorded_by_place
from specctl.statistics import Interval
from tests.support.made_traces import ALL_SIGNALS, LENGTH, SIGNALS, flat_costs, trace, traces


def verdict(found):
    return Advice.of(found, None, []).verdict


def test_costs_are_interpolated_and_held():
    costs = CostTable(
        np.array([0.0, 100.0]),
        np.array([0.0, 2.0]),
        np.array([[0.0, 2.0], [0.0, 4.0]]),
        np.array([[10.0, 10.0], [20.0, 20.0]]),
        {"entropy": 0.5},
        1.0,
    )
    where = trace("p", [True] * 5)
    # Contexts 20 + start: 20 and 70; drafted 1 and 4, the second held at 2.
    played = Replay(where, (Level([0, 50], [1, 4], [1, 4]),))
    expected = (10 + 0.2 * 10) + (1 + 0.2 * 1) + (10 + 0.7 * 10) + (2 + 0.7 * 2) + 5 * 0.5 + 2 * 1.0
    assert costs.milliseconds([played], {"entropy"}) == pytest.approx(expected)
    assert costs.milliseconds([played], ()) == pytest.approx(expected - 2.5)
    again = TypeAdapter(CostTable).validate_python(costs.as_record())
    assert again.milliseconds([played], ()) == pytest.approx(expected - 2.5)


def test_a_score_counts_what_the_rounds_did():
    one = traces(6, 1)
    found = score(Setting("constant", (("draft_length", 3),)), one, ["p0"], flat_costs(1, 10))
    assert found.tokens.tolist() == [LENGTH]
    assert found.passes[0] + found.accepted[0] == LENGTH
    assert found.ms[0] == pytest.approx(10 * found.passes[0] + found.drafted[0])
    assert found.tokens_per_second == pytest.approx(1e3 * LENGTH / found.ms[0])
    baseline = score(NONE, one, ["p0"], flat_costs(1, 10))
    assert baseline.ms[0] == pytest.approx(10 * LENGTH)


def test_the_best_threshold_stops_where_the_draft_turns_unsure():
    found = search(traces(6), grid("all", "paper", SIGNALS), NONE, flat_costs(1, 10))
    winner = found.winner.score
    assert winner.setting.policy in ("svip", "max-confidence", "adaedl")
    assert winner.tokens_per_second > found.ranked("constant").score.tokens_per_second
    assert winner.tokens_per_second <= found.oracle.score.tokens_per_second
    assert found.held_out
    assert set(found.chosen_on).isdisjoint(found.reported_on)


def test_the_speed_that_is_reported_is_that_of_the_other_half():
    """The prompts that choose are easy, the others hard, and both parts are equally large."""
    easy = [trace(f"easy{n}", [position % 12 != 11 for position in range(LENGTH)]) for n in range(4)]
    hard = [trace(f"hard{n}", [position % 3 != 2 for position in range(LENGTH)]) for n in range(4)]
    both = [each for pair in zip(easy, hard, strict=True) for each in pair]
    known, costs = replace(traces(6), traces=both), flat_costs(1, 10)
    found = search(known, grid("svip", "paper", SIGNALS), Setting("svip"), costs)
    assert (found.chosen_on, found.reported_on) == ([f"easy{n}" for n in range(4)], [f"hard{n}" for n in range(4)])
    setting = found.winner.score.setting
    speeds = [score(setting, known, half, costs) for half in (found.chosen_on, found.reported_on)]
    assert speeds[0].tokens_per_second > 1.3 * speeds[1].tokens_per_second
    assert found.winner.score.tokens_per_second == speeds[1].tokens_per_second
    alone = score(NONE, known, found.reported_on, costs)
    assert found.winner.speedup == speeds[1].speedup(alone)


def test_a_setting_no_better_than_the_noise_loses_to_a_simpler_one():
    def made(candidate: Setting, ms: list[float]):
        whole = score(candidate, traces(6, 4), ["p0", "p1", "p2", "p3"], flat_costs(1, 10))
        return type(whole)(candidate, whole.tokens, np.array(ms), whole.passes, whole.drafted, whole.accepted)

    simple, fancy = Setting("constant"), Setting("adaedl")
    noisy = choose([made(simple, [100, 120, 90, 110]), made(fancy, [98, 90, 120, 110])])
    assert (noisy.fastest.setting, noisy.chosen.setting) == (fancy, simple)
    assert [found.setting for found in noisy.near] == [fancy]
    clear = choose([made(simple, [100, 120, 90, 110]), made(fancy, [80, 100, 70, 90])])
    assert clear.chosen.setting == fancy
    assert clear.near == []
    assert clear.share == 1.0


@pytest.mark.parametrize(("draft", "every"), [(1.0, 1), (20.0, 6)], ids=["never agrees", "too slow"])
def test_a_draft_that_does_not_pay_leads_to_none(draft: float, every: int):
    found = search(traces(every), grid("all", "paper", SIGNALS), Setting("svip"), flat_costs(draft, 10))
    assert found.winner.score.setting == NONE
    assert verdict(found).startswith("use none")
    assert any("do not speculate" in warning for warning in found.warnings)
    assert any("never agrees" in warning for warning in found.warnings) == (every == 1)


@pytest.mark.parametrize("reach", [0, 15])
def test_answers_that_outgrow_the_drafts_context_are_counted(reach: int):
    """Where it holds no prompt at all, too."""
    whole = traces(6)

    def cut(one: Trace) -> Trace:
        draft = one.draft
        assert draft.along is not None
        branches = {n: draft.branches[tail] for n in range(reach) if (tail := draft.tails[n]) is not None}
        cut = recorded_by_place(draft.accepted[:reach], draft.along[:reach], branches)
        return replace(one, draft=replace(cut, reach=reach))

    found = search(
        replace(whole, traces=[*map(cut, whole.traces)]), grid("svip", "paper", SIGNALS), NONE, flat_costs(1, 10)
    )
    assert any("the draft's context ended before 12 of 12 answers did" in warning for warning in found.warnings)
    assert found.oracle.score.drafted.sum() <= found.oracle.score.passes.sum() + 12 * reach
    assert (found.winner.score.setting == NONE) == (reach == 0)
    assert found.winner.score.drafted.sum() <= 12 * reach


def test_too_few_prompts_are_said_so():
    found = search(traces(6, 1), grid("constant", "paper", SIGNALS), NONE, flat_costs(1, 10))
    assert not found.held_out
    assert found.winner.speedup.low is None
    assert len(found.warnings) == 2


def test_settings_that_are_also_ranked_are_not_chosen():
    constants, also_ranked = (grid(name, "paper", SIGNALS) for name in ("constant", "svip"))
    found = search(traces(6), constants, NONE, flat_costs(1, 10), also_ranked)
    assert found.ranking[0].score.setting.policy == "svip"
    assert found.winner.score.setting.policy == "constant"


def test_a_hierarchy_always_shows_its_upper_draft_alone_and_the_best_rival():
    """However many combinations did better, and though no draft at all does better still."""
    some = traces(6)
    some.traces = [replace(one, draft=replace(one.draft, below=one.draft)) for one in some.traces]
    costs = replace(flat_costs(30, 10), below=flat_costs(30, 10))
    chains = [[Setting("constant", (("draft_length", n),)) for n in (1, 2)], [Setting("none")]]
    also_ranked = grid("constant", "paper", SIGNALS)
    found = search(some, [], None, costs, also_ranked, space=Space(chains, chains))
    assert found.winner.score.setting == NONE
    assert found.ranked("constant") is not None
    assert found.signal_bound is None


def test_the_split_is_even_in_every_category():
    chosen, reported = split(traces(6, 10))
    for part in (chosen, reported):
        assert len(part) == 5
        assert {int(prompt[1:]) % 2 for prompt in part} == {0, 1}


def test_the_oracle_is_no_slower_than_anyone():
    some, ids = traces(4), [f"p{n}" for n in range(12)]
    costs = flat_costs(1, 10)
    best = score_oracle(some, ids, costs).tokens_per_second
    assert all(best >= score(one, some, ids, costs).tokens_per_second for one in grid("all", "paper", SIGNALS))


def test_grids_build_and_hold_the_papers_values():
    for name in [*POLICIES, "all"]:
        paper, dense = grid(name, "paper", ALL_SIGNALS), grid(name, "dense", ALL_SIGNALS)
        assert len(set(dense)) == len(dense)
        assert {one.label for one in paper} <= {one.label for one in dense}
        for one in dense:
            one.build()
            assert one.longest_draft <= 41
    lengths = {setting.longest_draft for setting in grid("constant", "dense", ALL_SIGNALS)}
    assert lengths == set(range(1, 25))
    with pytest.raises(UsageError, match="did you mean 'svip'"):
        grid("svpi", "paper", SIGNALS)


def test_all_is_all_that_the_known_signals_allow():
    without, with_predictor, with_disco = (
        {one.policy for one in grid("all", "paper", known)}
        for known in (SIGNALS, ALL_SIGNALS, SIGNALS | {"own_accept_prob"})
    )
    assert without == POLICIES.keys() - {"specdec++", "disco", "confidence"}
    assert with_predictor == POLICIES.keys() - {"disco", "confidence"}
    assert with_disco == POLICIES.keys() - {"specdec++", "confidence"}


def test_settings_that_say_the_default_are_left_out():
    assert Setting.of({"name": "svip", "threshold": 0.3, "c": 0.2}) == Setting("svip", (("c", 0.2),))


def test_tables_and_document_tell_the_same():
    found = search(traces(6), grid("svip", "dense", SIGNALS), Setting("constant"), flat_costs(1, 10))
    costs = flat_costs(1, 10)
    decision = Decision(traces(6), found, costs, [])
    shown, document = calibration_tables(decision), as_document(decision)
    assert shown[0].rows[0][0].removesuffix(" *") == found.ranking[0].score.setting.label
    assert document["chosen"] == found.winner.score.setting.table
    assert document["verdict"] == verdict(found)
    assert sum(" *" in row[0] for row in shown[0].rows) == 1
    knob, points = curve(found)
    assert knob == "threshold"
    assert [value for value, _ in points] == sorted(value for value, _ in points)


def test_more_than_the_oracle_is_said_to_be_noise():
    costs = flat_costs(1, 10)
    found = search(traces(6), grid("svip", "paper", SIGNALS), Setting("constant"), costs)
    decision = Decision(traces(6), found, costs, [])
    assert "noise" not in calibration_tables(decision)[0].note.replace("within the noise", "")
    found.oracle = replace(found.oracle, score=replace(found.oracle.score, ms=1.2 * found.ranking[0].score.ms))
    label = found.ranking[0].score.setting.label
    told = f" The oracle bounds nothing here, for {label} is above it: its costs are noisy."
    assert told in calibration_tables(decision)[0].note
    assert calibration_tables(decision)[0].rows[-1][0] == "oracle (no bound here)"
    below = replace(found.oracle, score=replace(found.oracle.score, ms=0.5 * found.ranking[0].score.ms))
    found.oracle, found.signal_bound = below, replace(found.oracle, score=replace(found.oracle.score))
    *_, bound, oracle = (row[0] for row in calibration_tables(decision)[0].rows)
    assert (bound.endswith(" (no bound here)"), oracle) == (True, "oracle")
    assert "rules that read entropy and top probability." in calibration_tables(decision)[0].note


def test_a_head_adds_its_own_time_in_place_of_the_first_ones():
    costs = replace(
        flat_costs(1, 10),
        signal_ms={"none": 0.0, "accept_prob": 0.5, "accept_prob+entropy": 0.7, "entropy": 0.2},
        head_ms={"small": 0.5, "large": 0.9, "tiny": 0.1},
    )
    assert costs.of_predictor("large").signal_ms == pytest.approx(
        {"none": 0.0, "accept_prob": 0.9, "accept_prob+entropy": 1.1, "entropy": 0.2}
    )
    assert costs.of_predictor("tiny").signal_ms["accept_prob+entropy"] == pytest.approx(0.3)
    assert costs.of_predictor("small").signal_ms == pytest.approx(costs.signal_ms)
    assert costs.of_predictor("unknown") is costs


def test_the_signal_bound_is_priced_in_the_middle_of_the_text():
    """Times grow with the context: a step takes 1 ms at first and 3 ms at 100 tokens, a pass 10 and 30."""
    lengths = np.array([0.0, 1.0, 2.0])
    growing = np.array([[1.0], [3.0]])
    costs = CostTable(np.array([0.0, 100.0]), lengths, growing * lengths, 10 * growing * np.ones(3), {}, 0.0)
    step, beginning, target = _linear([trace("p", [True] * LENGTH)], costs)
    assert (step, beginning, target) == (pytest.approx(2.0), pytest.approx(0.0), pytest.approx(20.0)), "20 + 60 / 2"


def test_a_calibrated_profile_is_short_and_reads_back(tmp_path):
    costs = flat_costs(1, 10)
    found = search(traces(6), grid("svip", "dense", SIGNALS), Setting("constant"), costs)
    decision = Decision(traces(6), found, costs, [])
    table = calibrated_profile(resolve("embedded"), decision, {"suite": {"name": "made"}}, tmp_path / "own.toml")
    text = profile_text(table, verdict(found))
    assert tomllib.loads(text) == table
    assert text.startswith(f"# {verdict(found)}\n")
    assert table["description"] == f"embedded, calibrated: {found.winner.score.setting.label}"
    below = replace(costs, below=costs, signal_ms={"a+b": 0.5})
    record = {**table, "provenance": {**table["provenance"], "costs": below.as_record()}}
    text = profile_text(record, verdict(found))
    assert tomllib.loads(text) == record
    assert len(text[text.index("[provenance.costs]") :].splitlines()) == 1 + len(below.as_record())


def test_of_a_long_curve_every_few_values_are_shown_and_the_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    speeds = [SimpleNamespace(tokens_per_second=100.0 + (place == 7)) for place in range(40)]
    points = [(place, speed) for place, speed in enumerate(speeds)]
    monkeypatch.setattr("specctl.calibration.calibration_report.curve", lambda _: ("draft_length", points))
    found: Any = SimpleNamespace(curve=[SimpleNamespace(setting=Setting.of({"name": "constant"}))])
    assert [row[0] for row in _curve(found).rows] == [str(place) for place in sorted({*range(0, 40, 3), 7})]


def test_rates_of_a_score_are_over_all_its_prompts() -> None:
    numbers = (np.array(some, dtype=np.float64) for some in ([6, 4], [20, 30], [3, 2], [8, 4], [3, 2]))
    one = Score(Setting.of({"name": "constant"}), *numbers)
    assert (one.tokens_per_second, one.acceptance_rate) == (200.0, 5 / 12)
    assert (one.discard_rate, one.verification_rate, one.mean_acceptance_length) == (0.7, 0.5, 2.0)


def test_an_interval_in_a_document_has_four_places_and_may_be_missing() -> None:
    assert plain_interval(None) is None
    assert plain_interval(Interval(1.23456, None, 2.0)) == {
        "value": 1.2346,
        "low": None,
        "high": 2.0,
        "prompts": None,
    }


CONSTANT, SVIP = Setting("constant"), Setting("svip")


def scored(setting: Setting, ms: list[float]) -> Score:
    """Ten tokens of each prompt."""
    times = np.array(ms)
    return Score(setting, np.full(len(ms), 10.0), times, times, times, times)


def test_a_difference_on_every_prompt_is_seen_however_much_the_prompts_differ() -> None:
    """The simpler setting is two percent slower on each: that is not noise, though prompts differ fourfold."""
    ms = [1.0, 4.0, 3.0, 1.5, 2.0, 3.5, 2.5, 1.2]
    found = choose([scored(CONSTANT, [1.02 * each for each in ms]), scored(SVIP, ms)])
    assert found.chosen.setting == SVIP
    assert found.near == []


def test_the_share_of_resamples_is_that_within_one_standard_error() -> None:
    simple, fast = [10.9, 13.2, 9.6], [12.8, 11.3, 8.1]
    draws = [np.bincount(draw, minlength=3) for draw in product(range(3), repeat=3)]
    speeds = [[30e3 / float(draw @ np.array(ms)) for ms in (simple, fast)] for draw in draws]
    error = float(np.std([b - a for a, b in speeds]))
    within = float(np.mean([a >= max(a, b) - error for a, b in speeds]))
    ahead = float(np.mean([a >= b for a, b in speeds]))
    assert ahead < within - 0.1 < 0.9, "the standard error tells, and not every resample is within it"
    found = choose([scored(CONSTANT, simple), scored(SVIP, fast)])
    assert (found.chosen.setting, found.fastest.setting) == (CONSTANT, SVIP)
    assert found.share == pytest.approx(within, abs=0.02)
