"""``specctl profiles``: list, show, check, find and write profiles."""

import json
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from specctl.commands.flags import (
    ForceOption,
    JsonOption,
    PairOptions,
    RunOptions,
    SetOption,
    TemplateOption,
    complete_policy,
    complete_profile,
)
from specctl.commands.requests import But, CommandWithHelp, GroupWithHelp, HelpAll, grouped, option
from specctl.errors import AbsentError, ModelError, ProfileError, SpecctlError, UsageError
from specctl.outputs import Outputs
from specctl.policies import Setting
from specctl.profile import ResolvedProfile, parse_policy, resolve
from specctl.profile.profile_file import available, chosen, display, find, is_path, user_directory
from specctl.profile.resolution import ENVIRONMENT_PREFIX, pair_policy
from specctl.profile.schema import EMBEDDED, LOOKUP
from specctl.profile.wording import short_name
from specctl.profile.writing import annotated
from specctl.terminal.output import print_message, write_json, write_out

if TYPE_CHECKING:
    from specctl.profile import Profile


app = typer.Typer(cls=GroupWithHelp, no_args_is_help=True)


@app.callback()
def profiles(help_all: HelpAll = False) -> None:
    """List, show, check and write profiles."""


T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRequest:
    """The flags of `specctl profiles new`; UsageError for conflicting ones."""

    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            show_default=False,
            help="Name for `--profile`; the file goes to your own profiles. Default: the models' names.",
        ),
    ] = None
    target: str | None = option("A folder or hub id.", "--target --model MODEL")
    drafts: list[str] | None = option(
        "A folder or hub id. A second one names a model that drafts for the first.", "--draft MODEL"
    )
    policy: str | None = option(
        "Stopping policy of every draft, optionally with settings: svip:threshold=0.4. Default: cost-optimal.",
        "NAME:KEY=VALUE,...",
        autocompletion=complete_policy,
    )
    set_: SetOption = None
    chat: TemplateOption = None
    output: Path | None = option("Write this file instead of one for NAME.", "-o --output FILE")
    force: ForceOption = False

    def __post_init__(self) -> None:
        if self.name is not None and self.output is not None:
            raise UsageError("use either NAME or --output, not both")
        if self.asks and not sys.stdin.isatty():
            raise UsageError(
                f"{'--target' if self.target is None else '--draft'} is missing", "name a folder or hub id"
            )
        _ = self.settings
        if self.output is not None:
            if not self.output.parent.is_dir():
                raise UsageError(f"cannot write {display(self.output)}: there is no such folder")
            _require_new(self.output, self.force)

    @property
    def asks(self) -> bool:
        """Whether to ask a person for missing values."""
        return self.target is None or not self.drafts

    @property
    def settings(self) -> dict[str, Any] | None:
        """The policy as in a profile; None for the default."""
        return None if self.policy is None else parse_policy(self.policy)


@app.command(cls=CommandWithHelp)
@grouped()
def new(request: NewRequest) -> None:
    """Write a profile, after checking that its models have one tokenizer and fit this machine.

    Lists missing checks of models that are not downloaded yet. In a terminal, asks for the models if --target or
    --draft is missing. An existing file is replaced only with --force.

    Example:

    [cyan]specctl profiles new --target ./big --draft ./small[/]
    """
    settings, asks, force = request.settings, request.asks, request.force
    path = request.output if request.name is None else _path_of(request.name, force)
    target = request.target or _ask("Target model, a folder, hub id or GGUF file")
    drafts = request.drafts or [_ask("Draft model, a folder, hub id or GGUF file")]
    if settings is None:
        default = Setting.of(pair_policy(drafts[0])).label
        text = _ask("Policy", default, lambda text: parse_policy(text, "policy")) if asks else default
        settings = parse_policy(text)
    own = _name_for(target, drafts[0])
    if path is None and not asks:
        path = _path_of(own, force)

    from specctl.profile.writing import checked, new_profile

    models = [_findable(model) for model in (target, *drafts)]
    values = request.set_ or ()
    profile = checked(new_profile(models[0], models[1:], settings, chat=None, values=values), "the new profile")
    _require_ready(profile)
    chat = request.chat
    if profile.prompt.chat is None:
        chat = _wants_template(profile, chat, asks)
    elif chat is not None and chat != profile.prompt.chat:
        flag = "--chat" if chat else "--raw"
        raise UsageError(f"{flag} and --set prompt.chat contradict each other", "leave one out")
    if path is None:
        path = _path_of(_ask("Name", own, lambda text: _path_of(text, force)), force)
    with Outputs(force=force) as outputs:
        for model in models:
            outputs.protect("model", model)
        if request.output is None:
            outputs.folder("profiles", path.parent, ())
        outputs.file("profile", path).replace(new_profile(models[0], models[1:], settings, chat=chat, values=values))
    _say_what_next(path, "bench -p {}" if LOOKUP in drafts else "calibrate -p {} -o fast.toml")


def _require_ready(profile: "Profile") -> None:
    """Print doctor's verdict; raises ModelError if the models cannot run together on this machine."""
    from rich.console import Console

    from specctl.commands.doctor import verdict
    from specctl.reporting.console import cell
    from specctl.terminal.progress import loading

    console = Console(stderr=True)
    with loading(console, "examining the models"):
        from specctl.doctor.diagnosis import diagnose

        report = diagnose(profile)
    absent = [problem.where for problem in report.problems if problem.absent]
    if absent and len(absent) == len(report.problems):
        models = {facts.key: facts.model for facts in report.models}
        names = ", ".join(dict.fromkeys(models.get(where, where) for where in absent))
        print_message(
            f"not checked, because files are not here: {names}. Whether these models exist, share a tokenizer and "
            "fit this machine is shown by specctl doctor once they can be read.",
            "note",
        )
        return
    for line, style in verdict(report):
        console.print(cell(line, style), soft_wrap=True)
    if not report.ready:
        raise ModelError("nothing was written", "`specctl doctor` with the same --target and --draft shows more")


def _wants_template(profile: "Profile", chat: bool | None, asks: bool) -> bool | None:
    """Whether prompts go through the chat template; None for the default rule if there is no tokenizer here."""
    from specctl.models.files.checkpoint import locate
    from specctl.models.loading.file_models import find_tokenizer

    if chat is False:
        return False
    try:
        target = locate(profile.target, "target")
        template = find_tokenizer(target, profile.target, profile.engine).chat_template
    except AbsentError:
        return chat
    if not template:
        if chat:
            raise UsageError("the target has no chat template", "leave --chat out")
        return False
    if chat or not asks:
        if chat is None:
            print_message(
                "Prompts go through the target's chat template; --raw makes a profile that sends them as they are."
            )
        return True
    return _answered(lambda: typer.confirm("Put prompts through the target's chat template?", default=True, err=True))


def _ask(question: str, default: str | None = None, check: Callable[[str], object] = lambda _: None) -> str:
    """Ask until the check accepts the answer; it raises SpecctlError otherwise."""
    while True:
        answer: str = _answered(lambda: typer.prompt(question, default=default, err=True)).strip()
        try:
            check(answer)
        except SpecctlError as error:
            print_message(error.message)
        else:
            return answer


def _answered(ask: Callable[[], T]) -> T:
    """Ask a question. At the end of input or after Ctrl-C, report that nothing was written."""
    try:
        return ask()
    except typer.Abort as stop:
        print_message("")
        if isinstance(stop.__context__, EOFError):
            raise UsageError("the input ended before the last question; nothing was written") from None
        print_message("nothing was written")
        raise KeyboardInterrupt from None


def _findable(model: str) -> str:
    """A folder or file as an absolute path, because a profile is used from any directory; another name unchanged."""
    path = Path(model).expanduser()
    return str(path.absolute()) if path.exists() else model


def _name_for(target: str, draft: str) -> str:
    names = f"{short_name(target.rstrip('/'))}-{short_name(draft.rstrip('/'))}"
    return re.sub(r"[^A-Za-z0-9._+-]+", "-", names).strip("-.") or "pair"


def _path_of(name: str, force: bool) -> Path:
    """The file for a profile of this name; raises SpecctlError if the name is taken or invalid."""
    if is_path(name) or not name.strip():
        raise UsageError(f"{name!r} is not a name for a profile", "name a file with --output FILE")
    path = user_directory() / f"{name}.toml"
    other = available().get(name)
    if other is not None and not (path.exists() and other.samefile(path)):
        raise UsageError(f"{display(other)} has the name {name} already", "choose another, or name a file with -o FILE")
    _require_new(path, force)
    return path


def _require_new(path: Path, force: bool) -> None:
    if path.exists() and not force:
        raise UsageError(f"{display(path)} exists already", "choose another name, or replace it with --force")


def _say_what_next(path: Path, then: str) -> None:
    import shlex

    own = path.parent == user_directory()
    shown = display(path)
    name = shlex.quote(path.stem if own else shown if is_path(shown) else f"./{shown}")
    print_message(f"wrote {shown}; try it with:")
    for command in (f'generate -p {name} "Once upon a time"', f"chat -p {name}", then.format(name)):
        print_message(f"  specctl {command}")


ProfileArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="NAME", show_default=False, autocompletion=complete_profile, help="Name or path of a profile."
    ),
]

ProfileArguments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="NAME...", show_default=False, autocompletion=complete_profile, help="Names or paths of profiles."
    ),
]

_COLUMNS = ("name", "target", "draft", "policy", "description", "path")
_LEAST = {"policy": 14, "target": 10, "draft": 10, "description": 40}
"""Columns of a terminal that a column needs at least, or is left out; the first gets first what is left, but for names,
which are always whole."""
_WIDEST = {"target": 26, "draft": 26}
_MODELS = ("target", "draft")


@app.command("list", cls=CommandWithHelp)
@grouped()
def list_(as_json: JsonOption = False) -> None:
    """List every profile that can be used by name."""
    rows = [_row(name, path) for name, path in available().items()]
    rows.sort(key=_is_demonstration)
    if as_json:
        _print_json(rows)
    elif sys.stdout is not None and sys.stdout.isatty():
        _print_table(rows)
    else:
        for row in rows:
            line = "\t".join(" ".join(str(row[column] or "").split()) for column in _COLUMNS)
            write_out(line.encode(errors="replace").decode())  # the name of a file need not be text


@app.command(cls=CommandWithHelp)
@grouped()
def show(
    *,
    name: ProfileArgument = None,
    models: Annotated[PairOptions, But(("profile",))],
    overrides: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show all values of a profile, with the origin of each."""
    # safe, because showing a profile runs nothing
    resolved = RunOptions(overrides, trust_remote_code=True).resolve(replace(models, profile=name))
    if as_json:
        _print_json(_document(resolved))
    else:
        write_out(annotated(resolved).rstrip("\n"))


@app.command(cls=CommandWithHelp)
@grouped()
def check(names: ProfileArguments = None) -> None:
    """Check the named profiles, or all of them. Exits with 2 if any is invalid."""
    wrong = []
    for name in names or available():
        try:
            resolve(name, environ=_bare_environment(), trust_remote_code=True)
        except ProfileError as error:
            wrong.append(error.full_message)
        else:
            path = display(find(name))
            write_out(f"{name}: ok" if path == name else f"{name}: ok ({path})")
    if wrong:
        raise ProfileError("\n".join(wrong))


@app.command(cls=CommandWithHelp)
@grouped()
def path(name: ProfileArgument = None) -> None:
    """Print the path of a profile's file."""
    write_out(str(chosen(name).absolute()))


def _bare_environment() -> dict[str, str]:
    """The environment without overrides of profile values, so that only the file is checked."""
    return {name: value for name, value in os.environ.items() if not name.startswith(ENVIRONMENT_PREFIX)}


def _row(name: str, path: Path) -> dict[str, str | None]:
    row: dict[str, str | None] = dict.fromkeys(_COLUMNS) | {"name": name, "path": str(path.absolute())}
    try:
        profile = resolve(str(path.absolute()), environ=_bare_environment(), trust_remote_code=True).profile
    except ProfileError as error:
        return row | {"description": f"not usable: {error}"}
    row |= {"target": profile.target.model, "description": profile.description}
    if profile.draft is not None:
        row |= {"draft": profile.draft.model, "policy": profile.draft.policy.name}
    return row


def _document(resolved: ResolvedProfile) -> dict[str, Any]:
    table = resolved.profile.model_dump()
    model, dumped = resolved.profile.draft, table["draft"]
    table["target"]["model"] = resolved.profile.target.checkpoint
    while model is not None:
        dumped["model"] = model.checkpoint
        model, dumped = model.draft, dumped["draft"]
    return {
        "name": resolved.name,
        "path": None if resolved.source is None else str(resolved.source.absolute()),
        "profile": table,
        "origins": resolved.origins,
    }


def _print_json(document: Any) -> None:
    write_json(json.dumps(document, indent=2, ensure_ascii=False, default=str))


def _is_demonstration(row: dict[str, str | None]) -> bool:
    return (row["target"] or "").startswith(EMBEDDED)


def _print_table(rows: list[dict[str, str | None]]) -> None:
    """One line for each profile, with as many columns as fit."""
    from rich.cells import cell_len, set_cell_size
    from rich.console import Console

    from specctl.reporting.console import cell

    console = Console()
    texts = [
        {**{column: row[column] or "-" for column in _COLUMNS}, **{key: short_name(row[key] or "-") for key in _MODELS}}
        for row in rows
    ]
    shown = [{column: cell(text).plain for column, text in row.items()} for row in texts]
    natural = {column: max((cell_len(row[column]) for row in shown), default=0) for column in _COLUMNS}
    room = console.width - natural["name"]
    taken: dict[str, int] = {}
    for column, least in _LEAST.items():
        width = min(least, natural[column])
        if width + 2 > room:
            break
        taken[column] = width
        room -= width + 2
    for column, least in taken.items():
        more = min(room, min(natural[column], _WIDEST.get(column, room + least)) - least)
        taken[column] += more
        room -= more
    widths = {"name": natural["name"], **{column: taken[column] for column in _COLUMNS if column in taken}}

    def line(row: dict[str, str]) -> str:
        cut = [_cut(row[column], width) if column != "name" else row[column] for column, width in widths.items()]
        return "  ".join(map(set_cell_size, cut, widths.values())).rstrip()

    console.print(cell(line({column: column for column in _COLUMNS}), "bold"), soft_wrap=True)
    told = False
    for row, text in zip(rows, shown, strict=True):
        if not told and (told := _is_demonstration(row)):
            console.print(cell("demonstration models, which ship with specctl:", "dim"))
        console.print(cell(line(text)), soft_wrap=True)


def _cut(text: str, width: int) -> str:
    from rich.cells import cell_len, set_cell_size

    return text if cell_len(text) <= width else f"{set_cell_size(text, width - 1)}…"
