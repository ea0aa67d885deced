"""A benchmark's report: Markdown, one self-contained HTML page, and the figures as PNG and SVG."""

import json
import shlex
from base64 import b64encode
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from html import escape
from io import BytesIO
from pathlib import Path
from typing import Any

from specctl.benchmark.digest import Digest, digest
from specctl.benchmark.drawing import Picture, style
from specctl.benchmark.figures import draw_all
from specctl.benchmark.results import RunSet
from specctl.benchmark.tables import Table, as_markdown, tables
from specctl.errors import UsageError

TITLE = "Speculative decoding benchmark"
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


def write_report(results: RunSet, folder: Path) -> list[Path]:
    """Write ``report.md``, ``report.html`` and the figures into the folder; return what was written.

    Figures that the results cannot fill are left out, with a line that says why.

    Raises:
        UsageError: there is no run to report, matplotlib is missing, or the folder cannot be written.
    """
    if not results.runs:
        raise UsageError("there is no finished run to report")
    whole = digest(results)
    shown = tables(whole)
    drawn, skipped = [], []
    for title, picture in draw_all(whole):
        if isinstance(picture, Picture):
            drawn.append(_render(picture))
        else:
            skipped.append(f"{title}: not drawn, {picture}.")
    files: dict[str, bytes] = {
        "report.md": _markdown(whole, shown, drawn, skipped).encode(),
        "report.html": _html(whole, shown, drawn, skipped).encode(),
    }
    for figure in drawn:
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


def _render(picture: Picture) -> _Drawn:
    png, svg = BytesIO(), BytesIO()
    with style():
        picture.figure.savefig(png, format="png", dpi=PIXELS_PER_INCH, metadata={"Software": None})
        picture.figure.savefig(svg, format="svg", metadata={"Date": None})
    return _Drawn(picture.name, picture.title, picture.caption, png.getvalue(), svg.getvalue())


def _provenance(whole: Digest) -> dict[str, str]:
    header = whole.results.header
    expected = f" of {whole.expected_runs}" if whole.expected_runs else ""
    return {
        "Command": shlex.join(header.argv),
        "Started": header.created,
        "Prompts": _pairs(header.suite),
        "Runs": f"{len(whole.results.runs)}{expected}, repeats {header.repeats}, "
        f"length limits {', '.join(map(str, header.lengths)) or 'of the profile'}",
        "Sampling": _pairs(header.sampling),
        "Devices": _pairs(header.devices),
        "Versions": _pairs(header.versions),
        "Entrants": "; ".join(
            f"{entrant.label} ({_pairs(entrant.settings)})" if entrant.settings else entrant.label
            for entrant in header.entrants
        ),
    }


def _pairs(values: Any) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


def _profile(whole: Digest) -> str:
    return json.dumps(whole.results.header.profile, indent=2, ensure_ascii=False, default=str)


def _alarms_first(shown: Iterable[Table]) -> list[Table]:
    return sorted(shown, key=lambda table: not table.alarm)


def _markdown(whole: Digest, shown: Iterable[Table], drawn: Iterable[_Drawn], skipped: Iterable[str]) -> str:
    parts = [f"# {TITLE}"]
    parts += [f"## {table.title}\n\n{as_markdown(table)}" for table in _alarms_first(shown)]
    parts.append("## Figures")
    parts += [f"![{figure.title}]({figure.name}.png)\n\n{figure.caption}" for figure in drawn]
    parts += list(skipped)
    parts.append("## Where the numbers come from")
    parts.append("\n".join(f"- **{name}**: {_inert(value)}" for name, value in _provenance(whole).items()))
    parts.append(f"```json\n{_profile(whole)}\n```")
    return "\n\n".join(part.rstrip("\n") for part in parts) + "\n"


def _inert(text: str) -> str:
    """Text that Markdown shows as it is."""
    return "".join(f"\\{char}" if char in r"\`*_[]<>|" else char for char in " ".join(text.split()))


def _html(whole: Digest, shown: Iterable[Table], drawn: Iterable[_Drawn], skipped: Iterable[str]) -> str:
    provenance = "".join(
        f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in _provenance(whole).items()
    )
    body = [
        f"<h1>{TITLE}</h1>",
        *map(_html_table, _alarms_first(shown)),
        "<h2>Figures</h2>",
        *(
            f'<figure><img alt="{escape(f"{figure.title}. {figure.caption}")}" '
            f'src="data:image/png;base64,{b64encode(figure.png).decode()}"></figure>'
            for figure in drawn
        ),
        *(f'<p class="note">{escape(line)}</p>' for line in skipped),
        "<h2>Where the numbers come from</h2>",
        f"<dl>{provenance}</dl>",
        f"<details><summary>Resolved profile</summary><pre>{escape(_profile(whole))}</pre></details>",
    ]
    head = (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{TITLE}</title><style>{_CSS}</style></head><body>"
    )
    return "\n".join([head, *body, "</body></html>\n"])


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
