"""`specctl chat`: a conversation with a pair that stays loaded."""

import sys
from typing import Annotated

import typer

from specctl.commands.flags import (
    LIMIT,
    FewSamplingOptions,
    PairOptions,
    PolicyOption,
    RunOptions,
    ServerOptions,
    ShowOptions,
    TemplateOption,
    policy_flag,
    spare_profile,
)
from specctl.commands.loading import load
from specctl.commands.requests import But, grouped, option, require_unused
from specctl.errors import UsageError
from specctl.outputs import Outputs
from specctl.streams import Closed

OF_A_SERVER = ("target", "api_key", "max_new_tokens", "temperature", "seed", "chat_", "system", "quiet")
"""Parameters that have an effect with --url."""


USUAL = "profile target draft policy max_new_tokens temperature chat_ system live url engine"
"""The parameters that --help shows."""


@grouped(usual=USUAL)
def chat(
    *,
    ctx: typer.Context,
    models: PairOptions,
    policy: PolicyOption = None,
    run: Annotated[RunOptions, But(("check", "force"))],
    sampling: Annotated[FewSamplingOptions, But(help={"max_new_tokens": LIMIT.format("of each answer")})],
    chat_: TemplateOption = None,
    system: str | None = option("System message.", "TEXT"),
    live: bool = option(
        "Show a panel with figures while an answer is written, then the whole answer.",
        "--live",
        default=False,
    ),
    server: ServerOptions,
    show: Annotated[ShowOptions, But(("report", "json_"))],
) -> None:
    """Talk with a pair: models are loaded once, and a turn reads only what is new.

    In a terminal, /help lists what else can be typed. In a pipe, each line is a turn, and answers go to standard
    output.

    Examples:

    [cyan]specctl chat --target ./big --draft ./small[/]

    [cyan]printf 'Hello!\\n/save talk.jsonl\\n' | specctl chat[/]
    """
    if isinstance(sys.stdin, Closed):
        raise UsageError("there is no standard input to read turns from")
    flags = {**sampling.flags, **policy_flag(policy), "prompt.chat": chat_, "prompt.system": system}
    person = sys.stdin.isatty()
    if server.url is not None:
        require_unused(ctx, "url", "asks a server", but=OF_A_SERVER)
        from specctl.remote import connected

        asked = connected(server.url, server.api_key, models.target)

        from rich.console import Console

        from specctl.commands.talk import talk_with

        with Outputs() as outputs:
            outputs.reads("input", "-")
            sink, console = outputs.file("answers", "-"), Console(stderr=True)
            failed = talk_with(asked, flags, console, sink, outputs, person=person, quiet=show.quiet)
        if failed and not person:
            raise typer.Exit(1)
        return
    resolved = run.resolve(models, flags)

    from rich.console import Console

    from specctl.terminal.progress import TerminalProgress

    console = Console(stderr=True)
    own = resolved.profile
    with Outputs() as outputs:
        outputs.reads("input", "-")
        spare_profile(outputs, resolved)
        sink = outputs.file("answers", "-")
        shown = TerminalProgress(console, False if show.quiet else show.progress)
        pair = load(own, console, foreign_head=run.foreign_head, quiet=show.quiet, models=False, progress=shown)

        from specctl.commands.talk import Talk
        from specctl.conversation import Chat

        conversation = Chat(pair, own, outputs)
        talk = Talk(conversation, console, sink, person=person, live=live, quiet=show.quiet)
        if person:
            talk.ask()
        else:
            talk.read()
    if talk.failed and not person:
        raise typer.Exit(1)
