"""`specctl chat`: a conversation with a pair that stays loaded."""

import sys
from typing import Annotated

import typer

from specctl.commands.files import resolve_profile, spare_profile
from specctl.commands.loading import load
from specctl.commands.options import (
    DraftOption,
    EngineOption,
    ForeignHeadOption,
    PolicyOption,
    ProfileOption,
    ProgressOption,
    QuietOption,
    SeedOption,
    SetOption,
    TargetOption,
    TemperatureOption,
    TemplateOption,
    ThreadsOption,
    TrustOption,
    VerificationOption,
    sampling_flags,
)
from specctl.errors import UsageError
from specctl.outputs import Outputs
from specctl.streams import Closed


def chat(
    profile: ProfileOption = None,
    target: TargetOption = None,
    draft: DraftOption = None,
    policy: PolicyOption = None,
    set_: SetOption = None,
    engine: EngineOption = None,
    threads: ThreadsOption = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-new-tokens",
            "-n",
            "--max-tokens",
            min=1,
            metavar="N",
            help="Maximum number of tokens of each answer. Default: the profile's; 256 unless it says.",
        ),
    ] = None,
    temperature: TemperatureOption = None,
    verification: VerificationOption = None,
    seed: SeedOption = None,
    chat_: TemplateOption = None,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="System message.")] = None,
    live: Annotated[
        bool,
        typer.Option(
            "--live", help="Show a panel with figures while an answer is written, and the answer behind it as a whole."
        ),
    ] = False,
    foreign_head: ForeignHeadOption = False,
    trust_remote_code: TrustOption = False,
    progress: ProgressOption = None,
    quiet: QuietOption = False,
) -> None:
    """Talk with a pair: models are loaded once, and a turn reads only what is new.

    In a terminal, /help lists what else can be typed.

    In a pipe, each line is a turn, and answers go to standard output.

    Examples:

    [cyan]specctl chat --target ./big --draft ./small[/]

    [cyan]printf 'Hello!\\n/save talk.jsonl\\n' | specctl chat[/]
    """
    if isinstance(sys.stdin, Closed):
        raise UsageError("there is no standard input to read turns from")
    from specctl.profile import parse_policy

    flags = sampling_flags(max_new_tokens=max_new_tokens, temperature=temperature, verification=verification, seed=seed)
    flags |= {
        "engine": engine,
        "threads": threads,
        "prompt.chat": chat_,
        "prompt.system": system,
        "draft.policy": policy and parse_policy(policy),
    }
    resolved = resolve_profile(profile, set_, flags, target=target, draft=draft, trust_remote_code=trust_remote_code)
    person = sys.stdin.isatty()

    from rich.console import Console

    from specctl.terminal.work_progress import TerminalProgress

    console = Console(stderr=True)
    own = resolved.profile
    with Outputs() as outputs:
        outputs.reads("input", "-")
        spare_profile(outputs, resolved)
        sink = outputs.file("answers", "-")
        shown = TerminalProgress(console, False if quiet else progress)
        pair = load(own, console, foreign_head=foreign_head, quiet=quiet, models=False, progress=shown)

        from specctl.commands.talking import Talk
        from specctl.conversation.conversation import Chat

        conversation = Chat(pair, own, outputs)
        talk = Talk(conversation, console, sink, person=person, live=live, quiet=quiet)
        if person:
            talk.ask()
        else:
            talk.read()
    if talk.failed and not person:
        raise typer.Exit(1)
