"""The command line as a whole. Command modules are thin: torch is imported inside their bodies."""

from typing import Annotated

import typer

from specctl import __version__
from specctl.commands import profiles
from specctl.commands.analyze import analyze
from specctl.commands.bench import bench
from specctl.commands.calibrate import calibrate
from specctl.commands.chat import chat
from specctl.commands.doctor import doctor
from specctl.commands.generate import generate
from specctl.commands.train_head import train_head

app = typer.Typer(
    name="specctl",
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
) -> None:
    """Generate text from a large model faster, without changing its output.

    A small draft model drafts tokens, the large target model verifies many of them in one pass, and a stopping
    policy decides, token by token, when the draft should stop.
    """


# Every command, in the order help lists them.
app.command()(generate)
app.command()(chat)
app.command()(bench)
app.command()(calibrate)
app.command()(analyze)
app.command("train-head")(train_head)
app.command()(doctor)
app.add_typer(profiles.app, name="profiles")
