"""`specctl serve`: a pair with the interface that OpenAI's clients speak."""

import json
import os
import sys
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any

from specctl.commands.flags import (
    LIMIT,
    PairOptions,
    PolicyOption,
    ReplicaOptions,
    RunOptions,
    SamplingOptions,
    ShowOptions,
    policy_flag,
)
from specctl.commands.loading import load_served, may_run_on_llama, served_replicas
from specctl.commands.requests import But, grouped, option
from specctl.errors import UsageError, pip_install
from specctl.printable import counted, one_line
from specctl.profile.schema import GRAMMARS

KEY_VARIABLE = "SPECCTL_API_KEY"


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """Options of the address and access."""

    panel = "Clients"
    host: str = option("Address to listen on; 0.0.0.0 admits other machines.", "ADDRESS", default="127.0.0.1")
    port: int = option("Port to listen on; 0 takes a free one.", "N", default=8000, min=0, max=65535)
    api_key: str | None = option(
        "Key that clients must send. Other users of the machine do not see it in the environment.",
        "KEY",
        envvar=KEY_VARIABLE,
        show_default=False,
    )
    name: str | None = option("Name of the model for clients. Default: the target.", "NAME")
    cors: str | None = option("Let web pages of this origin ask, such as https://example.org.", "ORIGIN")
    log_prompts: bool = option("Write requests and texts to the access log too.", "--log-prompts", default=False)


@dataclass(frozen=True, slots=True)
class BoundOptions:
    """Options of limits."""

    panel = "Limits"
    max_waiting: int = option("Requests that may wait; others get error 429.", "N", default=256, min=1)
    max_body: int = option("Largest body of a request.", "BYTES", default=4 << 20, min=1)
    most_tokens: int | None = option("Largest max_tokens of a request. Default: what the context holds.", "N", min=1)
    timeout: float = option("Longest time of a request, waiting included.", "SECONDS", default=600.0, min=1)


SERVE_HELP = {"max_new_tokens": LIMIT.format("of a request that names none")}
NEEDS = ("prometheus-client", "starlette", "uvicorn")


USUAL = "profile target draft policy max_new_tokens temperature host port api_key most_tokens timeout batch"
"""The parameters that --help shows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeRequest:
    """The flags of `specctl serve`; UsageError for conflicting ones."""

    models: PairOptions
    policy: PolicyOption = None
    run: Annotated[RunOptions, But(("force",))]
    sampling: Annotated[SamplingOptions, But(("seed", "stop", "logprobs", *GRAMMARS), help=SERVE_HELP)]
    clients: ClientOptions
    bounds: BoundOptions
    replicas: Annotated[ReplicaOptions, But(("cluster", "keep_warm"))]
    show: Annotated[ShowOptions, But(("report", "json_"))]

    def __post_init__(self) -> None:
        key = self.clients.api_key
        given = os.environ.get(KEY_VARIABLE) if key is None else key  # typer treats an empty variable as unset
        if given == "":
            raise UsageError("the API key is empty", f"give one, or leave --api-key and {KEY_VARIABLE} out")
        if given is not None and given != given.strip():
            what = "the API key has white space around it, which no client can send"
            raise UsageError(what, "leave it out of the key")
        _ = self.replicas.at_once, self.replicas.replication


@grouped(usual=USUAL)
def serve(request: ServeRequest) -> None:
    """Answer requests over HTTP as OpenAI's clients send them, several at once.

    Needs pip install '.[serve]' in a clone of the project. The first Ctrl-C or SIGTERM lets running texts end, the
    second ends them.

    Examples:

    [cyan]specctl serve -p my-profile --port 8000[/]

    [cyan]specctl serve -p my-profile --workers auto[/]

    [cyan]curl localhost:8000/v1/models[/]
    """
    resolved = request.run.resolve(request.models, {**request.sampling.flags, **policy_flag(request.policy)})
    _require_extra()

    from rich.console import Console

    from specctl.serving.endpoints import application
    from specctl.serving.listening import Listener, address_of, bound, known_hosts
    from specctl.serving.service import Limits, Service
    from specctl.terminal.progress import TerminalProgress, note

    clients, bounds, quiet, console = request.clients, request.bounds, request.show.quiet, Console(stderr=True)
    batch, replication = request.replicas.at_once or "auto", request.replicas.replication
    with bound(clients.host, clients.port) as listening, ExitStack() as stack:
        shown = TerminalProgress(console, False if quiet else request.show.progress)
        limits = Limits(bounds.max_body, bounds.most_tokens, bounds.max_waiting, bounds.timeout)
        profile, flags = resolved.profile, {"quiet": quiet, "foreign_head": request.run.foreign_head}
        name = clients.name or profile.target.model
        if replication is None and not may_run_on_llama(profile):
            served = load_served(profile, name, batch, shown, **flags)
        else:
            served = stack.enter_context(served_replicas(replication, profile, name, batch, shown, **flags))
        service = Service(served, limits)
        app = application(
            service,
            key=clients.api_key,
            cors=clients.cors,
            hosts=None if clients.api_key else known_hosts(clients.host, listening),
            log=None if quiet else _log,
            log_prompts=clients.log_prompts,
        )
        listener = Listener(app, service, bounds.timeout)
        if not quiet:
            workers = "" if replication is None else f" with {counted(served.workers or 1, 'worker')}"
            texts = f"{counted(served.texts, 'text')} at once{workers}"
            base = address_of(listening)
            note(console, f"{service.name} at {base}/v1, {texts}; a page to try it: {base}/ ; Ctrl-C ends")
        listener.serve_on(listening)


def _require_extra() -> None:
    from importlib.util import find_spec

    if missing := [name for name in NEEDS if find_spec(name.replace("-", "_")) is None]:
        raise UsageError(
            f"serve needs {', '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not installed",
            pip_install(*missing),
        )


def _log(line: dict[str, Any]) -> None:
    with suppress(OSError, ValueError):  # a closed log must not end the server
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
