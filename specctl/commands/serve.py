"""`specctl serve`: a pair behind the interface that OpenAI's clients speak."""

import json
import sys
from contextlib import suppress
from typing import Annotated, Any

from specctl.commands.grouped_command import But, grouped
from specctl.commands.option_groups import LIMIT, PairOptions, RunOptions, SamplingOptions, ShowOptions
from specctl.commands.options import PolicyOption, policy_flag, warn
from specctl.commands.serve_options import BoundOptions, ClientOptions
from specctl.commands.tasks.record_answerer import load_answering
from specctl.commands.tasks.replication import ReplicaOptions
from specctl.errors import UsageError
from specctl.profile.base_tables import GRAMMARS

SERVE_HELP = {"max_new_tokens": LIMIT.format("of a request that names none")}
NEEDS = ("prometheus_client", "starlette", "uvicorn")


@grouped
def serve(
    *,
    models: PairOptions,
    policy: PolicyOption = None,
    run: Annotated[RunOptions, But(("force",))],
    sampling: Annotated[SamplingOptions, But(("seed", "stop", "logprobs", *GRAMMARS), help=SERVE_HELP)],
    clients: ClientOptions,
    bounds: BoundOptions,
    replicas: Annotated[ReplicaOptions, But(("workers", "cluster", "keep_warm"))],
    show: Annotated[ShowOptions, But(("report", "json_"))],
) -> None:
    """Answer requests over HTTP as OpenAI's clients send them, several at once.

    Needs the extra serve: pip install 'specctl[serve]'.

    The first Ctrl-C or SIGTERM lets texts end that are being written, the second ends them.

    Examples:

    [cyan]specctl serve -p my-profile --port 8000[/]

    [cyan]curl localhost:8000/v1/models[/]
    """
    if clients.api_key == "":
        raise UsageError("the API key is empty", "give one, or leave --api-key and SPECCTL_API_KEY out")
    batch = replicas.rows or "auto"
    resolved = run.resolve(models, {**sampling.flags, **policy_flag(policy)})
    _require_extra()

    from rich.console import Console

    from specctl.batching.row_count import MOST, chosen_passes
    from specctl.serving.endpoints import application
    from specctl.serving.listening import Listener, address_of, bound, known_hosts
    from specctl.serving.service import Limits, Service
    from specctl.terminal.work_progress import TerminalProgress, note

    console = Console(stderr=True)
    with bound(clients.host, clients.port) as listening:
        shown = TerminalProgress(console, False if show.quiet else show.progress)
        loaded = load_answering(
            resolved.profile, shown, quiet=show.quiet, traced=False, foreign_head=run.foreign_head, expected_tokens=0
        )
        pair, profile = loaded.pair, loaded.profile
        limit = profile.sampling.max_new_tokens
        settings = [] if profile.draft is None else [profile.draft.setting]
        with shown.doing("choosing how many texts are written at once"):
            passes = chosen_passes(pair, batch, MOST if batch == "auto" else batch, limit, settings, warn)
        limits = Limits(bounds.max_body, bounds.most_tokens, bounds.max_waiting, bounds.timeout)
        service = Service(pair, profile, clients.name or profile.target.model, passes, limits, warn)
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
            texts = 1 if passes is None else passes[-1].rows
            note(console, f"{service.name} at {address_of(listening)}/v1, {texts} texts at once; Ctrl-C ends")
        listener.serve_on(listening)


def _require_extra() -> None:
    """Raise UsageError without what it needs."""
    from importlib.util import find_spec

    if missing := [name for name in NEEDS if find_spec(name) is None]:
        raise UsageError(
            f"serve needs {', '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not installed",
            "pip install 'specctl[serve]'",
        )


def _log(line: dict[str, Any]) -> None:
    with suppress(OSError, ValueError):  # who no longer reads the log does not end the server
        sys.stderr.write(json.dumps(line) + "\n")
        sys.stderr.flush()
