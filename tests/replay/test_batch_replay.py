"""Texts replayed together: each has its own rounds, and passes take what a batch's prices say."""

from dataclasses import replace

import numpy as np
import pytest

from specctl.policies import NONE, Setting
from specctl.replay.costs import CostTable
from specctl.replay.play import (
    PassShare,
    PricedPasses,
    players_of,
    replay,
    replay_levels,
    replay_together,
)
from tests.support.made_traces import flat_costs, trace, traces

EOS = frozenset({0})
CONSTANT = Setting.of({"name": "constant", "draft_length": 3})
COSTS = replace(flat_costs(1.0, 8.0, per_token=0.5, rest=0.25), batches={4: flat_costs(1.6, 12.0, per_token=2.0)})
"""Of one text and of four, whose pass takes 0.5 ms for each token of a draft in either."""


def test_one_text_at_a_time_is_what_replay_plays_and_prices() -> None:
    texts = traces(5, prompts=3).traces
    for setting in (NONE, CONSTANT, Setting("svip"), Setting("cost-optimal")):
        played = replay_together(setting, texts, 1, COSTS, EOS)
        alone = replay(setting.build(), texts, EOS, COSTS.clock(setting.signals))
        assert played.replays == alone
        assert played.seconds == pytest.approx(COSTS.milliseconds(alone, setting.signals) / 1e3)


def test_a_chain_of_one_text_at_a_time_is_what_replay_plays_and_prices() -> None:
    repeating = [9, 100, 101, 102] * 5
    texts = [replace(each, prompt_ids=repeating) for each in traces(5, prompts=3).traces]
    chain = replace(CONSTANT, lookup=True)
    played = replay_together(chain, texts, 1, COSTS, EOS)
    alone = replay_levels(players_of(chain, [COSTS.clock(chain.signals)]), texts, EOS)
    assert played.replays == alone
    assert any(sum(each.top.copied) for each in alone)
    assert played.seconds == pytest.approx(COSTS.milliseconds(alone, chain.signals) / 1e3)


def test_each_text_has_the_rounds_that_it_has_alone() -> None:
    texts = traces(4, prompts=7).traces
    played = replay_together(Setting("svip"), texts, 3, COSTS, EOS)
    assert {each.trace.prompt: each for each in played.replays} == {
        text.prompt: replay(Setting("svip").build(), [text], EOS)[0] for text in texts
    }


def test_a_pass_lasts_for_all_who_share_it() -> None:
    """Four equal texts of 12 tokens in three rounds of three draft tokens, by hand."""
    texts = [trace(f"p{number}", [True] * 12) for number in range(4)]
    played = replay_together(CONSTANT, texts, 4, COSTS, EOS)
    assert (played.draft_passes, played.verifications) == (9, 3)
    assert played.seconds == pytest.approx(3 * (3 * 1.6 + 12.0 + 2.0 * 3) / 1e3)
    assert played.tokens == 48


def test_who_ends_makes_room_for_the_next() -> None:
    texts = [trace("long", [True] * 40), *(trace(f"short{number}", [True] * 4) for number in range(5))]
    played = replay_together(CONSTANT, texts, 2, COSTS, EOS)
    assert [each.trace.prompt for each in played.replays] == [*(f"short{number}" for number in range(5)), "long"]
    assert played.verifications == 10


def test_prices_between_numbers_of_texts_are_interpolated_and_beyond_in_proportion() -> None:
    price = COSTS.together
    assert price(1, 50, 2) == pytest.approx((1.0, 8.0 + 1.0, 0.25))
    assert price(4, 50, 8) == pytest.approx((1.6, 12.0 + 4.0, 0.0))
    assert price(2, 50, 0) == pytest.approx((1.2, 8.0 + 4.0 / 3, 0.25 * 2 / 3))
    assert price(8, 50, 0) == pytest.approx((3.2, 24.0, 0.0))


def test_shares_are_by_tokens_and_add_up_to_the_pass() -> None:
    passes = PricedPasses(COSTS, frozenset(), verifies=True)
    shares = passes.run([PassShare(50, 0), PassShare(50, 3), PassShare(50, 1), PassShare(50, 0)])
    assert sum(shares) == pytest.approx(passes.seconds)
    assert [share / shares[0] for share in shares] == pytest.approx([1, 4, 2, 1])


@pytest.mark.parametrize(
    ("lengths", "draft_ms", "step"),
    [([0, 4], [0.0, 8.0], 2.0), ([0, 1, 3], [0.0, 5.0, 9.0], 2.0)],
    ids=["one length", "the first step is dearer"],
)
def test_a_step_of_a_draft_is_told_from_whatever_lengths_there_are(
    lengths: list[int], draft_ms: list[float], step: float
) -> None:
    both = np.array([draft_ms, [3 * each for each in draft_ms]])
    table = CostTable(np.array([0.0, 100.0]), np.array(lengths), both, both + np.array([[7.0], [9.0]]), {}, 0.0)
    assert table.at(0) == pytest.approx((step, 7.0))
    assert table.at(50) == pytest.approx((2 * step, 8.0))
