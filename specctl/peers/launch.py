"""How the process of a peer is started, from the flags of a command."""

import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from specctl.errors import UsageError
from specctl.peers.converted import Converted, read_manifest
from specctl.peers.names import ENGINES, PeerEngine, PeerSetting
from specctl.profile.wording import did_you_mean

WORKER = Path(__file__).with_name("programs") / "worker.py"
"""Run by path with a peer's own Python; it and what is beside it use the standard library and the peer's package."""


@dataclass(frozen=True, slots=True)
class Launch:
    """A peer that is to run in a process of its own.

    Attributes:
        setting: how it drafts.
        command: the process.
        folder: its models.
        converted: what they are.
    """

    setting: PeerSetting
    command: tuple[str, ...]
    folder: Path
    converted: Converted


def paths_by_peer(flag: str, texts: Iterable[str], settings: Sequence[PeerSetting]) -> dict[str, Path]:
    """The paths of a repeatable flag ``PEER=PATH``.

    Raises:
        UsageError: a text is not of that form, or names a peer that does not run in a process or is not measured.
    """
    found: dict[str, Path] = {}
    for text in texts:
        peer, equals, path = text.partition("=")
        if not equals or not path:
            raise UsageError(f"{flag} {text} is not PEER=PATH", f"e.g. {flag} openvino=PATH")
        if peer not in ENGINES:
            raise UsageError(f"{flag}: '{peer}' is not a peer with a process of its own{did_you_mean(peer, ENGINES)}")
        if all(setting.peer != peer for setting in settings):
            raise UsageError(f"{flag} {text} has no effect without --peer {peer}", "leave it out")
        found[peer] = Path(path)
    return found


def launches(
    settings: Iterable[PeerSetting], folders: Mapping[str, Path], programs: Mapping[str, Path]
) -> dict[str, Launch]:
    """How each peer that is no part of transformers is started, by label.

    Args:
        settings: the peers.
        folders: their models, by peer.
        programs: the Python that has a peer's package, or the peer's program, by peer.

    Raises:
        UsageError: a peer has no models, or none that fit, or is not installed.
    """
    found: dict[str, Launch] = {}
    for setting in settings:
        if setting.engine is None:
            continue
        folder = folders.get(setting.peer)
        if folder is None:
            raise UsageError(
                f"{setting.peer} reads models in a format of its own",
                f"convert them with python -m specctl.peers.convert {setting.peer}, then "
                f"--peer-models {setting.peer}=FOLDER",
            )
        converted = read_manifest(folder, setting.peer)
        if setting.drafts and converted.draft is None:
            raise UsageError(f"{folder} has no draft model, and {setting.label} needs one")
        command = _command(setting.peer, setting.engine, programs.get(setting.peer))
        found[setting.label] = Launch(setting, command, folder.absolute(), converted)
    return found


def _command(peer: str, engine: PeerEngine, program: Path | None) -> tuple[str, ...]:
    if program is not None:
        # Not resolved: the Python of a virtual environment is a link, and knows by its own path where it belongs.
        if shutil.which(program.absolute()) is None:
            raise UsageError(f"--peer-program {peer}={program}: there is no such program")
        chosen = str(program.absolute())
    elif engine.module is None:
        chosen = shutil.which(engine.package) or ""
        if not chosen:
            raise UsageError(
                f"{peer} needs its program {engine.package}, and none is on the PATH",
                f"install or build {peer}, then --peer-program {peer}=PATH/{engine.package}",
            )
    elif find_spec(engine.module) is not None:
        chosen = sys.executable
    else:
        raise UsageError(
            f"{peer} needs the package {engine.package}, which this Python does not have",
            f"python -m venv {peer}-env && {peer}-env/bin/pip install {engine.package}, then "
            f"--peer-program {peer}={peer}-env/bin/python",
        )
    if engine.module is None:
        return sys.executable, str(WORKER), peer, chosen
    return chosen, str(WORKER), peer
