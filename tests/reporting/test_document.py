import json
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from specctl.reporting.document import write_document
from specctl.reporting.style import page
from specctl.reporting.table import DEFINITIONS, UP, Table, inert
from specctl.reporting.words import meanings

HOSTILE = [
    "<b>bold</b> <script>alert(1)</script>",
    "![image](http://example.com/x.png)",
    "[link](javascript:alert(1)) [x]: http://example.com",
    "<http://example.com> http://example.com",
    "a|b\\|c",
    "*em* **strong** _em_ __strong__ H_q H_{q,p}",
    "&lt;b&gt; &amp; &#65;",
    "`code` ``` ~~~",
    "- item",
    "1. one",
    "# heading #",
    "> quotation",
    "1.61 [1.58, 1.64]",
]


class Page(HTMLParser):
    """The text of each block, each tag used, and each address."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.texts: list[str] = [""]
        self.tags: list[str] = []
        self.addresses: list[str | None] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [value for name, value in attrs if name in ("src", "href")]
        if tag in ("td", "th", "p", "li", "h2", "pre"):
            self.texts.append("")

    def handle_data(self, data: str) -> None:
        self.texts[-1] += data


def written(tmp_path: Path, **changes: object) -> Page:
    arguments = {
        "title": "Title",
        "shown": [],
        "pictures": [],
        "provenance": {},
        "folder": tmp_path,
        "command": "bench",
        **changes,
    }
    write_document(**arguments)  # type: ignore[arg-type]
    return Page((tmp_path / "report.html").read_text(encoding="utf-8"))


@pytest.mark.parametrize("text", HOSTILE)
def test_whatever_a_model_or_a_file_contains_is_shown_as_it_is(tmp_path: Path, text: str) -> None:
    table = Table(text, ("name", "n"), ((text, "1"),), note=text)
    plain = written(tmp_path)
    html = written(tmp_path, shown=[table], remarks=[text], provenance={"Command": text})
    shown = [block.strip() for block in html.texts]
    assert shown.count(text) == 4, "title, cell, note and remark"
    assert f"Command: {text}" in shown
    assert set(html.tags) - set(plain.tags) == {
        "table",
        "thead",
        "tbody",
        "tr",
        "th",
        "td",
        "div",
        "p",
        "ul",
        "li",
        "strong",
    }
    assert html.addresses == []


def test_line_ends_do_not_leave_the_cell(tmp_path: Path) -> None:
    html = written(tmp_path, shown=[Table("T", ("name",), (("a\n\n# b\n| c |",),))])
    assert "a # b | c |" in [text.strip() for text in html.texts]


def test_the_profile_is_folded_and_whole(tmp_path: Path) -> None:
    profile = {"prompt": {"system": "```\n</pre></details><script>"}}
    html = written(tmp_path, profile=profile)
    assert "details" in html.tags
    assert "script" not in html.tags
    assert json.loads(html.texts[-1]) == profile


def test_wide_tables_scroll_and_alarms_stand_first(tmp_path: Path) -> None:
    calm, loud = Table("Calm", ("n",), (("1",),)), Table("Loud", ("n",), (("1",),), note="Look.", alarm=True)
    written(tmp_path, shown=[calm, loud])
    html = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert html.count('<div class="wide"><table>') == html.count("</table></div>") == 2
    assert html.index('<section class="alarm">') < html.index("Loud") < html.index("<strong>Look.</strong>")
    assert html.index("Loud") < html.index("Calm")


def test_figures_are_inside_the_page_with_their_text(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    written(tmp_path, pictures=[page("one", 'A "title" <b>', "What_to see: *x*", 1.0)])
    html = (tmp_path / "report.html").read_text(encoding="utf-8")
    alt = "A &quot;title&quot; &lt;b&gt;. What_to see: *x*"
    assert f'<img alt="{alt}" src="data:image/png;base64,' in html
    assert "](one.png)" in (tmp_path / "report.md").read_text(encoding="utf-8")


def test_the_verdict_is_first_and_the_columns_are_explained_inside(tmp_path: Path) -> None:
    table = Table("Speed", ("candidate", f"tokens/s{UP}", "big passes/token", "unheard of"), (("none", "1", "2", "3"),))
    table = replace(table, note=f"{DEFINITIONS} Runs with 1 thread.")
    html = written(tmp_path, shown=[table], verdict="constant and svip are level")
    shown = [block.strip() for block in html.texts if block.strip()]
    assert shown[0].endswith("Title")
    assert shown[1] == "constant and svip are level"
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "docs/words.md" not in text
    assert "\n\nRuns with 1 thread.\n" in text
    assert "- **tokens/s**: Generated tokens over wall time, the prompt's own time included.\n" in text
    assert "- **NAME passes/token**: Forward passes of that draft" in text
    assert "unheard of**" not in text


def test_each_command_means_its_own_by_a_word() -> None:
    assert meanings("bench", ["engine"])["engine"].startswith("Which engine ran the passes;")
    assert meanings("calibrate", ["engine"])["engine"].startswith("With --export")
    assert meanings("calibrate", [f"acceptance rate{UP}"]) == {"acceptance rate": "accepted / drafted."}
    assert list(meanings("calibrate", ["target, 9 tokens", "target, 1 tokens"])) == ["target, N tokens"]
    assert meanings("analyze", ["KL(q||p)"]) == {"KL(q||p)": "Mean divergence, H_{q,p} - H_q."}


@pytest.mark.parametrize(
    ("text", "markdown"), [("2026-11-23", "2026-11-23"), ("1. one", "1\\. one"), ("- a", "\\- a"), ("3.5x", "3.5x")]
)
def test_only_what_would_begin_a_list_is_escaped(text: str, markdown: str) -> None:
    assert inert(text) == markdown


def test_a_page_has_pictures_instead_of_bars(tmp_path: Path) -> None:
    rows = (("0.3", "█", "10.0"), ("0.4", "███", "30.0"))
    curve = Table("Curve", ("threshold", "", "tokens/s"), rows, labels=2)
    plain = Table("Plain", ("kind", "", "tokens"), (("a", "", "1"),), labels=2)
    written(tmp_path, shown=[curve, plain])
    for name in ("report.md", "report.html"):
        assert "█" not in (tmp_path / name).read_text(encoding="utf-8")
    assert curve.without_bars == Table("Curve", ("threshold", "tokens/s"), (("0.3", "10.0"), ("0.4", "30.0")), labels=1)
    assert plain.without_bars is plain
