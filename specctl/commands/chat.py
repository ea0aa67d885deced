"""`specctl chat`: a conversation with a pair that stays loaded."""

import sys
from dataclasses import dataclass
from typing import Annotated, Any

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
    protect_profile,
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """The flags of `specctl chat`; UsageError for conflicting ones."""

    ctx: typer.Context
    models: PairOptions
    policy: PolicyOption = None
    run: Annotated[RunOptions, But(("check", "force"))]
    sampling: Annotated[FewSamplingOptions, But(help={"max_new_tokens": LIMIT.format("of each answer")})]
    chat_: TemplateOption = None
    system: str | None = option("System message.", "TEXT")
    live: bool = option(
        "Show a panel with figures while an answer is written, then the whole answer.",
        "--live",
        default=False,
    )
    server: ServerOptions
    show: Annotated[ShowOptions, But(("report", "json_"))]

    def __post_init__(self) -> None:
        if isinstance(sys.stdin, Closed):
            raise UsageError("there is no standard input to read turns from")
        if self.server.url is not None:
            require_unused(self.ctx, "url", "asks a server", but=OF_A_SERVER)

    @property
    def flags(self) -> dict[str, Any]:
        """The profile values that the flags set, by dotted key."""
        own = {"prompt.chat": self.chat_, "prompt.system": self.system}
        return {**self.sampling.flags, **policy_flag(self.policy), **own}

    @property
    def person(self) -> bool:
        """Whether a person types the turns."""
        return sys.stdin.isatty()


@grouped(usual=USUAL)
def chat(request: ChatRequest) -> None:
    """Talk with a pair: models are loaded once, and a turn reads only new text.

    In a terminal, /help lists what else can be typed. In a pipe, each line is a turn, and answers go to standard
    output.

    Examples:

    [cyan]specctl chat --target ./big --draft ./small[/]

    [cyan]printf 'Hello!\\n/save talk.jsonl\\n' | specctl chat[/]
    """
    from rich.console import Console

    from specctl.commands import talk
    from specctl.terminal.progress import TerminalProgress

    show, server, console = request.show, request.server, Console(stderr=True)
    with Outputs() as outputs:
        outputs.reads("input", "-")
        if server.url is not None:
            from specctl.remote import connected

            asked = connected(server.url, server.api_key, request.models.target)
            sink = outputs.file("answers", "-")
            failed = talk.talk_with(
                asked, request.flags, console, sink, outputs, person=request.person, quiet=show.quiet
            )
        else:
            resolved = request.run.resolve(request.models, request.flags)
            protect_profile(outputs, resolved)
            sink = outputs.file("answers", "-")
            foreign_head = request.run.foreign_head
            progress = TerminalProgress(console, False if show.quiet else show.progress)
            pair = load(resolved.profile, progress, foreign_head=foreign_head, quiet=show.quiet, models=False)

            from specctl.conversation import Chat

            chat = Chat(pair, resolved.profile, outputs)
            failed = talk.Talk(chat, console, sink, person=request.person, live=request.live, quiet=show.quiet).run()
    if failed and not request.person:
        raise typer.Exit(1)
