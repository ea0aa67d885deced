"""Which policy drafts a round, worked out by hand, and what each learns."""

from dataclasses import replace
from typing import Any

import pytest

from specctl.policies import POLICIES, Setting
from specctl.policies.bandit import Bandit
from specctl.policies.registry import policy_table
from specctl.profile import parse_policy
from specctl.records import DraftStep, StopReason
from tests.support.toys import round_of

SHORT_OR_LONG = ("constant:draft_length=2", "constant:draft_length=4")


def test_the_arms_that_ucb1_chooses() -> None:
    """Drafts of 2 or of 4 tokens, max_draft 4, so that a round's reward is accepted * (1 / drafted + 1 / 4) / 2.

    Both arms draft once: 1 of 2 is 0.375, 0 of 4 is 0.
    n = 2: 0.375 + sqrt(2 ln 2 / 1) = 1.552; 0 + 1.177: short. 0 of 2: its mean is 0.1875.
    n = 3: 0.1875 + sqrt(2 ln 3 / 2) = 1.236; 0 + sqrt(2 ln 3) = 1.482: long. 4 of 4 is 1: its mean is 0.5.
    n = 4: 0.1875 + sqrt(2 ln 4 / 2) = 1.365; 0.5 + 1.177 = 1.677: long. 4 of 4: its mean is 2/3.
    n = 5: 0.1875 + sqrt(2 ln 5 / 2) = 1.456; 2/3 + sqrt(2 ln 5 / 3) = 1.702: long. 0 of 4: its mean is 0.5.
    n = 6: 0.1875 + sqrt(2 ln 6 / 2) = 1.526; 0.5 + sqrt(2 ln 6 / 4) = 1.447: short.
    """
    bandit = Bandit(arms=SHORT_OR_LONG, max_draft=4)
    lengths = []
    for accepted in (1, 0, 0, 4, 4, 0):
        lengths.append(bandit.draft_limit())
        bandit.observe(round_of(accepted, lengths[-1]))
    assert [*lengths, bandit.draft_limit()] == [2, 4, 2, 4, 4, 4, 2]


def test_an_arm_learns_from_its_own_rounds_alone() -> None:
    """heuristic's 5 tokens become 7 after its own full round, and not after the constant arm's."""
    bandit = Bandit(arms=("heuristic", "constant:draft_length=3"), max_draft=40)
    bandit.observe(round_of(5, 5))
    assert bandit.draft_limit() == 3
    bandit.observe(round_of(0, 3))
    assert bandit.draft_limit() == 7


def test_a_round_is_stopped_by_the_arm_that_drafts_it() -> None:
    bandit = Bandit(arms=("svip", "max-confidence:adapt=false,threshold=0.5"))
    sure, unsure = {"entropy": 0.1, "top_prob": 0.4}, {"entropy": 2.0, "top_prob": 0.6}
    assert [bandit.should_stop(DraftStep(1, 3, **step)) for step in (sure, unsure)] == [False, True]
    assert bandit.current_threshold == 0.3
    bandit.observe(round_of(0, 2))
    assert [bandit.should_stop(DraftStep(1, 3, **step)) for step in (sure, unsure)] == [True, False]
    assert bandit.current_threshold == 0.5


def test_no_arm_drafts_more_than_the_bandit_may() -> None:
    assert Bandit(arms=SHORT_OR_LONG, max_draft=1).draft_limit() == 1


def test_a_round_without_room_is_no_play_and_an_arm_that_drafts_nothing_earns_nothing() -> None:
    bandit = Bandit(arms=SHORT_OR_LONG)
    fresh = Bandit(arms=SHORT_OR_LONG)
    bandit.observe(replace(round_of(0, 0), stop=StopReason.BUDGET))
    assert bandit == fresh
    bandit.observe(round_of(0, 0))  # the policy drafted nothing
    assert bandit.draft_limit() == 4


def test_what_the_arms_earned_is_kept_and_what_they_adapted_begins_anew() -> None:
    for carry_over in (True, False):
        bandit = Bandit(arms=("heuristic", "constant:draft_length=3"), carry_over=carry_over)
        for accepted, drafted in ((5, 5), (0, 3)):
            bandit.observe(round_of(accepted, drafted))
        assert bandit.draft_limit() == 7
        bandit.reset()
        assert bandit.draft_limit() == 5
        bandit.observe(round_of(5, 5))
        assert bandit.draft_limit() == (7 if carry_over else 3), "the second arm drafts where nothing is known of it"


def test_it_reads_what_its_arms_read() -> None:
    assert Setting("bandit").signals == {"entropy", "top_prob"}
    setting = Setting.of(parse_policy('bandit:arms=["specdec++","cost-optimal:use_head=true"]'))
    assert setting.signals == setting.build().signals == {"accept_prob", "entropy", "top_prob"}
    assert setting.needs_predictor


@pytest.mark.parametrize("name", [name for name in POLICIES if name not in ("none", "bandit")])
def test_a_label_with_arms_is_taken_by_the_flag(name: str) -> None:
    table = {"name": "bandit", "arms": [name, "svip:threshold=0.4,max_draft=20"], "max_draft": 9}
    setting = Setting.of(table)
    assert setting.label == f'bandit:arms=["{name}","svip:threshold=0.4,max_draft=20"],max_draft=9'
    assert Setting.of(parse_policy(setting.label)) == setting
    assert setting.longest_draft == 9
    hash(setting)


@pytest.mark.parametrize(
    ("text", "table"),
    [
        ("svip", {"name": "svip"}),
        ("svip:", {"name": "svip"}),
        ("svip:threshold=0.4, max_draft=20", {"name": "svip", "threshold": 0.4, "max_draft": 20}),
        ('bandit:arms=["a:b=1,c=2","d"],max_draft=3', {"name": "bandit", "arms": ["a:b=1,c=2", "d"], "max_draft": 3}),
    ],
)
def test_a_policy_in_one_word(text: str, table: dict[str, Any]) -> None:
    assert policy_table(text) == table


@pytest.mark.parametrize("text", ["svip:threshold", "svip:name=x", "svip:=3"])
def test_a_word_of_another_form(text: str) -> None:
    with pytest.raises(ValueError, match="expected NAME:KEY=VALUE"):
        policy_table(text)


def test_the_arm_none_plays_where_no_arm_brings_anything() -> None:
    """Each arm loses 2 or 4 steps of 1/8 pass a round: 2 passes are gone after some 6 rounds, and then 1% is spent."""
    bandit = Bandit(arms=SHORT_OR_LONG)
    lengths = []
    for _ in range(1000):
        lengths.append(bandit.draft_limit())
        bandit.observe(round_of(0, lengths[-1]))
    assert all(lengths[:4])
    assert sum(lengths) / 8 <= 2 + 0.01 * 1000
    assert sum(lengths[-200:]) / 8 <= 0.01 * 200 + 0.5
    assert any(lengths[-100:]), "it still looks whether that has changed"
    for _ in range(200):
        bandit.observe(round_of(bandit.draft_limit(), bandit.draft_limit()))
    assert bandit.draft_limit() > 0


def test_a_round_of_none_says_nothing_about_an_arm() -> None:
    bandit = Bandit(arms=SHORT_OR_LONG, cost_ratio=2.0)
    bandit.observe(round_of(0, 2))
    assert bandit.draft_limit() == 0
    plays, rewards = list(bandit._plays), list(bandit._rewards)
    bandit.observe(round_of(0, 0))
    assert (bandit._plays, bandit._rewards) == (plays, rewards)
