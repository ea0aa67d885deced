"""The peers of `bench --peer`, their ways to draft, and the start of their processes."""

import json
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from specctl.errors import UsageError
from specctl.outputs import write_whole
from specctl.profile.wording import did_you_mean

# Set explicitly: transformers' defaults are 20 tokens, constant, threshold 0.4 (its confidence setting).
ASSISTED: dict[str, dict[str, Any]] = {
    "hf-constant": {
        "num_assistant_tokens": 5,
        "num_assistant_tokens_schedule": "constant",
        "assistant_confidence_threshold": 0.0,
    },
    "hf-heuristic": {
        "num_assistant_tokens": 5,
        "num_assistant_tokens_schedule": "heuristic",
        "assistant_confidence_threshold": 0.0,
    },
    "hf-confidence": {
        "num_assistant_tokens": 20,
        "num_assistant_tokens_schedule": "constant",
        "assistant_confidence_threshold": 0.4,
    },
}
MOVING = frozenset(name for name, values in ASSISTED.items() if values["assistant_confidence_threshold"])
"""Settings whose threshold transformers adapts after each round, if it can import scikit-learn."""
NO_DRAFT = "none"
DEFAULT_WAY = "constant"


@dataclass(frozen=True, slots=True)
class Way:
    """A way to draft, with one value."""

    key: str  # ``tokens`` of a draft, or the ``threshold`` of a probability
    # least, most: bounds of the value
    least: float
    most: float
    default: float  # default

    def value(self, text: str | None) -> float:
        """The value in a text; raises ValueError for an invalid one."""
        if text is None:
            return self.default
        value = float(text) if self.key == "threshold" else int(text)
        if not self.least <= value <= self.most:
            raise ValueError(text)
        return value


@dataclass(frozen=True, slots=True)
class PeerEngine:
    """An engine that is measured in a process of its own."""

    module: str | None  # the module it needs in Python; None for an engine that is a program
    package: str  # the distribution of the module; for a program, its file name
    ways: Mapping[str, Way]  # its ways to draft, by name
    batches: bool = False  # whether its worker can run several prompts at once, without a draft


_TOKENS = Way("tokens", 1, 64, 5)
_THRESHOLD = Way("threshold", 0, 1, 0.4)
ENGINES = {
    "onnxruntime-genai": PeerEngine(
        "onnxruntime_genai",
        "onnxruntime-genai",
        {"constant": Way("tokens", 1, 16, 5), "adaptive": Way("tokens", 1, 16, 2)},
        batches=True,
    ),
    "openvino": PeerEngine(
        "openvino_genai", "openvino-genai", {"constant": _TOKENS, "confidence": _THRESHOLD}, batches=True
    ),
    "llama.cpp": PeerEngine(None, "llama-server", {"constant": _TOKENS, "confidence": _THRESHOLD}),
}


@dataclass(frozen=True, slots=True)
class PeerSetting:
    """A peer with its setting."""

    label: str  # its name in tables
    peer: str  # a key of `ASSISTED` or `ENGINES`
    # transformers' arguments; or ``draft``, the name of the way to draft, with its value
    values: Mapping[str, Any] = field(default_factory=dict)

    @property
    def engine(self) -> PeerEngine | None:
        """None for transformers, which runs on specctl's own models."""
        return ENGINES.get(self.peer)

    @property
    def drafts(self) -> bool:
        return self.values.get("draft") != NO_DRAFT

    @property
    def batches(self) -> bool:
        """Whether it runs several prompts at once where others do."""
        return self.engine is not None and self.engine.batches and not self.drafts


def parse_peer(text: str) -> PeerSetting:
    """The setting that ``PEER``, ``PEER:WAY`` or ``PEER:WAY:VALUE`` names, such as ``openvino:confidence:0.5``.

    Raises:
        UsageError: the peer or its setting is unknown.
    """
    peer, _, setting = text.partition(":")
    if peer in ASSISTED:
        if setting:
            raise UsageError(f"{peer} has no settings to choose", f"write --peer {peer}")
        return PeerSetting(peer, peer, ASSISTED[peer])
    if peer not in ENGINES:
        raise UsageError(f"there is no peer '{peer}'{did_you_mean(peer, [*ASSISTED, *ENGINES])}")
    ways = ENGINES[peer].ways
    name, _, value = setting.partition(":")
    name = name or DEFAULT_WAY
    if name == NO_DRAFT and not value:
        return PeerSetting(f"{peer}:{NO_DRAFT}", peer, {"draft": NO_DRAFT})
    if name not in ways:
        raise UsageError(f"{peer} cannot draft by '{name}'{did_you_mean(name, [NO_DRAFT, *ways])}")
    way = ways[name]
    try:
        chosen = way.value(value or None)
    except ValueError:
        raise UsageError(
            f"'{value}' is not a valid {way.key} value of {peer}:{name}",
            f"it is between {way.least:g} and {way.most:g}, by default {way.default:g}",
        ) from None
    return PeerSetting(f"{peer}:{name}:{chosen:g}", peer, {"draft": name, way.key: chosen})


MANIFEST = "specctl-peer.json"


@dataclass(frozen=True, slots=True)
class Converted:
    """The manifest of a folder with a pair's models in the format of a peer."""

    peer: str  # the engine that the models are for
    # target, draft: the models that were converted; None where there is no draft
    target: str
    draft: str | None
    # weights, cache: how the engine holds weights, and keys and values, such as ``float32``
    weights: str
    cache: str
    exporter: str  # the converter


def write_manifest(folder: Path, converted: Converted) -> None:
    """Write the manifest of a folder.

    Raises:
        OutputError: the folder cannot be written.
    """
    write_whole(folder / MANIFEST, json.dumps(asdict(converted), indent=2) + "\n")


def read_manifest(folder: Path, peer: str) -> Converted:
    """The manifest of a folder for a peer.

    Raises:
        UsageError: the folder holds no models for this peer.
    """
    hint = f"python -m specctl.peers.convert {peer} --target MODEL --draft MODEL {folder} writes one"
    try:
        found = TypeAdapter(Converted).validate_json((folder / MANIFEST).read_bytes())
    except (OSError, ValidationError):
        raise UsageError(f"{folder} holds no converted models: it has no readable {MANIFEST}", hint) from None
    if found.peer != peer:
        raise UsageError(f"{folder} holds models for {found.peer}, not for {peer}", hint)
    return found


WORKER = Path(__file__).with_name("programs") / "worker.py"
"""Run by path with a peer's own Python; it imports only the standard library and the peer's package."""


@dataclass(frozen=True, slots=True)
class Launch:
    """The start of a peer in a process of its own."""

    setting: PeerSetting  # how it drafts
    command: tuple[str, ...]  # the process
    folder: Path  # its models
    converted: Converted  # the contents of its folder


def paths_by_peer(flag: str, texts: Iterable[str], settings: Sequence[PeerSetting]) -> dict[str, Path]:
    """The paths of a repeatable flag ``PEER=PATH``.

    Raises:
        UsageError: a text has another form, or its peer does not run in a process or is not measured.
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
    """How to start each peer that has a process of its own, by label.

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
