import json
from dataclasses import replace
from pathlib import Path

import pytest
from factory import (
    DRAFT_MS,
    HIERARCHY,
    MID_MS,
    TARGET_MS,
    as_json,
    candidate,
    drafted_run,
    middle_run,
    nested_run,
    peer,
    peer_run,
    plain_run,
    run_set,
    tables,
    write_report,
)

from specctl.benchmark.cost_model import (
    bare_model,
    bare_ms,
    break_even,
    candidate_costs,
    candidate_levels,
    fit,
    forwards,
)
from specctl.benchmark.digest import digest
from specctl.benchmark.summaries import summarise
from specctl.observing.results import RESULTS, Candidate, PassTimes, RunSet, candidate_record, read_results
from specctl.policies import Setting, nested
from specctl.reporting.table import as_text


def of_window(cap: int) -> Setting:
    """Both levels of the hierarchy with this ``max_draft``."""
    own = Setting.of({"name": "self-verify", "max_draft": cap})
    return nested([own, own])


FULL = Candidate("full", HIERARCHY, (0, 1))
CANDIDATES = [
    candidate("none"),
    FULL,
    candidate("constant@mid", "constant", draft_length=3),
    Candidate("constant@draft", Setting.of({"name": "constant", "draft_length": 3}), (1,)),
    peer("hf"),
]
BLOCKS = [(4, [(3, 3), (2, 0)]), (1, [(2, 1)])]
"""7 tokens of the target in 2 passes; 7 tokens of the middle model in 3, 5 kept; 7 of the draft, 4 kept."""
COSTS = PassTimes(4.0, {1: 10.0, 8: 17.0}, ({1: 4.0, 3: 5.0, 5: 6.0}, {1: 2.0, 8: 2.5}))


def some(costs: PassTimes | None = None) -> RunSet:
    runs = []
    for prompt in "ab":
        runs += [
            plain_run(prompt, 7),
            nested_run("full", prompt, BLOCKS),
            middle_run("constant@mid", prompt, [(3, 2, "max_draft"), (3, 2, "max_draft"), (1, 0, "budget")]),
            drafted_run("constant@draft", prompt, [(3, 1, "max_draft")] * 3 + [(1, 0, "budget")]),
            peer_run("hf", prompt, 7, 50.0),
        ]
    return run_set(CANDIDATES, runs, drafts=["embedded:mid", "embedded:draft"], costs=costs)


def run_of(results: RunSet, label: str):
    return results.of(label)[0]


def test_forward_passes_are_counted_by_model() -> None:
    results = some()
    assert forwards(run_of(results, "full"), FULL, 2) == [3, 7, 2]
    assert forwards(run_of(results, "constant@mid"), CANDIDATES[2], 2) == [7, 0, 3]
    assert forwards(run_of(results, "constant@draft"), CANDIDATES[3], 2) == [0, 10, 4]
    assert forwards(run_of(results, "none"), CANDIDATES[0], 2) == [0, 0, 7]


def test_three_terms_are_recovered_from_exactly_linear_times() -> None:
    model = fit(some())
    assert model is not None
    assert model.drafts_ms == (pytest.approx(MID_MS), pytest.approx(DRAFT_MS))
    assert model.target_ms == pytest.approx(TARGET_MS)
    assert model.r_squared == pytest.approx(1.0)
    assert model.total_ms([3, 7, 2]) == pytest.approx(3 * MID_MS + 7 * DRAFT_MS + 2 * TARGET_MS)


def test_without_a_run_of_one_model_its_cost_stays_unknown() -> None:
    results = some()
    results.runs = [run for run in results.runs if run.candidate in ("none", "constant@mid")]
    assert fit(results) is None


def test_predictions_and_bare_times_include_all_levels() -> None:
    """Target widths 6 and 3, between 1 and 8, the middle model's 4, 3 and 3; seven single drafts."""
    results = some(COSTS)
    run = run_of(results, "full")
    target = (10.0 + 5) + (10.0 + 2)
    assert bare_ms(run, COSTS, FULL) == pytest.approx(target + 5.5 + 5.0 + 5.0 + 7 * 2.0)
    assert bare_ms(run_of(results, "constant@draft"), COSTS, CANDIDATES[3]) == pytest.approx(3 * 13.0 + 11.0 + 10 * 2.0)
    (cost,) = candidate_costs(results, summarise(results.runs, ["full"]), fit(results))
    assert cost.predicted == pytest.approx(1e3 * 7 / 46)
    assert cost.measured == pytest.approx(1e3 * 7 / 46)
    assert cost.overhead == pytest.approx(46 / (target + 15.5 + 14))
    assert cost.latency_ms is None
    assert bare_model(COSTS).drafts_ms == (4.0, 2.0)


def test_sigma_and_eta_of_each_level() -> None:
    found = {one.candidate: one for one in candidate_levels(some(), fit(some()))}
    full = found["full"]
    assert full.passes == pytest.approx((3 / 7, 7 / 7, 2 / 7))
    middle, lowest = full.levels
    assert (middle.draft, middle.redundancy, middle.utilisation) == (0, pytest.approx(2 / 7), pytest.approx(3 / 7))
    assert (lowest.draft, lowest.redundancy, lowest.utilisation) == (1, pytest.approx(3 / 7), 1.0)
    assert [level.draft for level in found["constant@draft"].levels] == [1]
    assert found["none"].passes == (0, 0, 1)
    assert found["none"].levels[0].redundancy is None
    assert "hf" not in found, "its passes were not counted"


def test_break_even_by_hand() -> None:
    """5 ms more of drafts for half a pass less: 10 ms. With equal passes only drafts count.

    A candidate that spends 4 ms more on drafts to save a fifth of a pass is faster from 20 ms on.
    """
    mine = (1.0, 1.0, 0.25)
    assert break_even(mine, [(0.0, 0.0, 0.75)], (3.0, 2.0)) == (pytest.approx(10.0), None)
    assert break_even(mine, [(0.0, 0.0, 0.75), (0.0, 3.0, 0.3)], (3.0, 2.0)) == (pytest.approx(10.0), None)
    upper = (0.0, 4.5, 0.05)
    assert break_even(mine, [(0.0, 0.0, 0.75), upper], (3.0, 2.0)) == (pytest.approx(10.0), pytest.approx(20.0))
    assert break_even(mine, [(0.0, 0.0, 0.4), upper], (3.0, 2.0)) is None, "33 ms are more than 20"
    assert break_even((1.0, 0.0, 0.5), [(0.0, 3.0, 0.5)], (3.0, 2.0)) == (0.0, None)
    assert break_even((1.0, 2.0, 0.5), [(0.0, 3.0, 0.5)], (3.0, 2.0)) is None
    assert break_even((1.0, 3.0, 0.5), [(0.0, 0.0, 0.4)], (3.0, 2.0)) is None


def test_a_hierarchy_pays_where_its_time_is_below_all_others() -> None:
    results = some()
    model = fit(results)
    assert model is not None
    (full,) = (one for one in candidate_levels(results, model) if one.nested)
    others = [one for one in candidate_levels(results, model) if not one.nested]
    from_ms = (3 * MID_MS + 7 * DRAFT_MS) / (7 - 2)
    assert full.pays_ms == (pytest.approx(from_ms), None), "the target alone is the last to be beaten"
    for factor, faster in ((0.98, False), (1.02, True)):
        costs = (*model.drafts_ms, from_ms * factor)
        assert bool(full.per_token(costs) < min(one.per_token(costs) for one in others)) is faster


def test_a_results_file_keeps_every_level(tmp_path: Path) -> None:
    results = some(COSTS)
    lines = [RESULTS.line(results.header), *map(RESULTS.line, results.runs), RESULTS.line(COSTS)]
    path = tmp_path / "results.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    again = read_results(path)
    assert again.header.candidates == results.header.candidates
    assert again.runs == results.runs
    assert again.costs == COSTS
    assert as_json(again) == as_json(results)


def test_fields_of_hierarchies_are_not_written_for_others() -> None:
    two = run_set(
        [candidate("none"), candidate("svip")], [plain_run("a", 7), drafted_run("svip", "a", [(3, 1, "policy")])]
    )
    written = json.dumps(
        [RESULTS.line(two.header), *map(RESULTS.line, two.runs), RESULTS.line(PassTimes(1.0, {1: 8.0}))]
    )
    shown = json.dumps(as_json(replace(two, costs=PassTimes(1.0, {1: 8.0}))))
    for key in ('"levels"', '"inner"', '"drafts"', '"further_ms"'):
        assert key not in written
        assert key not in shown
    assert "Levels" not in [table.title for table in tables(two)]


def test_the_table_and_the_json_contain_each_level() -> None:
    results = some(COSTS)
    text = as_text(tables(results))
    (table,) = (table for table in tables(results) if table.title == "Levels")
    assert table.columns[1:4] == ("mid passes/token", "draft passes/token", "target passes/token ↓")
    (row,) = (row for row in table.rows if row[0] == "full")
    assert row[1:8] == ("0.429", "1.000", "0.286", "0.286", "0.429", "0.429", "1.000")
    assert "t_mid 4.000 ms, t_draft 2.000 ms, t_target 10.000 ms" in text
    document = as_json(results)
    assert [one["candidate"] for one in document["levels"]] == ["none", "full", "constant@mid", "constant@draft"]


def test_the_oracle_covers_the_first_draft_only() -> None:
    results = replace(some(), oracle={"a": 1, "b": 1})
    shares = {cost.candidate: cost.passes_share for cost in digest(results).costs}
    assert (shares["full"], shares["constant@mid"]) == (pytest.approx(1 / 2), pytest.approx(1 / 3))
    assert shares["constant@draft"] is None


def test_a_family_is_the_same_policies_on_the_same_models() -> None:
    other = Candidate("k5", of_window(5), (0, 1))
    once = Candidate("once", replace(HIERARCHY, once=True), (0, 1))
    assert FULL.family == other.family
    assert len({FULL.family, once.family, candidate("self-verify").family}) == 3


@pytest.mark.exhaustive
def test_the_figures_of_hierarchies(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    results = some(COSTS)
    sweep = []
    for cap in (2, 5, 20):
        sweep.append(Candidate(f"full {cap}", of_window(cap), (0, 1)))
        results.runs += [nested_run(f"full {cap}", prompt, BLOCKS) for prompt in "ab"]
    results = replace(results, header=replace(results.header, candidates=[*CANDIDATES, *sweep]))
    names = {path.name for path in write_report(results, tmp_path)}
    assert {"where-the-hierarchy-pays.png", "speed-by-window.png"} <= names
    report = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "on the orange side of the thick line" in report
    assert "1 : 2.0 : 5.0" in report
    assert "self-verify@mid < self-verify@draft is the steadiest, 0% between" in report


def test_levels_are_plain_data() -> None:
    assert candidate_record(FULL)["levels"][1] == {
        "draft": 1,
        "policy": "self-verify",
        "settings": {"max_draft": 10, "carry_over": False},
        "once": False,
        "head": None,
    }
