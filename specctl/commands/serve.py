"""`specctl serve`: a pair behind the interface that OpenAI's clients speak."""

import json
import os
import sys
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any

import typer

from specctl.commands.flags import (
    LIMIT,
    PairOptions,
    PolicyOption,
    ReplicaOptions,
    RunOptions,
    SamplingOptions,
    ShowOptions,
    policy_flag,
    warn,
)
from specctl.commands.loading import load_served, served_replicas
from specctl.commands.requests import But, grouped
from specctl.errors import UsageError, pip_install
from specctl.printable import counted, one_line
from specctl.profile.schema import GRAMMARS

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


SERVE_HELP = {"max_new_tokens": LIMIT.format("of a request that names none")}
NEEDS = ("prometheus-client", "starlette", "uvicorn")


USUAL = "profile target draft policy max_new_tokens temperature host port api_key most_tokens timeout batch"
"""The parameters that --help shows."""


@grouped(usual=USUAL)
def serve(
    *,
    models: PairOptions,
    policy: PolicyOption = None,
    run: Annotated[RunOptions, But(("force",))],
    sampling: Annotated[SamplingOptions, But(("seed", "stop", "logprobs", *GRAMMARS), help=SERVE_HELP)],
    clients: ClientOptions,
    bounds: BoundOptions,
    replicas: Annotated[ReplicaOptions, But(("cluster", "keep_warm"))],
    show: Annotated[ShowOptions, But(("report", "json_"))],
) -> None:
    """Answer requests over HTTP as OpenAI's clients send them, several at once.

    Needs pip install '.[serve]' in a clone of the project. The first Ctrl-C or SIGTERM lets running texts end, the
    second ends them.

    Examples:

    [cyan]specctl serve -p my-profile --port 8000[/]

    [cyan]specctl serve -p my-profile --workers auto[/]

    [cyan]curl localhost:8000/v1/models[/]
    """
    _require_a_key_that_can_be_sent(clients.api_key)
    batch, replication = replicas.rows or "auto", replicas.replication
    resolved = run.resolve(models, {**sampling.flags, **policy_flag(policy)})
    _require_extra()

    from rich.console import Console

    from specctl.serving.endpoints import application
    from specctl.serving.listening import Listener, address_of, bound, known_hosts
    from specctl.serving.service import Limits, Service
    from specctl.terminal.progress import TerminalProgress, note

    console = Console(stderr=True)
    with bound(clients.host, clients.port) as listening, ExitStack() as stack:
        shown = TerminalProgress(console, False if show.quiet else show.progress)
        limits = Limits(bounds.max_body, bounds.most_tokens, bounds.max_waiting, bounds.timeout)
        profile, flags = resolved.profile, {"quiet": show.quiet, "foreign_head": run.foreign_head}
        name = clients.name or profile.target.model
        if replication is None:
            loaded = load_served(profile, batch, shown, **flags)
            service = Service(loaded.pair, loaded.profile, name, loaded.passes, limits, warn)
            writers = ""
        else:
            pair = stack.enter_context(served_replicas(replication, profile, name, batch, shown, **flags))
            service = Service(pair, profile, name, limits=limits)
            writers = f" with {counted(pair.workers, 'worker')}"
        app = application(
            service,
            key=clients.api_key,
            cors=clients.cors,
            hosts=None if clients.api_key else known_hosts(clients.host, listening),
            log=None if show.quiet else _log,
            log_prompts=clients.log_prompts,
        )
        listener = Listener(app, service, bounds.timeout)
        if not show.quiet:
            texts = f"{counted(service.thread.texts, 'text')} at once{writers}"
            base = address_of(listening)
            note(console, f"{service.name} at {base}/v1, {texts}; a page to try it: {base}/ ; Ctrl-C ends")
        listener.serve_on(listening)


def _require_a_key_that_can_be_sent(key: str | None) -> None:
    """Raise UsageError for a key that is empty or has white space around it."""
    given = os.environ.get(KEY_VARIABLE) if key is None else key  # typer takes an empty variable for none
    if given == "":
        raise UsageError("the API key is empty", f"give one, or leave --api-key and {KEY_VARIABLE} out")
    if given is not None and given != given.strip():
        raise UsageError("the API key has white space around it, which no client can send", "leave it out of the key")


def _require_extra() -> None:
    """Raise UsageError without what it needs."""
    from importlib.util import find_spec

    if missing := [name for name in NEEDS if find_spec(name.replace("-", "_")) is None]:
        raise UsageError(
            f"serve needs {', '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not installed",
            pip_install(*missing),
        )


def _log(line: dict[str, Any]) -> None:
    with suppress(OSError, ValueError):  # who no longer reads the log does not end the server
        sys.stderr.write((_for_people(line) if sys.stderr.isatty() else json.dumps(line)) + "\n")
        sys.stderr.flush()


def _for_people(line: dict[str, Any]) -> str:
    """A line of the access log as a terminal shows it: ``14:03:21 POST /v1/completions 200, 64 tokens, 310.2 ms``."""
    at = datetime.fromisoformat(line["time"]).astimezone()
    tokens, drafted = line.get("completion_tokens"), line.get("drafted")
    parts = [
        f"{at:%H:%M:%S} {line['method']} {line['path']} {line['status']}",
        "" if tokens is None else counted(tokens, "token"),
        f"{line['accepted'] / drafted:.0%} of {drafted} accepted" if drafted else "",
        f"{line['ms']} ms",
        "the client is gone" if line.get("gone") else "",
        *(f"{key}: {json.dumps(line[key], ensure_ascii=False)}" for key in ("error", "request", "text") if key in line),
    ]
    return one_line(", ".join(filter(None, parts)))
