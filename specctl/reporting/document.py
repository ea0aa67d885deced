"""Reports: Markdown, one self-contained HTML page, and the figures as PNG and SVG."""

import json
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from io import BytesIO
from pathlib import Path
from typing import Any

from specctl.errors import UsageError
from specctl.reporting.style import Picture, style
from specctl.reporting.table import Table, as_markdown

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
.label { text-align: left; }
.note { color: #555; font-size: .9rem; max-width: 48rem; }
.alarm { border: 3px solid #b00020; background: #fff1f2; padding: 0 1rem 1rem; }
.alarm h2 { color: #b00020; margin-top: 1rem; } .alarm .note { color: #222; font-weight: bold; }
figure { margin: 2rem 0; } img { max-width: 100%; height: auto; }
dt { font-weight: bold; } dd { margin: 0 0 .5rem; overflow-wrap: anywhere; }
pre { overflow-x: auto; background: #f6f6f6; padding: 1rem; font-size: .8rem; }
"""


@dataclass(frozen=True, slots=True)
class _Drawn:
    name: str
    title: str
    caption: str
    png: bytes
    svg: bytes


def write_document(
    title: str,
    shown: Sequence[Table],
    pictures: Iterable[Picture],
    provenance: Mapping[str, Any],
    folder: Path,
    *,
    remarks: Sequence[str] = (),
    profile: Mapping[str, Any] | None = None,
) -> list[Path]:
    """Write ``report.md``, ``report.html`` and the figures into the folder; return what was written.

    Args:
        title: of the whole.
        shown: tables, alarms going first.
        pictures: drawn one at a time.
        provenance: where the numbers come from, by name.
        folder: made if it is missing.
        remarks: lines below the figures.
        profile: the resolved profile, shown folded away.

    Raises:
        UsageError: matplotlib is missing, or the folder cannot be written.
    """
    tables = sorted(shown, key=lambda table: not table.alarm)
    figures = [render(picture) for picture in pictures]
    origin = {name: _words(value) for name, value in provenance.items()}
    resolved = json.dumps(profile, indent=2, ensure_ascii=False, default=str) if profile is not None else ""
    markdown = [
        f"# {title}",
        *(f"## {table.title}\n\n{as_markdown(table)}" for table in tables),
        "## Figures",
        *(f"![{figure.title}]({figure.name}.png)\n\n{figure.caption}" for figure in figures),
        *remarks,
        "## Where the numbers come from",
        "\n".join(f"- **{name}**: {_inert(value)}" for name, value in origin.items()),
        *([f"```json\n{resolved}\n```"] if resolved else []),
    ]
    html = [
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{_CSS}</style></head><body>",
        f"<h1>{title}</h1>",
        *map(_html_table, tables),
        "<h2>Figures</h2>",
        *(
            f'<figure><img alt="{escape(f"{figure.title}. {figure.caption}")}" '
            f'src="data:image/png;base64,{b64encode(figure.png).decode()}"></figure>'
            for figure in figures
        ),
        *(f'<p class="note">{escape(line)}</p>' for line in remarks),
        "<h2>Where the numbers come from</h2>",
        "<dl>"
        + "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in origin.items())
        + "</dl>",
        *([f"<details><summary>Resolved profile</summary><pre>{escape(resolved)}</pre></details>"] if resolved else []),
        "</body></html>\n",
    ]
    files = {
        "report.md": ("\n\n".join(part.rstrip("\n") for part in markdown) + "\n").encode(),
        "report.html": "\n".join(html).encode(),
    }
    for figure in figures:
        files |= {f"{figure.name}.png": figure.png, f"{figure.name}.svg": figure.svg}
    return write_files(files, folder)


def write_files(files: Mapping[str, bytes], folder: Path) -> list[Path]:
    """Write a report's files by name; raises UsageError where the folder cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (folder / name).write_bytes(content)
    except OSError as error:
        raise UsageError(f"cannot write the report to {folder}: {error.strerror}") from error
    return [folder / name for name in files]


def render(picture: Picture) -> _Drawn:
    """A picture as the bytes of its files."""
    png, svg = BytesIO(), BytesIO()
    with style():
        picture.figure.savefig(png, format="png", dpi=PIXELS_PER_INCH, metadata={"Software": None})
        picture.figure.savefig(svg, format="svg", metadata={"Date": None})
    return _Drawn(picture.name, picture.title, picture.caption, png.getvalue(), svg.getvalue())


def _words(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _inert(text: str) -> str:
    """Text that Markdown shows as it is."""
    return "".join(f"\\{char}" if char in r"\`*_[]<>|" else char for char in " ".join(text.split()))


def _html_table(table: Table) -> str:
    def row(cells: Iterable[str], tag: str) -> str:
        classes = ((cell, ' class="label"' if column < table.labels else "") for column, cell in enumerate(cells))
        return "<tr>" + "".join(f"<{tag}{kind}>{escape(cell)}</{tag}>" for cell, kind in classes) + "</tr>"

    parts = [f"<h2>{escape(table.title)}</h2>"]
    if table.columns:
        body = "\n".join(row(cells, "td") for cells in table.rows)
        parts.append(
            f'<div class="wide"><table><thead>{row(table.columns, "th")}</thead><tbody>\n{body}\n</tbody></table></div>'
        )
    if table.note:
        parts.append(f'<p class="note">{escape(table.note)}</p>')
    kind = ' class="alarm"' if table.alarm else ""
    return f"<section{kind}>" + "\n".join(parts) + "</section>"
