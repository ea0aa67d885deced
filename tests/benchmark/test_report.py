import sys
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from factory import candidate, drafted_run, peer, peer_run, plain_run, run_set, write_report
from test_tables import CANDIDATES, ROUNDS, some_runs

from specctl.benchmark.figures import looks
from specctl.errors import OutputError, UsageError
from specctl.observing.results import Difference, PassTimes, Run, RunSet
from specctl.reporting import document
from specctl.reporting.document import _Drawn
from specctl.statistics import pareto
from tests.support.hostile import HOSTILE, commands

pytest.importorskip("matplotlib")

VOID = {"meta", "img", "br"}
ALWAYS = {
    "speedup-by-category",
    "lengths-by-category",
    "verification-discard",
    "accepted-lengths",
    "draft-length-over-rounds",
    "wall-time",
}


class Page(HTMLParser):
    """Checks that tags close in order, and collects every address that the page links to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.addresses: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def full() -> RunSet:
    candidates = [
        candidate("none"),
        candidate("svip:0.3", "svip", threshold=0.3, cap=40),
        candidate("svip:0.6", "svip", threshold=0.6, cap=40),
        peer("hf"),
    ]
    runs: list[Run] = []
    for length in (64, 128):
        for number in range(4):
            where = {"category": f"kind <{number % 2}>", "length": length}
            prompt = f"p{number}"
            runs += [
                plain_run(prompt, 9 + number, **where),
                drafted_run("svip:0.3", prompt, ROUNDS * (number + 1), **where),
                drafted_run("svip:0.6", prompt, [*ROUNDS, (8, 3, "budget")], other_ms=number, **where),
                peer_run("hf", prompt, 9, 45.0, **where),
            ]
    return run_set(candidates, runs, temperature=0.5, costs=PassTimes(1.9, {1: 9.0, 8: 10.0}), lengths=(64, 128))


@pytest.mark.parametrize("drawn", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_whole_report(tmp_path: Path, drawn: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not drawn:
        monkeypatch.setattr(document, "render", lambda one: _Drawn(one.name, one.title, one.caption, b"png", b"svg"))
    written = write_report(full(), tmp_path / "new" / "folder")
    names = {f"{name}.{kind}" for name in {*ALWAYS, "speedup-by-length"} for kind in ("png", "svg")}
    assert {path.name for path in written} == names | {"report.md", "report.html"}
    assert all(path.stat().st_size > 1000 for path in written if drawn or path.suffix in (".md", ".html"))
    html = Page((tmp_path / "new" / "folder" / "report.html").read_text(encoding="utf-8"))
    assert len(html.addresses) == 7
    assert all(address.startswith("data:image/png;base64,") for address in html.addresses)
    markdown = (tmp_path / "new" / "folder" / "report.md").read_text(encoding="utf-8")
    assert "not drawn" not in markdown
    assert all(f"({name})" in markdown for name in names if name.endswith("png"))


@pytest.mark.exhaustive
def test_the_same_results_give_the_same_files(tmp_path: Path) -> None:
    first = {path.name: path.read_bytes() for path in write_report(full(), tmp_path / "one")}
    assert first == {path.name: path.read_bytes() for path in write_report(full(), tmp_path / "two")}


def test_figures_without_data_are_left_out_with_a_reason(tmp_path: Path) -> None:
    runs = [peer_run("hf", prompt, 9, 45.0) for prompt in "ab"]
    written = {path.name for path in write_report(run_set(CANDIDATES, runs), tmp_path)}
    assert written == {"report.md", "report.html"}
    markdown = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert markdown.count("not drawn") == 7
    assert "Speedup by category: not drawn, no candidate shares a prompt with none." in markdown


@pytest.mark.slow
def test_a_single_prompt_is_enough_for_most_figures(tmp_path: Path) -> None:
    written = {path.stem for path in write_report(run_set(CANDIDATES, some_runs("a")), tmp_path)}
    assert written == {"report"} | ALWAYS


@pytest.mark.slow
def test_a_difference_comes_first_in_the_report(tmp_path: Path) -> None:
    noted = Difference(turn=0, position=4, expected=11, found=12, gap=0.5)
    runs = [*some_runs("a"), drafted_run("svip", "<b>$x$_", ROUNDS, difference=noted, category="$\\frac$")]
    write_report(run_set(CANDIDATES, runs), tmp_path)
    assert (tmp_path / "report.md").read_text(encoding="utf-8").split("## ")[1].startswith("GREEDY OUTPUT DIFFERS")
    html = (tmp_path / "report.html").read_text(encoding="utf-8")
    Page(html)
    assert html.index('<section class="alarm">') < html.index("<section>")
    assert "&lt;b&gt;$x$_" in html


def test_no_runs_no_report(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no finished run"):
        write_report(run_set(CANDIDATES, []), tmp_path)


@pytest.mark.slow
def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match=r"cannot write .*folder"):
        write_report(run_set(CANDIDATES, some_runs("a")), tmp_path / "file" / "folder")


def test_without_matplotlib_the_message_contains_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UsageError, match="figures need matplotlib") as caught:
        write_report(full(), tmp_path)
    assert caught.value.hint.startswith('pip install "matplotlib')


def test_the_pareto_front() -> None:
    assert pareto([(0.2, 0.5), (0.4, 0.3), (0.4, 0.5), (0.2, 0.6), (0.5, 0.3)]) == [0, 1]
    assert pareto([(1.0, 1.0), (1.0, 1.0)]) == [0, 1]


def test_settings_of_one_policy_share_a_hue_and_the_baseline_is_grey() -> None:
    look = looks([candidate("none"), candidate("a", "svip"), candidate("b", "svip"), candidate("c", "adaedl")])
    assert len({seen.colour for seen in look.values()}) == 4
    assert look["a"].marker == look["b"].marker != look["c"].marker
    assert len({look["none"].colour[start : start + 2] for start in (1, 3, 5)}) == 1


def hostile() -> RunSet:
    """Whatever a user or a model can name is hostile; some of it the font lacks."""
    names = ["none", f"svip {HOSTILE} 木"]
    candidates = [candidate(names[0]), candidate(names[1], "svip", threshold=0.3, cap=40)]
    runs: list[Run] = []
    for number in range(4):
        where = {"category": f"{HOSTILE} 木{number % 2}"}
        prompt = f"{HOSTILE} 木{number}"
        runs += [plain_run(prompt, 9 + number, **where), drafted_run(names[1], prompt, ROUNDS, **where)]
    noted = Difference(turn=0, position=4, expected=11, found=12, gap=0.5)
    runs.append(drafted_run(names[1], HOSTILE, ROUNDS, difference=noted))
    return run_set(candidates, runs, costs=PassTimes(1.9, {1: 9.0, 8: 10.0}))


@pytest.mark.slow
def test_a_hostile_report_is_clean_and_well_formed(tmp_path: Path) -> None:
    written = write_report(hostile(), tmp_path)
    texts = {path: path.read_text(encoding="utf-8") for path in written if path.suffix != ".png"}
    assert {path.stem for path in texts if path.suffix == ".svg"} == ALWAYS
    for path, text in texts.items():
        assert commands(text) == set(), path
        if path.suffix == ".svg":
            ElementTree.fromstring(text)
    Page(texts[tmp_path / "report.html"])
    assert "[red]x[/]" in texts[tmp_path / "report.html"]
