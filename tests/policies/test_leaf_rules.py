"""How many leaves each place gets."""

from collections.abc import Sequence

import pytest

from specctl.errors import UsageError
from specctl.policies.leaf_rule import (
    COST_MOST,
    WIDENING,
    ConfidenceLeaves,
    ConstantLeaves,
    CostLeaves,
    Place,
    leaf_rule,
    parse_leaves,
)
from specctl.records import DraftStep, ExtraToken, Round, StopReason

ROOM = 63
DRAFT_SECONDS, PASS_SECONDS = 1e-3, 1e-2


def place(prob: float, others: int = 9) -> Place:
    """The probability that is left falls by half from one other token to the next."""
    return Place(prob, [(100 + rank, (1 - prob) / 2 ** (rank + 1)) for rank in range(others)])


@pytest.mark.parametrize(
    ("prob", "leaves"), [(0.1, 7), (0.3, 7), (0.31, 5), (0.6, 5), (0.7, 3), (0.81, 1), (1.0, 1), (1.0001, 1)]
)
def test_the_papers_table(prob: float, leaves: int) -> None:
    assert ConfidenceLeaves().widths([place(prob)], ROOM) == [leaves]


def test_no_more_leaves_than_there_are_tokens_or_room() -> None:
    for rule, wide in ((ConstantLeaves(4), 4), (ConfidenceLeaves(), 7)):
        assert rule.widths([place(0.2), place(0.2, others=2), place(0.2)], ROOM) == [wide, 2, wide]
        assert rule.widths([place(0.2), place(0.2)], wide + 1) == [wide, 1]
        assert rule.widths([place(0.2), place(0.2)], 0) == [0, 0]


def play(
    rule: CostLeaves, places: Sequence[Place], rounds: int, per_token: float, *, accepted: int, own: int = 100
) -> list[list[int]]:
    """Rounds in each of which the first tokens are accepted and the target's own token in place of the next is ``own``.

    Args:
        per_token: what each token adds to a pass, as a share of its time.
    """
    found = []
    for number in range(rounds):
        widths = rule.widths(places, ROOM)
        found.append(widths)
        leaves = tuple(
            tuple(token for token, _ in one.others[:width]) for one, width in zip(places, widths, strict=True)
        )
        meets = accepted < len(places) and own in leaves[accepted]
        steps = tuple(DraftStep(index + 1, index) for index in range(len(places)))
        nodes = len(places) + sum(widths)
        rule.observe(
            Round(
                number,
                steps,
                accepted,
                extra=7 if meets else own,
                extra_kind=ExtraToken.BONUS if meets else ExtraToken.CORRECTION,
                stop=StopReason.POLICY,
                draft_seconds=DRAFT_SECONDS * len(places),
                verify_seconds=PASS_SECONDS * (1 + per_token * nodes),
                leaves=leaves,
                leaf=own if meets else None,
            )
        )
    return found


def test_leaves_that_cost_nothing_are_taken_where_they_help() -> None:
    widths = play(CostLeaves(), [place(0.5)] * 3, 60, 0.0, accepted=1)
    assert sum(widths[-1]) >= 12
    assert max(widths[-1]) <= COST_MOST


def test_leaves_that_cost_too_much_are_left_out() -> None:
    widths = play(CostLeaves(), [place(0.9)] * 3, 200, 0.5, accepted=2)
    assert sum(map(sum, widths[-100:])) < 20, "hardly ever, to see whether they still cost too much"


def test_a_dear_pass_gets_the_leaves_that_help_most() -> None:
    """Rejections come after one accepted token, the target's own token is always the likeliest other one."""
    rule = CostLeaves()
    widths = play(rule, [place(0.95), place(0.3), place(0.95)], 200, 0.06, accepted=1)[-1]
    assert widths[1] >= 1
    assert widths[0] == widths[2] == 0


def test_leaves_that_are_never_met_are_left_out_in_time() -> None:
    before, *_, after = play(CostLeaves(), [place(0.5)] * 3, 300, 0.02, accepted=1, own=50)
    assert sum(after) < sum(before)


def test_unknown_widths_are_approached_in_steps() -> None:
    widths = [sum(counts) for counts in play(CostLeaves(), [place(0.2)] * 4, 30, 0.0, accepted=2)]
    assert widths[0] <= WIDENING
    assert all(later - max(widths[: index + 1]) <= WIDENING for index, later in enumerate(widths[1:]))


def test_values_of_the_setting() -> None:
    assert leaf_rule(3) == ConstantLeaves(3)
    assert leaf_rule("confidence") == ConfidenceLeaves()
    assert isinstance(leaf_rule("cost"), CostLeaves)
    assert [parse_leaves(text) for text in ("3", "confidence", "cost")] == [3, "confidence", "cost"]
    for text in ("0", "-1", "many", "1.5", ""):
        with pytest.raises(UsageError, match="--leaves"):
            parse_leaves(text)


def test_a_leaf_that_was_met_is_learned_as_met() -> None:
    """Behind a met leaf the round goes on with another token of the target's own."""
    places = [place(0.5)] * 3
    token = places[1].others[0][0]
    met, missed = CostLeaves(), CostLeaves()
    play(met, places, 12, 0.0, accepted=1, own=token)
    play(missed, places, 12, 0.0, accepted=1, own=-1)
    assert sum(chance for chance, _ in met._gains(places)) > 1.5 * sum(chance for chance, _ in missed._gains(places))
