import pytest
from rich.cells import cell_len

from specctl.records import DraftStep, ExtraToken, Round, StopReason
from specctl.terminal.live import COLUMN_WIDTH, bar, strip, tree


def round_of(index: int, accepted: int, drafted: int, stop: StopReason | None = StopReason.POLICY, **more) -> Round:
    steps = tuple(DraftStep(position + 1, 7) for position in range(drafted))
    kind = ExtraToken.BONUS if accepted == drafted else ExtraToken.CORRECTION
    return Round(index, steps, accepted, 9, kind, stop, **more)


def hierarchy(index: int, accepted: int, handed_up: list[int]) -> Round:
    inner = tuple(round_of(number, tokens - 1, tokens) for number, tokens in enumerate(handed_up))
    return round_of(index, accepted, sum(handed_up), inner=inner)


@pytest.mark.parametrize(
    ("accepted", "drafted", "expected"), [(4, 6, "████▒▒"), (0, 2, "▒▒"), (3, 3, "███"), (0, 0, "")]
)
def test_bar_counts_accepted_out_of_drafted(accepted: int, drafted: int, expected: str) -> None:
    assert bar(round_of(0, accepted, drafted)).plain == expected


def test_bar_of_a_hierarchy_has_a_segment_per_inner_round() -> None:
    assert bar(hierarchy(0, 5, [3, 3, 2])).plain == "███ ██▒ ▒▒"
    assert bar(hierarchy(0, 3, [3, 1])).plain == "███ ▒"


def test_bar_of_a_cut_block_stays_as_long_as_what_was_drafted() -> None:
    inner = (round_of(0, 2, 3), round_of(1, 3, 4))
    assert bar(round_of(0, 4, 5, StopReason.BUDGET, inner=inner)).plain == "███ █▒"


def test_a_scaled_bar_never_looks_full_when_a_token_was_rejected() -> None:
    assert bar(round_of(0, 39, 40), 0.25).plain == "█████████▒"
    assert bar(round_of(0, 40, 40), 0.25).plain == "█" * 10
    assert bar(round_of(0, 1, 2), 0.1).plain == "▒"


def test_strip_shows_the_last_rounds_newest_last() -> None:
    rounds = [round_of(8, 4, 6), round_of(9, 2, 2, StopReason.MAX_DRAFT), round_of(10, 0, 0, None)]
    assert [line.plain.rstrip() for line in strip(rounds, 5, 40)] == [
        " 9 ████▒▒ 4/6 policy",
        "10 ██ 2/2 max_draft",
        "11 0/0 target only",
    ]
    assert [line.plain.split()[0] for line in strip(rounds, 2, 40)] == ["10", "11"]
    assert strip(rounds, 0, 40) == []
    assert strip([], 5, 40) == []


def test_strip_uses_columns_where_there_is_room() -> None:
    lines = strip([round_of(index, 1, 2) for index in range(30)], 3, 2 * COLUMN_WIDTH)
    assert [[word for word in line.plain.split() if word.isdigit()] for line in lines] == [
        ["25", "28"],
        ["26", "29"],
        ["27", "30"],
    ]


@pytest.mark.parametrize("width", [10, 24, 40, 80, 200])
def test_long_drafts_are_scaled_alike_and_keep_their_labels(width: int) -> None:
    rounds = [round_of(97, 20, 40), round_of(98, 10, 20), hierarchy(99, 7, [1] * 20), hierarchy(100, 9, [20, 20])]
    lines = strip(rounds, 4, width)
    assert {cell_len(line.plain) for line in lines} == {width}
    if 40 <= width < 2 * COLUMN_WIDTH:
        assert [line.plain.rstrip().rpartition(" ")[0].rpartition(" ")[2] for line in lines] == [
            "20/40",
            "10/20",
            "7/20",
            "9/40",
        ]
        cells = [line.plain.count("█") + line.plain.count("▒") for line in lines]
        assert cells[0] == cells[3]
        assert cells[1] == cells[2] == pytest.approx(cells[0] / 2, abs=1)


def test_a_tree_that_does_not_fit_is_left_out() -> None:
    long = round_of(0, 1, 30, tree=(1,) * 30)
    (line,) = strip([long], 1, 40)
    assert "1111" not in line.plain
    assert "1/30 policy" in line.plain


def test_a_dynamic_tree_shows_the_tokens_of_each_level() -> None:
    grown = round_of(0, 2, 5, tree=(10, 24, 7, 1, 0), path=(4, 5))
    assert [line.plain.rstrip() for line in strip([grown], 1, 40)] == ["1 ██▒▒▒ ++71· 2/5 policy"]
    assert [(span.start, span.end) for span in tree(grown).spans if span.style == "green"] == [(0, 1), (1, 2)]


def test_copies_behind_a_models_tokens_stand_apart() -> None:
    chained = round_of(0, 3, 5, copied=3)
    assert bar(chained).plain == "██ █▒▒"
    assert [str(span.style) for span in bar(chained).spans] == ["green", "blue", "dim"]
    alone = round_of(0, 1, 2, copied=2)
    assert bar(alone).plain == "█▒"
    assert str(bar(alone).spans[0].style) == "blue"
    assert "█▒▒" in strip([chained], 1, 30)[0].plain
