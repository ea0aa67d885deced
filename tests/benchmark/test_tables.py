import io
import json
import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
from factory import as_json, candidate, drafted_run, peer, peer_run, plain_run, run_set, tables
from rich.console import Console

from specctl.benchmark.digest import digest
from specctl.benchmark.progress import BenchProgress
from specctl.benchmark.report import brief_tables
from specctl.observing.results import RESULTS, Difference, Run, RunSet, compare, read_results
from specctl.reporting.console import print_tables
from specctl.reporting.table import Table, as_markdown, as_text
from specctl.terminal.progress import TerminalProgress

CANDIDATES = [candidate("none"), candidate("svip", threshold=0.3), peer("hf")]
ROUNDS = [(5, 5, "max_draft"), (5, 0, "max_draft"), (2, 1, "policy")]


def some_runs(prompts: str = "abcd") -> list[Run]:
    return [
        run
        for prompt in prompts
        for category in ["odd" if ord(prompt) % 2 else "even"]
        for run in (
            plain_run(prompt, 9, category=category),
            drafted_run("svip", prompt, ROUNDS, category=category),
            peer_run("hf", prompt, 9, 45.0, category=category),
        )
    ]


def titled(results: RunSet, title: str) -> Table:
    return next(table for table in tables(results) if table.title == title)


def test_speed_in_one_line_per_candidate() -> None:
    assert titled(run_set(CANDIDATES, some_runs()), "Speed").rows == (
        ("none", "-", "4", "4", "94.7", "1.00 [1.00, 1.00]", "1.00 [1.00, 1.00]", "15.0", "0"),
        ("svip", "-", "4", "4", "152.5", "1.61 [1.61, 1.61]", "1.61 [1.61, 1.61]", "25.0", "0"),
        ("hf", "hf", "4", "4", "180.0", "1.90 [1.90, 1.90]", "1.90 [1.90, 1.90]", "50.0", "0"),
    )


def test_unknown_values_are_a_dash() -> None:
    rows = titled(run_set(CANDIDATES, some_runs()), "Drafting").rows
    assert rows[1] == ("svip", "50.0%", "3.00", "0.333", "0.667", "0.500", "4.00 ± 1.41", "2.00 ± 2.16")
    assert set(rows[2][1:]) == {"-"}


def test_a_single_prompt_has_values_without_intervals_and_no_tables_of_parts() -> None:
    results = run_set(CANDIDATES, some_runs("a"))
    assert [row[5] for row in titled(results, "Speed").rows] == ["1.00", "1.61", "1.90"]
    assert not {"By category", "By length limit"} & {table.title for table in tables(results)}


def test_parts_where_there_are_several() -> None:
    runs = [replace(run, length=length) for run in some_runs() for length in (64, 128)]
    results = run_set(CANDIDATES, runs, lengths=(64, 128))
    assert [row[:3] for row in titled(results, "By category").rows][:4] == [
        ("odd", "none", "2"),
        ("odd", "svip", "2"),
        ("odd", "hf", "2"),
        ("even", "none", "2"),
    ]
    assert [row[0] for row in titled(results, "By length limit").rows] == ["64"] * 3 + ["128"] * 3


def test_a_file_cut_off_in_mid_prompt_still_gives_tables(tmp_path: Path) -> None:
    whole = run_set(CANDIDATES, some_runs(), prompts=4)
    lines = [json.dumps(line) + "\n" for line in (RESULTS.line(whole.header), *map(RESULTS.line, whole.runs[:5]))]
    path = tmp_path / "results.jsonl"
    path.write_text("".join(lines) + '{"kind": "run", "entr', encoding="utf-8")
    speed = titled(read_results(path), "Speed")
    assert [row[2] for row in speed.rows] == ["1", "1", "1"], "of the second prompt a candidate is missing"
    assert speed.rows[2][5] == "1.90"
    assert speed.note.endswith("Stopped after 5 of 12 runs (only the 3 in complete rounds count).")


def test_rounds_without_a_failed_peer_are_complete() -> None:
    whole = run_set(CANDIDATES, [run for run in some_runs() if run.candidate != "hf" or run.prompt == "a"], prompts=4)
    assert [row[2] for row in titled(whole, "Speed").rows] == ["1", "1", "1"]
    whole.failed["hf"] = "it ended"
    assert [row[2] for row in titled(whole, "Speed").rows] == ["4", "4", "1"]


def test_the_engine_of_each_candidate() -> None:
    field = [
        candidate("none"),
        candidate("svip", "svip"),
        candidate("svip", "svip").eagerly,
        *map(peer, ("hf-heuristic", "openvino")),
    ]
    runs = [plain_run("a", 6, one.label) for one in field]
    results = run_set(field, runs)
    results.header.engines.update({"target": "onnx", "draft": "onnx (why)"})
    engines = ["onnx", "onnx", "eager", "eager", "openvino"]
    assert [row[1] for row in titled(results, "Speed").rows] == engines
    assert list(as_json(results)["engines"].values()) == engines
    assert titled(results, "Speed").note.endswith(
        "hf-heuristic ran eagerly, as transformers runs models, and others on onnx and openvino; to see what the "
        "algorithm brings, compare hf-heuristic with svip (eager)."
    )
    results.header.engines["draft"] = "eager"
    assert titled(results, "Speed").rows[1][1] == "target onnx, draft eager"
    assert titled(results, "Speed").rows[0][1] == "onnx", "it has no draft"


def test_where_all_ran_eagerly_nothing_needs_a_counterpart() -> None:
    field = [candidate("none"), candidate("svip", "svip"), peer("hf-heuristic")]
    results = run_set(field, [plain_run("a", 6, one.label) for one in field])
    results.header.engines.update({"target": "eager", "draft": "eager"})
    assert "eagerly" not in titled(results, "Speed").note
    results.header.engines.update({"target": "graph", "draft": "graph"})
    assert titled(results, "Speed").note.endswith("run one of ours with --engine eager.")


@pytest.mark.parametrize(
    ("known", "told"),
    [
        (
            {"threads": 2, "others_busy": 0.94},
            " Runs with 2 threads; other processes kept 0.9 cores busy when they began.",
        ),
        ({"threads": 1}, " Runs with 1 thread."),
        ({}, ""),
    ],
    ids=["threads and load", "a system that tells no load", "nothing was recorded"],
)
def test_threads_and_load_are_in_the_file_and_below_the_speeds(
    known: dict[str, float], told: str, tmp_path: Path
) -> None:
    whole = run_set(CANDIDATES, some_runs())
    plain = titled(whole, "Speed").note
    header = RESULTS.line(replace(whole.header, **known))
    assert {key: header[key] for key in ("threads", "others_busy") if key in header} == known
    path = tmp_path / "results.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in (header, *map(RESULTS.line, whole.runs))))
    assert titled(read_results(path), "Speed").note == plain + told


def test_the_same_file_gives_the_same_bytes(tmp_path: Path) -> None:
    whole = run_set(CANDIDATES, some_runs())
    path = tmp_path / "results.jsonl"
    lines = [json.dumps(line) for line in (RESULTS.line(whole.header), *map(RESULTS.line, whole.runs))]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    first, second = read_results(path), read_results(path)
    assert as_text(tables(first)) == as_text(tables(second)) == as_text(tables(whole))
    assert json.dumps(as_json(first)) == json.dumps(as_json(second))


def test_no_runs_at_all() -> None:
    empty = run_set(CANDIDATES, [])
    assert titled(empty, "Speed").rows == ()
    assert json.loads(json.dumps(as_json(empty)))["overall"] == []


def test_json_contains_numbers() -> None:
    document = json.loads(json.dumps(as_json(run_set(CANDIDATES, some_runs()))))
    svip = document["overall"][1]
    assert svip["speedup"]["of_totals"] == {"value": 1.610169, "low": 1.610169, "high": 1.610169, "prompts": 4}
    assert svip["draft_length"] == {"mean": 4.0, "sd": 1.414214}
    assert document["overall"][2]["acceptance_rate"] is None
    assert document["cost_model"]["r_squared"] == 1.0
    assert document["provenance"]["suite"]["name"] == "embedded"
    assert list(document["by_category"]) == ["odd", "even"]


def test_identical_output_is_one_line() -> None:
    table = titled(run_set(CANDIDATES, some_runs()), "Greedy identity")
    assert (table.rows, table.note) == ((), "8 runs gave exactly the tokens of none.")


def test_sampled_output_is_not_compared() -> None:
    runs = [plain_run("a", 3), plain_run("a", 3, "svip", tokens=(7, 8, 9))]
    results = run_set(CANDIDATES, runs, temperature=0.7)
    assert titled(results, "Greedy identity").note == "Not compared: sampling at temperature 0.7."
    assert [row[-1] for row in titled(results, "Speed").rows] == ["-", "-"]


def test_a_difference_is_an_alarm() -> None:
    noted = Difference(turn=0, position=4, expected=11, found=None, gap=0.000123)
    runs = [*some_runs("a"), drafted_run("svip", "b", ROUNDS, difference=noted), plain_run("b", 9)]
    results = run_set(CANDIDATES, runs)
    table = titled(results, "GREEDY OUTPUT DIFFERS")
    assert table.alarm
    assert table.rows == (("svip", "b", "0", "64", "0", "4", "11", "end", "1.23e-04"),)
    assert "GREEDY OUTPUT DIFFERS in 1 of 3 runs" in table.note
    assert [row[-1] for row in titled(results, "Speed").rows] == ["0", "1", "0"]
    assert "!!! GREEDY OUTPUT DIFFERS !!!" in as_text([table])
    assert as_json(results)["differences"][0]["gap"] == 0.000123


def test_a_difference_without_a_line_of_its_own_is_found_in_the_tokens() -> None:
    runs = [plain_run("a", 3, tokens=(1, 2, 3)), plain_run("a", 3, "svip", tokens=(1, 9))]
    ((run, difference),) = compare(run_set(CANDIDATES, runs))
    assert (run.candidate, difference) == ("svip", Difference(0, 1, 2, 9, None))


def test_a_baseline_that_differs_from_itself_is_found_too() -> None:
    runs = [plain_run("a", 3), plain_run("a", 3, repeat=1, tokens=(0, 1, 2, 3))]
    assert [difference for _, difference in compare(run_set(CANDIDATES, runs))] == [Difference(0, 3, None, 3, None)]


def test_without_a_baseline_nothing_is_compared() -> None:
    table = titled(run_set(CANDIDATES, [plain_run("a", 3, "svip")]), "Greedy identity")
    assert table.note.startswith("Not compared")


def test_markdown_keeps_its_shape_whatever_the_cells() -> None:
    table = Table("t", ("name", "value"), (("a|b\nc", "1"),), note="Told.", alarm=True)
    lines = [line.replace(" ", "") for line in as_markdown(table).splitlines()]
    assert lines == ["|name|value|", "|:-------|--------:|", "|a\\|bc|1|", "", "**Told.**"]


def test_text_is_aligned() -> None:
    table = Table("Title", ("name", "n"), (("ab", "100"), ("c", "7")))
    assert as_text([table]) == "Title\nname    n\nab    100\nc       7\n"


@pytest.mark.parametrize("width", [60, 80, 200])
def test_every_cell_is_whole_on_a_terminal(width: int) -> None:
    noted = Difference(turn=0, position=4, expected=11, found=12, gap=0.5)
    shown = tables(run_set(CANDIDATES, [*some_runs(), drafted_run("svip", "e", ROUNDS, difference=noted)]))
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    print_tables(console, shown)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    for table in shown:
        for row in table.rows:
            assert all(cell in text for cell in row)
    assert max(map(len, text.splitlines())) <= width


def test_a_pipe_gets_the_plain_text() -> None:
    shown = tables(run_set(CANDIDATES, some_runs()))
    out = io.StringIO()
    print_tables(Console(file=out, width=40), shown)
    assert out.getvalue() == as_text(shown)


def test_progress_fills_in_and_leaves_nothing_behind() -> None:
    """17 tokens of none took 180 ms, 18 of svip 118 ms; their tokens differ on prompt b."""
    console = Console(file=io.StringIO(), width=100, force_terminal=True, color_system=None)
    runs = some_runs()
    runs[3] = plain_run("b", 8)
    with BenchProgress(TerminalProgress(console), run_set(CANDIDATES, runs[:3]), len(runs)) as progress:
        for run in (runs[4], runs[3], runs[5]):
            progress.start(run.candidate, run.prompt)
            progress.add(run)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    last = text[text.rindex("\x1b[H") :].replace("\x1b[K", "")
    svip = next(line for line in last.splitlines() if "svip" in line)
    assert svip.split() == ["svip", "2", "152.5", "1.62", "3.00", "50.0%", "1"]
    assert "time left unknown" in text
    assert "6 of 12 runs · 0:00:00 left" in last


@pytest.mark.parametrize("error", [None, KeyboardInterrupt(), ValueError()])
def test_progress_stays_on_the_terminal_after_an_error_alone(error: BaseException | None) -> None:
    out = io.StringIO()
    expected = nullcontext() if error is None else pytest.raises(type(error))
    console = Console(file=out, force_terminal=True, color_system=None)
    with expected, BenchProgress(TerminalProgress(console), run_set([candidate("none")], []), 2) as progress:
        progress.add(plain_run("a", 3))
        if error is not None:
            raise error
    left = out.getvalue().rpartition("\x1b[?1049l")[2]
    assert ("1 of 2 runs" in left) == isinstance(error, ValueError), "tables follow an interrupt"


def test_progress_is_silent_without_a_terminal() -> None:
    out = io.StringIO()
    with BenchProgress(TerminalProgress(Console(file=out)), run_set([candidate("none")], []), 1) as progress:
        progress.start("none", "a")
        progress.add(plain_run("a", 3))
    assert out.getvalue() == ""


def test_trees_have_a_column_where_there_are_any() -> None:
    run = drafted_run("svip", "a", [(4, 2, "policy"), (4, 4, "policy")])
    first, second = run.turns[0].rounds
    tree = replace(run, turns=(replace(run.turns[0], rounds=(replace(first, tree=(3, 3, 2, 2)), second)),))
    plain = drafted_run("constant", "a", [(4, 2, "policy")])
    candidates = [candidate("none"), candidate("svip"), candidate("constant")]

    def drafting(*runs: Run) -> Table:
        return next(one for one in tables(run_set(candidates, runs)) if one.title == "Drafting")

    table = drafting(tree, plain)
    assert table.columns[-1] == "nodes"
    assert [row[-1] for row in table.rows] == ["7.00 ± 3.00", "-"]
    assert "nodes" not in drafting(run, plain).columns


SEVEN = [
    candidate("none"),
    candidate("svip", threshold=0.54),
    candidate("constant", "constant"),
    candidate("heuristic", "heuristic"),
    candidate("adaedl:threshold=0.484,alpha=0.546,eps=0.05,max_draft=10,gamma=0.134", "adaedl"),
    candidate("cost-optimal", "cost-optimal"),
    candidate("max-confidence", "max-confidence"),
]


def seven_runs(difference: Difference | None = None) -> list[Run]:
    found = [plain_run(prompt, 9) for prompt in "abcdefghijkl"]
    for one in SEVEN[1:]:
        found += [drafted_run(one.label, prompt, ROUNDS, difference=difference) for prompt in "abcdefghijkl"]
    return found


@pytest.mark.parametrize("difference", [None, Difference(turn=0, position=4, expected=11, found=12, gap=0.5)])
def test_seven_candidates_fit_a_screen_in_brief(difference: Difference | None) -> None:
    whole = digest(run_set(SEVEN, seven_runs(difference), prompts=12))
    console = Console(file=io.StringIO(), force_terminal=True, width=80, no_color=True)
    print_tables(console, brief_tables(whole))
    lines = re.sub(r"\x1b\[[\d;]*m", "", console.file.getvalue()).splitlines()  # type: ignore[attr-defined]
    assert len(lines) < 40 - 4, "the verdict takes up to four"
    assert max(map(len, lines)) <= 80
    text = " ".join(lines)
    for one in SEVEN:
        assert all(part in text for part in one.label.split(","))
    assert text.count("1.61 [1.61, 1.61]") == 6
    assert ("GREEDY OUTPUT DIFFERS" in text) == (difference is not None)
    assert ("In 72 of 72 runs. The first: svip on prompt a" in text) == (difference is not None)


def test_the_oracle_has_columns_where_it_was_computed() -> None:
    """With their values; without it, there is no column of dashes."""
    for oracle, there in ({"a": 2, "b": 2, "c": 2, "d": 2}, True), (None, False):
        results = run_set(CANDIDATES, some_runs(), oracle=oracle)
        columns = titled(results, "Cost model").columns
        assert ("fewest passes / passes ↑" in columns, "oracle time / time ↑" in columns) == (there, there)
        brief = brief_tables(digest(results))[0]
        assert len(brief.columns) == 4 + there
        assert all(row[-1] != "-" for row in brief.rows[:2])


def test_what_differs_between_candidates_has_a_column_in_brief() -> None:
    runs = [run for run in some_runs() if run.candidate != "svip" or run.prompt != "a"]
    speed = brief_tables(digest(run_set(CANDIDATES, runs)))[0]
    assert speed.columns == ("candidate", "prompts", "speedup ↑", "tokens/s ↑", "differ ↓")
    assert [row[:2] for row in speed.rows] == [("none", "4"), ("svip", "3"), ("hf", "4")]
    assert brief_tables(digest(run_set(CANDIDATES, some_runs())))[0].title == "Speed (4 prompts, hf)"
