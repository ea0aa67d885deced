"""The measurements: steps run once, and become one page."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from specctl.observing.results import RESULTS, RunSet
from tests.benchmark.factory import candidate, plain_run, run_set
from tests.support.invoked import invoke
from tools.measure.__main__ import _run
from tools.measure.page import command, output, page, results, updated
from tools.measure.parts import CELLS, PARTS, Part, Step, Tabled

BENCH = Step("greedy", ("bench", "-p", "embedded", "--limit", "1", "-n", "4"))
PRINTED = Step("help", ("--help",), "json.tool")


def summary(candidate: str, speedup: float | None) -> dict[str, Any]:
    interval = {"value": speedup, "low": 0.5, "high": 2.25}
    return {
        "candidate": candidate,
        "speedup": None if speedup is None else {"of_totals": interval},
        "mean_acceptance_length": 3.456,
        "draft_rate": None,
        "verification_rate": 0.5,
    }


def test_every_part_has_a_name_of_its_own_and_known_columns() -> None:
    assert len({part.name for part in PARTS}) == len(PARTS)
    for part in PARTS:
        assert len({step.name for step in part.steps}) == len(part.steps)
        assert set(part.columns) <= set(CELLS)


def test_benchmarks_become_one_table_with_a_column_for_each(tmp_path: Path) -> None:
    drawn = Step("T = 1", BENCH.arguments)
    part = Part("p", "Which?", "As it is.", (BENCH, drawn), ("speedup", "tokens a round"))
    folder = tmp_path / "p"
    folder.mkdir()
    for step, rows in ((BENCH, [summary("none", None), summary("svip", 1.2)]), (drawn, [summary("constant", 0.9)])):
        document = {"overall": rows, "compared": 7 if step is BENCH else None, "differences": [{}] * (step is BENCH)}
        output(step, folder).write_text(json.dumps(document))
    text = page({"commit": "abc"}, [part], tmp_path)
    assert "All of one commit, but for tables that name another: commit abc." in text
    assert "| candidate | greedy: speedup | greedy: tokens a round | T = 1: speedup | T = 1: tokens a round |" in text
    assert "| `svip` | 1.20 [0.50, 2.25] | 3.46 | - | - |" in text
    assert "| `constant` | - | - | 0.90 [0.50, 2.25] | 3.46 |" in text
    assert "Of 7 greedy runs, 1 differed from `none`." in text


def test_only_the_kept_tables_of_what_is_printed_are_shown(tmp_path: Path) -> None:
    part = Part("p", "Which?", "As it is.", (PRINTED,), kept=("Second",))
    (tmp_path / "p").mkdir()
    output(PRINTED, tmp_path / "p").write_text("First\n1\n\nSecond\n2\n\nThird\n3\n")
    text = page({}, [part], tmp_path)
    assert "$ python -m json.tool --help\nSecond\n2\n```" in text
    assert "First" not in text


def test_a_part_that_is_run_alone_gets_its_section_and_leaves_the_others(tmp_path: Path) -> None:
    parts = [Part(name, f"{name}?", "As it is.", (PRINTED,)) for name in ("first", "second", "third")]
    for part in parts:
        (tmp_path / part.name).mkdir()
        output(PRINTED, tmp_path / part.name).write_text(f"of {part.name}\n")
    whole = page({"commit": "abc"}, parts, tmp_path)
    assert updated(whole, {"commit": "def"}, [], tmp_path) == whole
    for changed in (parts[1], parts[2]):
        output(PRINTED, tmp_path / changed.name).write_text("anew\n")
        text = updated(whole, {"commit": "def"}, [changed], tmp_path)
        own = f"## {changed.question}\n\nAs it is. Measured on its own: commit def.\n"
        assert text.count(own) == 1
        assert [part.question for part in parts] == [line[3:] for line in text.splitlines() if line.startswith("## ")]
        assert f"of {changed.name}" not in text
        assert text.replace(" Measured on its own: commit def.", "").replace("anew", f"of {changed.name}") == whole
        output(PRINTED, tmp_path / changed.name).write_text(f"of {changed.name}\n")
    studied = f"{whole}\n## A study\n\nWhat it found.\n"
    assert page({"commit": "abc"}, parts, tmp_path, studied) == studied
    added = Part("fourth", "fourth?", "As it is.", (PRINTED,))
    (tmp_path / "fourth").mkdir()
    output(PRINTED, tmp_path / "fourth").write_text("anew\n")
    assert updated(whole, {"commit": "def"}, [added], tmp_path).startswith(whole)


def test_a_table_of_its_own_is_made_from_the_runs(tmp_path: Path) -> None:
    def table(found: Mapping[str, RunSet]) -> Tabled:
        return ["candidate", *found], [[one.candidate, str(one.tokens)] for one in found["greedy"].runs], "Told."

    (tmp_path / "p").mkdir()
    written = run_set([candidate("none")], [plain_run("a", 30)])
    with results(BENCH, tmp_path / "p").open("w", encoding="utf-8") as stream:
        for record in (written.header, *written.runs):
            RESULTS.append(stream, record)
    text = page({}, [Part("p", "Which?", "As it is.", (BENCH,), table=table)], tmp_path)
    assert "| candidate | greedy |\n| --- | ---: |\n| none | 30 |\n\nTold.\n" in text


def test_a_step_that_is_there_is_not_run_again(tmp_path: Path) -> None:
    part = Part("p", "Which?", "As it is.", (PRINTED,))
    _run(part, PRINTED, tmp_path)
    assert "usage" in output(PRINTED, tmp_path).read_text()
    output(PRINTED, tmp_path).write_text("kept")
    _run(part, PRINTED, tmp_path)
    assert output(PRINTED, tmp_path).read_text() == "kept"


def test_a_step_that_fails_leaves_nothing(tmp_path: Path) -> None:
    failing = Step("failing", ("--no-such-flag",), "json.tool")
    with pytest.raises(SystemExit, match="failing ended with 2"):
        _run(Part("p", "Which?", "As it is.", (failing,)), failing, tmp_path)
    assert not output(failing, tmp_path).exists()


def test_commands_are_shown_as_a_reader_types_them() -> None:
    assert command(BENCH) == "specctl bench -p embedded --limit 1 -n 4"
    step = Step("c", ("calibrate", "--trace", "{folder}/trace.jsonl"))
    assert command(step) == "specctl calibrate --trace trace.jsonl"


@pytest.mark.parametrize(
    "step", [step for part in PARTS for step in part.steps if step.module == "specctl"], ids=command
)
def test_every_option_that_is_used_exists(step: Step) -> None:
    shown = invoke(step.arguments[0], "--help-all").stdout
    options = [word for word in step.arguments if word.startswith("--")]
    assert not [option for option in options if option not in shown]


@pytest.mark.exhaustive
def test_a_benchmark_becomes_a_table(tmp_path: Path) -> None:
    part = Part("p", "Which?", "As it is.", (BENCH,))
    _run(part, BENCH, tmp_path / "p")
    assert "| `none` |" in page({}, [part], tmp_path)
