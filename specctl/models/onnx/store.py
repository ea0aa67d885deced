"""Exported graphs in a folder of the user's, by what they were made from."""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import sleep
from typing import TYPE_CHECKING
from zlib import crc32

from specctl.outputs.locks import locked

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FORMAT = 1
"""Of the graphs; graphs of another format are not read."""
GRAPH = "model.onnx"
MANIFEST = "manifest.json"
CHUNK = 1 << 24


def cache_folder() -> Path:
    """Where exported graphs are kept: ``specctl/onnx`` in ``$XDG_CACHE_HOME``, by default ``~/.cache``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "specctl" / "onnx"


def key_of(model: "PreTrainedModel", quantize: str | None, *, trees: bool = False) -> str:
    """A name for a model's graph, which another weight, configuration, dtype or quantisation changes.

    Args:
        model: whose graph it is.
        quantize: how its weights are rounded.
        trees: whether it reads trees.
    """
    import torch

    found = hashlib.sha256()
    told = model.config.to_dict()
    for name in ("_name_or_path", "transformers_version", "architectures"):
        told.pop(name, None)
    told["generated"] = [FORMAT, type(model).__name__, str(model.dtype), quantize, *(["trees"] if trees else [])]
    found.update(json.dumps(told, sort_keys=True, default=str).encode())
    for name, weight in model.state_dict().items():
        found.update(f"{name} {weight.dtype} {tuple(weight.shape)}".encode())
        found.update(weight.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return found.hexdigest()[:32]


class Store:
    """A folder with a folder for each graph, which appears whole or not at all.

    Args:
        folder: created when something is put into it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def find(self, key: str) -> Path | None:
        """A graph with its weights; None if there is none, or if it is damaged."""
        entry = self.folder / key
        try:
            manifest = json.loads((entry / MANIFEST).read_text(encoding="utf-8"))
            whole = (
                manifest["format"] == FORMAT
                and manifest["files"]
                and all(_checksum(entry / name) == known for name, known in manifest["files"].items())
            )
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return None
        return entry / GRAPH if whole else None

    def remove(self, key: str) -> None:
        """Forget a graph."""
        shutil.rmtree(self.folder / key, ignore_errors=True)

    def put(self, key: str, write: Callable[[Path], None]) -> Path:
        """Add a graph, in the place of a damaged one.

        Args:
            key: its name.
            write: writes it to a file, and its weights beside it; if it raises, nothing is added.

        Raises:
            OSError: the folder cannot be written to.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self.folder, prefix=f".{key}-") as folder:
            made = Path(folder) / key
            made.mkdir()
            write(made / GRAPH)
            files = {path.name: _checksum(path) for path in sorted(made.iterdir())}
            (made / MANIFEST).write_text(json.dumps({"format": FORMAT, "files": files}), encoding="utf-8")
            self.remove(key)
            made.rename(self.folder / key)
        return self.folder / key / GRAPH

    @contextmanager
    def alone(self, key: str, waiting: Callable[[], None]) -> Iterator[None]:
        """Let no other process make this graph meanwhile; ``waiting`` is called once if another one does.

        Raises:
            OSError: the folder cannot be written to.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / f".{key}.lock").open("ab") as file:
            if not locked(file.fileno()):
                waiting()
                while not locked(file.fileno()):
                    sleep(0.2)
            yield


def _checksum(path: Path) -> list[int]:
    """Size and CRC of a file."""
    size = sum_ = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            size, sum_ = size + len(chunk), crc32(chunk, sum_)
    return [size, sum_]
