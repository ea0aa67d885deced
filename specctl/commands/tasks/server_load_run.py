"""The flags about a server that others run, and `specctl bench --url`. No torch here."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specctl.commands.grouped_command import option
from specctl.commands.option_groups import ShowOptions
from specctl.errors import SpecctlError, UsageError
from specctl.outputs import OutputFile

if TYPE_CHECKING:
    from specctl.benchmark.server_load import LoadHeader, ServerLoad
    from specctl.prompts.suites import Suite

PANEL = "A server"


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """A server to ask in place of models of one's own."""

    panel = PANEL
    url: str | None = option(
        "Ask a running server instead: specctl serve, vLLM, llama.cpp. --model chooses among its models.",
        "URL",
    )
    api_key: str | None = option(
        "The server's key. In the environment other users of the machine do not see it.",
        "KEY",
        envvar="SPECCTL_API_KEY",
        show_default=False,
    )


@dataclass(frozen=True, slots=True)
class LoadOptions(ServerOptions):
    """How much it is asked."""

    concurrency: str | None = option(
        "With --url: requests at once; all prompts are asked with each. Default: 1.", "N[,N...]"
    )
    warm_up: int | None = option(
        "With --url: requests before each concurrency that are not counted. Default: 1.", "N", min=0
    )

    @property
    def levels(self) -> list[int]:
        """The concurrencies, in order; raises UsageError."""
        try:
            found = [int(part) for part in (self.concurrency or "1").split(",")]
        except ValueError:
            found = [0]
        if any(one < 1 for one in found):
            raise UsageError(f"--concurrency {self.concurrency} is not a list of positive numbers", "e.g. 1,4,16")
        return list(dict.fromkeys(found))

    def require_url(self) -> None:
        """Raise UsageError where an option has no effect without a server."""
        for name, value in (("--concurrency", self.concurrency), ("--warm-up", self.warm_up)):
            if value is not None:
                raise UsageError(f"{name} is about a server", "name one with --url, or leave it out")


def run_load(
    options: LoadOptions,
    model: str | None,
    suite: "Suite",
    settings: dict[str, Any],
    chat: bool | None,
    repeats: int,
    file: OutputFile | None,
    show: ShowOptions,
) -> None:
    """Measure a server and show what was found, after Ctrl-C too.

    Args:
        options: name it.
        model: of its models; None for the only one.
        suite: the records.
        settings: keys of the sampling table.
        chat: whether texts go through its chat template, if the user says.
        repeats: how often each record is asked.
        file: takes each request.
        show: how.

    Raises:
        UsageError: the options or records cannot be.
        SpecctlError: the server gives no answers, or some requests failed.
    """
    from datetime import UTC, datetime

    from specctl.benchmark.server_load import LOAD, Asked, LoadHeader, ServerLoad, dialogues
    from specctl.remote import connected

    assert options.url is not None
    levels = options.levels
    work = dialogues(suite, settings, chat) * repeats
    server = connected(options.url, options.api_key, model)
    header = LoadHeader(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        url=server.url,
        model=server.model,
        concurrency=levels,
        suite={"name": suite.name, "sha256": suite.sha256, "count": len(suite.prompts)},
        settings={key: value for key, value in settings.items() if value is not None},
    )
    write = LOAD.writing(file, header)
    total = sum(max(1, len(one.turns)) for one in work) * len(levels)
    with show.bars().counting("requests", total) as advance:

        def heard(asked: Asked) -> None:
            write(asked)
            advance(asked.tokens)

        load = ServerLoad(server, work, heard)
        try:
            for concurrency in levels:
                load.run(concurrency, 1 if options.warm_up is None else options.warm_up)
        except KeyboardInterrupt:
            _show(header, load, total - sum(len(level.asked) for level in load.levels), show)
            raise
    _show(header, load, 0, show)
    failed = sum(sum(level.failures.values()) for level in load.levels)
    if failed:
        asked = sum(len(level.asked) for level in load.levels)
        raise SpecctlError(f"{failed} of {asked} requests failed")


def _show(header: "LoadHeader", load: "ServerLoad", missing: int, show: ShowOptions) -> None:

    from specctl.benchmark.server_load import load_json, load_tables

    levels = [level for level in load.levels if level.asked]
    show.outcome(load_json(header, levels, missing), load_tables(header, levels, missing) if levels else ())
