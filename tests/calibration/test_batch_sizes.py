"""A setting for each number of texts at once: replayed together, chosen by the rule of one text."""

from dataclasses import replace

import pytest

from specctl.calibration.calibration_report import by_size, size_document
from specctl.calibration.search import (
    EACH,
    finalists,
    require_priced,
    score,
    search,
    search_sizes,
    with_batches,
)
from specctl.errors import UsageError
from specctl.policies import NONE, Setting
from specctl.replay.costs import CostTable
from tests.support.made_traces import flat_costs, traces

LENGTHS = [Setting.of({"name": "constant", "draft_length": length}) for length in (1, 2, 4, 6)]
LEARNING = Setting("cost-optimal")
DEAR = flat_costs(2.0, 30.0, per_token=40.0)
"""Of four texts, each draft token of which costs more than a pass: none pays."""


def priced(four: CostTable) -> CostTable:
    return replace(flat_costs(1.0, 10.0), batches={4: four})


def test_texts_together_that_gain_nothing_have_the_scores_of_a_replay_of_each() -> None:
    """Two texts take as long as one after the other."""
    some, costs = traces(6, 4), flat_costs(1.0, 10.0, rest=0.5)
    costs = replace(costs, batches={2: flat_costs(2.0, 20.0, rest=1.0)})
    alone, together = (score(LENGTHS[2], some, some.prompts, costs, rows) for rows in (1, 2))
    assert together.tokens.tolist() == (2 * EACH * alone.tokens / 4).tolist()
    # Texts share a pass by their tokens, and the time outside of passes by their passes.
    assert together.ms == pytest.approx(2 * EACH * alone.ms / 4, rel=0.02)


def test_the_shares_of_prompts_add_up_to_the_time_of_the_batch() -> None:
    some = traces(6, 4)
    found = score(NONE, some, some.prompts, priced(flat_costs(2.0, 30.0, rest=2.0)), 4)
    assert found.passes.tolist() == [240.0] * 4
    assert found.ms.sum() == pytest.approx(240 * 32.0)


def test_where_drafts_of_several_texts_do_not_pay_a_setting_of_their_own_is_chosen() -> None:
    some, costs = traces(6), priced(DEAR)
    found = search(some, LENGTHS, None, costs)
    before = found.winner.score.setting
    (size,) = search_sizes(some, found, LENGTHS, [4], costs)
    assert before.drafts
    assert (found.winner.score.setting, size.winner.score.setting) == (before, NONE)
    assert with_batches(before, {4: NONE}).at(4) == NONE
    table = by_size(found, [size])
    assert [row[:2] for row in table.rows] == [("1", before.label), ("4", "none")]
    constants = [found.winner, next(one for one in size.ranking if one.score.setting != NONE)]
    assert [row[-2:] for row in table.rows] == [
        (one.score.setting.label, f"{one.score.tokens_per_second:.1f}") for one in constants
    ]
    assert size_document(size)["chosen"] == {"name": "none"}


def test_a_setting_that_is_within_the_noise_everywhere_is_chosen_for_all() -> None:
    some, costs = traces(6), priced(flat_costs(1.0, 10.0))
    found = search(some, LENGTHS, None, costs)
    (size,) = search_sizes(some, found, LENGTHS, [4], costs)
    assert size.winner.score.setting == found.winner.score.setting == found.choice.chosen.setting
    assert with_batches(found.winner.score.setting, {4: size.winner.score.setting}).batches == ()


def test_only_candidates_are_chosen() -> None:
    some, costs = traces(6), priced(flat_costs(1.0, 10.0))
    found = search(some, [LEARNING], None, costs, LENGTHS)
    (size,) = search_sizes(some, found, [LEARNING], [4], costs)
    assert size.winner.score.setting in (LEARNING, NONE)
    assert {one.score.setting.policy for one in size.ranking} == {"none", "constant", "cost-optimal"}


def test_finalists_are_the_most_promising_of_each_policy_and_longest_draft() -> None:
    some, costs = traces(6), priced(DEAR)
    svips = [Setting.of({"name": "svip", "threshold": 0.1 * n}) for n in range(1, 9)]
    found = search(some, [*svips, *LENGTHS], None, costs)
    names = [one.policy for one in finalists(found, costs, 4)]
    assert (names.count("svip"), names.count("constant"), names.count("none")) == (3, 4, 1)


def test_numbers_whose_costs_are_not_known_are_an_error() -> None:
    require_priced([4], priced(DEAR), "the trace")
    with pytest.raises(UsageError, match="no costs of 8 texts at once, but those of 4"):
        require_priced([4, 8], priced(DEAR), "the trace")
    with pytest.raises(UsageError, match="none of several"):
        require_priced([8], flat_costs(1.0, 10.0), "the trace")


def test_the_setting_of_the_largest_number_that_is_reached_is_used() -> None:
    both = with_batches(LENGTHS[3], {4: LENGTHS[1], 8: LENGTHS[1], 16: NONE})
    assert [least for least, _ in both.batches] == [4, 16]
    assert [both.at(rows) for rows in (1, 3, 4, 15, 64)] == [LENGTHS[3], LENGTHS[3], LENGTHS[1], LENGTHS[1], NONE]
    assert both.label == "constant:draft_length=6(4 texts: constant:draft_length=2)(16 texts: none)"
    assert both.table["batch_policies"] == {"4": "constant:draft_length=2", "16": "none"}
    assert (both.longest_draft, both.needs_predictor) == (6, False)
