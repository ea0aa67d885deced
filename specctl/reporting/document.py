"""Reports: Markdown, one self-contained HTML page made from it, and the figures as PNG and SVG."""

import json
from base64 import b64encode
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from io import BytesIO
from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.renderer import RendererHTML
from markdown_it.token import Token
from markdown_it.utils import OptionsDict

from specctl.outputs import naming, write_whole
from specctl.printable import escaped
from specctl.reporting.style import Picture, style
from specctl.reporting.table import DEFINITIONS, Table, as_markdown, inert
from specctl.reporting.words import READING, meanings

REPORT_FILES = ("report.md", "report.html", "*.png", "*.svg")  # Patterns of the files that `write_document` writes
PIXELS_PER_INCH = 160
_CSS = """
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, sans-serif; color: #222; background: #fff; max-width: 62rem; margin: 2rem auto;
  padding: 0 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2.5rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .6rem; text-align: right; border-bottom: 1px solid #ddd; white-space: nowrap; }
th { border-bottom: 2px solid #888; vertical-align: bottom; white-space: normal; }
td[style*="left"] { white-space: normal; overflow-wrap: anywhere; min-width: 8rem; }
header, section p { overflow-wrap: anywhere; }
section p { color: #555; font-size: .9rem; max-width: 48rem; }
.alarm { border: 3px solid #b00020; background: #fff1f2; padding: 0 1rem 1rem; }
.alarm h2 { color: #b00020; margin-top: 1rem; } .alarm p { color: #222; }
img { max-width: 100%; height: auto; margin: 1rem 0; }
li { overflow-wrap: anywhere; }
pre { overflow-x: auto; background: #f6f6f6; padding: 1rem; font-size: .8rem; }
"""
_HEAD = (
    '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
    '<meta name="viewport" content="width=device-width, initial-scale=1">'
)


@dataclass(frozen=True, slots=True)
class _Drawn:
    name: str
    title: str
    caption: str
    png: bytes
    svg: bytes


@dataclass(frozen=True, slots=True)
class _Part:
    """Markdown with the HTML around it on the page."""

    markdown: str
    opening: str = "<section>"
    closing: str = "</section>"


def write_document(
    title: str,
    shown: Sequence[Table],
    pictures: Iterable[Picture],
    provenance: Mapping[str, Any],
    folder: Path,
    *,
    command: str,
    verdict: str = "",
    remarks: Sequence[str] = (),
    profile: Mapping[str, Any] | None = None,
) -> list[Path]:
    """Write ``report.md``, ``report.html`` and the figures into the folder; return the written paths.

    Args:
        title: of the document.
        shown: tables; alarms are moved to the front.
        pictures: drawn one at a time.
        provenance: the origin of the numbers, by name.
        folder: made if it is missing.
        command: the command that shows the tables; the page explains their columns.
        verdict: the outcome in a sentence, which stands first.
        remarks: lines below the figures.
        profile: the resolved profile; the page shows it folded.

    Raises:
        UsageError: matplotlib is missing.
        OutputError: a file cannot be written.
    """
    figures = [render(picture) for picture in pictures]
    parts = [
        _Part(f"# {inert(title)}" + f"\n\n**{inert(verdict)}**" * bool(verdict), "<header>", "</header>"),
        *map(_table_part, sorted(shown, key=lambda table: not table.alarm)),
        _Part("\n\n".join(["## Figures", *map(_image, figures), *map(inert, remarks)])),
        *_meanings(command, shown),
        _Part("## Where the numbers come from\n\n" + "\n".join(_item(*pair) for pair in provenance.items())),
    ]
    if profile is not None:
        resolved = escaped(json.dumps(profile, indent=2, ensure_ascii=False, default=str))
        folded = "<details><summary>Resolved profile</summary>"
        parts.append(_Part(f"```json\n{resolved}\n```", folded, "</details>"))
    files = {
        "report.md": ("\n\n".join(part.markdown.rstrip("\n") for part in parts) + "\n").encode(),
        "report.html": _page(title, parts, figures).encode(),
    }
    for figure in figures:
        files |= {f"{figure.name}.png": figure.png, f"{figure.name}.svg": figure.svg}
    return write_files(files, folder)


def write_files(files: Mapping[str, bytes], folder: Path) -> list[Path]:
    """Write a report's files by name; raises OutputError where one cannot be written."""
    with naming(folder):
        folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        write_whole(folder / name, content)
    return [folder / name for name in files]


def render(picture: Picture) -> _Drawn:
    """A picture as the bytes of its files."""
    png, svg = BytesIO(), BytesIO()
    with style():
        picture.figure.savefig(png, format="png", dpi=PIXELS_PER_INCH, metadata={"Software": None})
        picture.figure.savefig(svg, format="svg", metadata={"Date": None})
    return _Drawn(picture.name, picture.title, picture.caption, png.getvalue(), svg.getvalue())


def _table_part(table: Table) -> _Part:
    opening = '<section class="alarm">' if table.alarm else "<section>"
    # The page has the column meanings and pictures, so its tables need no bars.
    table = replace(table.without_bars, note=table.note.replace(DEFINITIONS, "").strip())
    return _Part(f"## {inert(table.title)}\n\n{as_markdown(table)}", opening)


def _meanings(command: str, shown: Sequence[Table]) -> list[_Part]:
    """A list of the meanings of columns and of named rows; empty if none is defined."""
    named = {row[0] for table in shown if table.labels for row in table.rows}
    names = [*(name for table in shown for name in table.columns), *sorted(named)]
    known = meanings(command, names)
    if not known:
        return []
    return [_Part("\n\n".join(["## What the columns mean", READING, "\n".join(_item(*one) for one in known.items())]))]


def _image(figure: _Drawn) -> str:
    # The figure shows its title and caption; the text is for readers who cannot see it.
    return f"![{inert(f'{figure.title}. {figure.caption}')}]({figure.name}.png)"


def _item(name: str, value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return f"- **{inert(name)}**: {inert(text)}"


def _page(title: str, parts: Iterable[_Part], figures: Iterable[_Drawn]) -> str:
    """The parts as one HTML page with embedded images. HTML inside the Markdown is escaped."""
    images = {f"{figure.name}.png": f"data:image/png;base64,{b64encode(figure.png).decode()}" for figure in figures}
    # Without linkify only images have addresses.
    reader = MarkdownIt("commonmark", {"html": False}).enable("table")
    reader.add_render_rule("table_open", _scrollable)
    reader.add_render_rule("table_close", _scrollable)
    reader.add_render_rule("image", _embedded)
    body = (f"{part.opening}\n{reader.render(part.markdown, {'images': images})}{part.closing}" for part in parts)
    return "\n".join(
        [f"{_HEAD}<title>{escape(title)}</title><style>{_CSS}</style></head><body>", *body, "</body></html>\n"]
    )


def _scrollable(
    renderer: RendererHTML, tokens: Sequence[Token], index: int, options: OptionsDict, env: MutableMapping[str, Any]
) -> str:
    """A table in a box that scrolls if the page is narrower."""
    tag = renderer.renderToken(tokens, index, options, env)
    return f'<div class="wide">{tag}' if tokens[index].nesting == 1 else f"{tag.rstrip()}</div>\n"


def _embedded(
    renderer: RendererHTML, tokens: Sequence[Token], index: int, options: OptionsDict, env: MutableMapping[str, Any]
) -> str:
    """An image with its file's content as its address."""
    token = tokens[index]
    alt = renderer.renderInlineAsText(token.children, options, env)
    return f'<img alt="{escape(alt)}" src="{env["images"][str(token.attrs["src"])]}">'
