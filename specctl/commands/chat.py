"""`specctl chat`: a conversation with a pair that stays loaded."""

import sys
from typing import Annotated

import typer

from specctl.commands.loading import load
from specctl.commands.options import (
    DraftOption,
    ForceOption,
    PolicyOption,
    ProfileOption,
    QuietOption,
    SetOption,
    TargetOption,
    chosen_profile,
    sampling_flags,
)
from specctl.errors import UsageError


def chat(
    profile: ProfileOption = None,
    target: TargetOption = None,
    draft: DraftOption = None,
    policy: PolicyOption = None,
    set_: SetOption = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option("-n", "--max-new-tokens", min=1, metavar="N", help="Maximum number of tokens of each answer."),
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option("-t", "--temperature", min=0, metavar="T", help="Sampling temperature; 0 is greedy decoding."),
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, metavar="N", help="Seed of all random draws.")] = None,
    chat_: Annotated[
        bool | None,
        typer.Option(
            "--chat/--raw",
            help="Put turns through the target's chat template, or join them as plain text. Default: the template, if "
            "there is one.",
        ),
    ] = None,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="System message.")] = None,
    live: Annotated[
        bool | None,
        typer.Option(
            "--live/--no-live", help="Show a live panel, or print answers as they grow. Default: live in a terminal."
        ),
    ] = None,
    force: ForceOption = False,
    quiet: QuietOption = False,
) -> None:
    """Talk with a pair: models are loaded once, and a turn reads only what is new.

    In a terminal, /help lists what else can be typed.

    In a pipe, each line is a turn, and answers go to standard output.

    Examples:

    [cyan]specctl chat --target ./big --draft ./small[/]

    [cyan]printf 'Hello!\\n/save talk.jsonl\\n' | specctl chat[/]
    """
    if sys.stdin is None:
        raise UsageError("there is no standard input to read turns from")
    from specctl.profile import parse_policy

    flags = sampling_flags(max_new_tokens=max_new_tokens, temperature=temperature, seed=seed)
    flags |= {"prompt.chat": chat_, "prompt.system": system, "draft.policy": policy and parse_policy(policy)}
    resolved = chosen_profile(profile, target, draft, set_, flags)
    person = sys.stdin.isatty()

    from rich.console import Console

    from specctl.streams import open_output

    console = Console(stderr=True)
    own = resolved.profile
    pair = load(own, console, force=force, quiet=quiet)

    from specctl.commands.talking import Talk
    from specctl.conversation.chat import Chat

    # Conversations go through a template where there is one, unless someone said otherwise.
    if resolved.origins["prompt.chat"] == "default":
        template = bool(pair.tokenizer.chat_template)
        own = own.model_copy(update={"prompt": own.prompt.model_copy(update={"chat": template})})
    shown = live if live is not None else console.is_terminal and sys.stdout.isatty() and not quiet
    with open_output("-") as sink:
        talk = Talk(Chat(pair, own), console, sink, person=person, live=shown, quiet=quiet)
        if person:
            talk.ask()
        else:
            talk.read()
    if talk.failed and not person:
        raise typer.Exit(1)
