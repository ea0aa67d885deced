"""A folder with a pair's models in the format of another engine, as `specctl.peers.convert` writes it."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from specctl.errors import UsageError
from specctl.outputs import write_whole

MANIFEST = "specctl-peer.json"


@dataclass(frozen=True, slots=True)
class Converted:
    """What the folder of converted models says of itself.

    Attributes:
        peer: the engine that the models are for.
        target, draft: the models that were converted; None where there is no draft.
        weights, cache: how the engine holds weights, and keys and values, such as ``float32``.
        exporter: what converted them.
    """

    peer: str
    target: str
    draft: str | None
    weights: str
    cache: str
    exporter: str


def write_manifest(folder: Path, converted: Converted) -> None:
    """Say in a folder what is in it.

    Raises:
        OutputError: the folder cannot be written.
    """
    write_whole(folder / MANIFEST, json.dumps(asdict(converted), indent=2) + "\n")


def read_manifest(folder: Path, peer: str) -> Converted:
    """What a folder holds for a peer.

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
