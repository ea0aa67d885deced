"""`specctl words`: what the columns of tables and the fields of results mean."""

from difflib import get_close_matches
from typing import Annotated

import typer

from specctl.commands.grouped_command import grouped
from specctl.errors import UsageError
from specctl.terminal.output import write_sentence


@grouped()
def words(
    asked: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="WORD...",
            show_default=False,
            help="A column, a field or a term, or a command for all of its columns. Default: list them.",
        ),
    ] = None,
) -> None:
    """Explain the columns of tables, the fields of results and the terms.

    Examples:

    [cyan]specctl words "verification rate"[/]

    [cyan]specctl words bench[/]
    """
    from specctl.reporting.words import all_words, lookup

    if not asked:
        for section, defined in all_words().items():
            write_sentence(f"{section}: {', '.join(defined)}")
        return
    found = {one: lookup(one) for one in asked}
    if missing := next((one for one, hits in found.items() if not hits), None):
        known = [word for defined in all_words().values() for word in defined]
        near = get_close_matches(missing, known, n=1)
        raise UsageError(
            f"{missing!r} is not explained", f"did you mean {near[0]!r}?" if near else "`specctl words` lists all words"
        )
    for section, word in dict.fromkeys(hit for hits in found.values() for hit in hits):
        write_sentence(f"{word.text} ({section}): {word.meaning}")
