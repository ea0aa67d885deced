"""An analysis's report: Markdown, one self-contained HTML page, and the figures as PNG and SVG."""

import json
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from specctl.benchmark.drawing import Picture
from specctl.benchmark.report import _CSS, _html_table, _inert, _render, write_files
from specctl.benchmark.tables import Table, as_markdown

TITLE = "Draft signals and acceptance"


def write_analysis(
    shown: Sequence[Table], pictures: Iterable[Picture], provenance: Mapping[str, Any], folder: Path
) -> list[Path]:
    """Write ``report.md``, ``report.html`` and the figures into the folder; return what was written.

    Raises:
        UsageError: matplotlib is missing, or the folder cannot be written.
    """
    drawn = [_render(picture) for picture in pictures]
    origin = {name: _words(value) for name, value in provenance.items()}
    markdown = [
        f"# {TITLE}",
        *(f"## {table.title}\n\n{as_markdown(table)}" for table in shown),
        "## Figures",
        *(f"![{figure.title}]({figure.name}.png)\n\n{figure.caption}" for figure in drawn),
        "## Where the numbers come from",
        "\n".join(f"- **{name}**: {_inert(value)}" for name, value in origin.items()),
    ]
    html = [
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{TITLE}</title><style>{_CSS}</style></head><body>",
        f"<h1>{TITLE}</h1>",
        *map(_html_table, shown),
        "<h2>Figures</h2>",
        *(
            f'<figure><img alt="{escape(f"{figure.title}. {figure.caption}")}" '
            f'src="data:image/png;base64,{b64encode(figure.png).decode()}"></figure>'
            for figure in drawn
        ),
        "<h2>Where the numbers come from</h2><dl>",
        *(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in origin.items()),
        "</dl></body></html>\n",
    ]
    files = {
        "report.md": ("\n\n".join(part.rstrip("\n") for part in markdown) + "\n").encode(),
        "report.html": "\n".join(html).encode(),
    }
    for figure in drawn:
        files |= {f"{figure.name}.png": figure.png, f"{figure.name}.svg": figure.svg}
    return write_files(files, folder)


def _words(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
