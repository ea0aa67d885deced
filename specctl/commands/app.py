"""The command line as a whole. Command modules are thin: torch is imported inside their bodies."""

from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Annotated, Any

import typer

from specctl import __version__
from specctl.commands import profiles
from specctl.commands.analyze import analyze
from specctl.commands.bench import bench
from specctl.commands.calibrate import calibrate
from specctl.commands.chat import chat
from specctl.commands.doctor import doctor
from specctl.commands.generate import generate
from specctl.commands.requests import CommandWithHelp, GroupWithHelp, HelpAll, grouped
from specctl.commands.serve import serve
from specctl.commands.train import train_draft, train_head
from specctl.errors import UsageError
from specctl.printable import one_line
from specctl.terminal.output import write_sentence


class _Commands(GroupWithHelp):
    """Removes terminal control sequences from the words that a usage error quotes."""

    def make_context(self, *args: Any, **options: Any) -> Any:
        with _clean_usage_errors():
            return super().make_context(*args, **options)

    def invoke(self, ctx: Any) -> Any:
        with _clean_usage_errors():
            return super().invoke(ctx)


@contextmanager
def _clean_usage_errors() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if hasattr(error, "format_message"):  # typer does not export its usage error class
            error.message = one_line(error.message)  # type: ignore[attr-defined]
            if getattr(error, "possibilities", None) is not None:
                _suggest(error)
        raise


def _suggest(error: Any) -> None:
    """Keep only close suggestions for an unknown option, or name the flag that lists all options."""
    bare = {one.lstrip("-"): one for one in error.possibilities}
    near = get_close_matches(error.option_name.lstrip("-"), bare, n=2, cutoff=0.75)
    error.possibilities = [bare[one] for one in near]
    if not near and error.ctx is not None:
        error.message += f"; all options: {error.ctx.command_path} --help-all"


app = typer.Typer(
    name="specctl",
    cls=_Commands,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"specctl {__version__}")
        raise typer.Exit


@app.callback()
def specctl(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    help_all: HelpAll = False,
) -> None:
    """Generate text from a large model faster, without changing its output.

    A small draft model drafts tokens, the large target model verifies many of them in one pass, and a stopping
    policy decides, token by token, when the draft should stop.
    """


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


# Every command, in the order of the help.
app.command(cls=CommandWithHelp)(generate)
app.command(cls=CommandWithHelp)(chat)
app.command(cls=CommandWithHelp)(serve)
app.command(cls=CommandWithHelp)(bench)
app.command(cls=CommandWithHelp)(calibrate)
app.command(cls=CommandWithHelp)(analyze)
app.command("train-head", cls=CommandWithHelp)(train_head)
app.command("train-draft", cls=CommandWithHelp)(train_draft)
app.command(cls=CommandWithHelp)(doctor)
app.add_typer(profiles.app, name="profiles")
app.command(cls=CommandWithHelp)(words)
