"""Options of `specctl serve` about who may ask, and how much."""

from dataclasses import dataclass
from typing import Annotated

import typer

CLIENTS, BOUNDS = "Clients", "Limits"
KEY_VARIABLE = "SPECCTL_API_KEY"


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """Where it listens, and to whom."""

    host: Annotated[
        str,
        typer.Option(
            metavar="ADDRESS",
            help="Address to listen on; 0.0.0.0 admits other machines.",
            rich_help_panel=CLIENTS,
        ),
    ] = "127.0.0.1"
    port: Annotated[
        int,
        typer.Option(
            min=0, max=65535, metavar="N", help="Port to listen on; 0 takes a free one.", rich_help_panel=CLIENTS
        ),
    ] = 8000
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar=KEY_VARIABLE,
            metavar="KEY",
            help="Key that clients must send. Other users of the machine do not see it in the environment.",
            show_default=False,
            rich_help_panel=CLIENTS,
        ),
    ] = None
    name: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="What clients call the model. Default: the target.", rich_help_panel=CLIENTS),
    ] = None
    cors: Annotated[
        str | None,
        typer.Option(
            metavar="ORIGIN",
            help="Let web pages of this origin ask, such as https://example.org.",
            rich_help_panel=CLIENTS,
        ),
    ] = None
    log_prompts: Annotated[
        bool,
        typer.Option("--log-prompts", help="Write requests and texts to the access log too.", rich_help_panel=CLIENTS),
    ] = False


@dataclass(frozen=True, slots=True)
class BoundOptions:
    """How much may be asked."""

    max_waiting: Annotated[
        int,
        typer.Option(min=1, metavar="N", help="Requests that may wait; others get error 429.", rich_help_panel=BOUNDS),
    ] = 256
    max_body: Annotated[
        int, typer.Option(min=1, metavar="BYTES", help="Largest body of a request.", rich_help_panel=BOUNDS)
    ] = 4 << 20
    most_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Largest max_tokens of a request. Default: what the context holds.",
            rich_help_panel=BOUNDS,
        ),
    ] = None
    timeout: Annotated[
        float,
        typer.Option(
            min=1, metavar="SECONDS", help="Longest time of a request, waiting included.", rich_help_panel=BOUNDS
        ),
    ] = 600.0
