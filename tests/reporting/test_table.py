from specctl.reporting.table import DOWN, UP, WIDE, Table, as_text


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
