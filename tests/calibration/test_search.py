from dataclasses import replace

import numpy as np
import pytest
from made_traces import ALL_SIGNALS, LENGTH, SIGNALS, flat_costs, trace, traces
from pydantic import TypeAdapter

from specctl.calibration.ascent import Space
from specctl.calibration.grids import grid
from specctl.calibration.search import NONE, choose, score, score_oracle, search, split
from specctl.calibration.tables import as_document, calibration_tables, curve, verdict
from specctl.errors import UsageError
from specctl.policies import POLICIES, Setting
from specctl.replay.costs import CostTable
from specctl.replay.play import Replay


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
    played = Replay(where, [0, 50], [1, 4], [1, 4])
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
    with pytest.raises(UsageError, match="did you mean 'svip'"):
        grid("svpi", "paper", SIGNALS)


def test_all_is_all_that_the_known_signals_allow():
    without, with_head, with_disco = (
        {one.policy for one in grid("all", "paper", known)}
        for known in (SIGNALS, ALL_SIGNALS, SIGNALS | {"own_accept_prob"})
    )
    assert without == POLICIES.keys() - {"specdec++", "disco", "confidence"}
    assert with_head == POLICIES.keys() - {"disco", "confidence"}
    assert with_disco == POLICIES.keys() - {"specdec++", "confidence"}


def test_settings_that_say_the_default_are_left_out():
    assert Setting.of({"name": "svip", "threshold": 0.3, "c": 0.2}) == Setting("svip", (("c", 0.2),))


def test_tables_and_document_tell_the_same():
    found = search(traces(6), grid("svip", "dense", SIGNALS), Setting("constant"), flat_costs(1, 10))
    costs = flat_costs(1, 10)
    shown = calibration_tables(found, costs, [])
    document = as_document(found, costs, [])
    assert shown[0].rows[0][0].removesuffix(" *") == found.ranking[0].score.setting.label
    assert document["chosen"] == found.winner.score.setting.table
    assert document["verdict"] == verdict(found)
    assert sum(" *" in row[0] for row in shown[0].rows) == 1
    knob, points = curve(found)
    assert knob == "threshold"
    assert [value for value, _ in points] == sorted(value for value, _ in points)
