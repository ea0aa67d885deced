import pytest

from specctl.reporting.table import COLUMNS, DOWN, UP, WIDE, Table, as_text
from specctl.reporting.words import meanings


def test_only_a_wide_table_has_headings_of_several_lines() -> None:
    names = tuple(f"acceptance rate of {number}{UP}" for number in range(4))
    narrow = as_text([Table("title", ("name", *names), (("a", "1", "2", "3", "4"),))]).splitlines()
    assert narrow[1].split("  ")[:2] == ["name", names[0]]
    assert len(narrow) == 3
    names = tuple(f"acceptance rate of {number}{DOWN}" for number in range(9))
    wide = as_text([Table("title", ("name", *names), (("a", *map(str, range(9))),))]).splitlines()
    assert max(map(len, wide)) <= WIDE
    assert wide[-1].split() == ["a", *map(str, range(9))]
    assert wide[-2].split("  ")[0] == "name"
    assert all(f"{number} ↓" in wide[-2] for number in range(9))
    assert [line.split() for line in wide[1:-2]] == [["acceptance"] * 9, ["rate", "of"] * 9]


def test_every_column_is_defined() -> None:
    """Of a column for each model, as of some model."""
    names = {
        name: name.replace("NAME", "draft").replace("token N", "token 2").replace("of N", "of 2") for name in COLUMNS
    }
    assert [name for name, filled in names.items() if not meanings("bench", [filled])] == []


def test_a_column_has_one_form_in_every_table() -> None:
    table = Table.filled("title", ("candidate", "tokens/s", "small ms"), [["a", 1.25, None], ["b", "1.2", 0.5]])
    assert table.columns == ("candidate", f"tokens/s{UP}", f"small ms{DOWN}")
    assert table.rows == (("a", "1.2", "-"), ("b", "1.2", "0.500"))
    with pytest.raises(KeyError):
        Table.filled("title", ("no such column",), [])
