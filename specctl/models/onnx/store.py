"""Exported graphs in a folder of the user's, by what they were made from."""

import atexit
import hashlib
import json
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from time import sleep
from typing import TYPE_CHECKING, Any
from zlib import crc32

from specctl import __version__
from specctl.models.passes.draft_vocabulary import DraftVocabulary
from specctl.outputs.locks import locked, remove_abandoned

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

SCHEMA_VERSION = 3
"""Of the graphs; graphs of another version are made anew."""
GRAPH = "model.onnx"
MANIFEST = "manifest.json"
CHUNK = 1 << 24
MAKERS = ("specctl", "torch", "transformers", "tokenizers", "onnxscript", "onnx", "onnxruntime", "onnxruntime-gpu")
"""Packages that decide what a graph computes, and how its model's tokenizer spells."""
NOT_OWN = ("builtins", "torch", "transformers", "typing", "abc")
"""Packages whose classes are no code of a model's own."""
PASSING = "specctl-onnx-"


def cache_folder() -> Path:
    """Where exported graphs are kept: ``specctl/onnx`` in ``$XDG_CACHE_HOME``, by default ``~/.cache``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "specctl" / "onnx"


def key_of(model: "PreTrainedModel", quantize: str | None, *, trees: bool = False, files: str | None = None) -> str:
    """A name for a model's graph, by all that it was made and checked with.

    That is the weights, the configuration, the dtype and the quantisation, a custom model's code, the versions of
    `MAKERS`, and the kind of processor, for kernels differ.

    Args:
        model: whose graph it is.
        quantize: how its weights are rounded.
        trees: whether it reads trees.
        files: a hash of the files that it was loaded from; None for a model that came from elsewhere. Where it is
            `known_by_files` this stands for its weights and configuration, which are not read then.
    """
    from specctl.models.passes.trimmed_output import vocabulary_of

    kind, ids = next(model.parameters()).device.type, vocabulary_of(model)
    if files is not None and known_by_files(model):
        dtype = str(model.dtype).removeprefix("torch.")
        return key_of_files(files, kind, dtype, quantize, trees=trees, vocabulary=ids)
    told = model.config.to_dict()
    for name in ("_name_or_path", "transformers_version", "architectures"):
        told.pop(name, None)
    told["generated"] = [type(model).__name__, *_made(kind, str(model.dtype), quantize, trees=trees)]
    return _key([model], told)


def key_of_head(head: "nn.Module", borrowed: "Sequence[nn.Module]") -> str:
    """The same for the graphs of a draft head.

    Args:
        head: whose graphs they are.
        borrowed: modules of its verifier that it computes with.
    """
    modules = [head, *borrowed]
    configs: list[Any] = [getattr(part, "config", None) for module in modules for part in module.modules()]
    told = [config.to_dict() if hasattr(config, "to_dict") else repr(config) for config in configs]
    weight = next(head.parameters())
    return _key(modules, [type(head).__name__, told, *_made(weight.device.type, str(weight.dtype), None, trees=False)])


def _key(modules: "Sequence[nn.Module]", told: object) -> str:
    """A name for what modules compute: what is told of them, their own code, and their weights."""
    import torch

    found = hashlib.sha256()
    for path in {path: None for module in modules for path in _own_code(module)}:
        found.update(path.read_bytes())
    found.update(json.dumps(told, sort_keys=True, default=str).encode())
    for module in modules:
        for name, weight in (*module.named_parameters(), *module.named_buffers()):
            found.update(f"{name} {weight.dtype} {tuple(weight.shape)}".encode())
            found.update(weight.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()[:32]


def key_of_files(
    files: str,
    kind: str,
    dtype: str,
    quantize: str | None,
    *,
    trees: bool = False,
    vocabulary: DraftVocabulary | None = None,
) -> str:
    """`key_of` a model that is known by its files, and has not been loaded.

    Args:
        files: a hash of them.
        kind: of the device, such as ``cpu``.
        dtype: that the weights are loaded in, such as ``float32``.
        quantize, trees: as in `key_of`.
        vocabulary: the ids of its logits' columns; None where a column is an id.
    """
    ids = [] if vocabulary is None else [vocabulary.digest]
    told = json.dumps([files, *_made(kind, dtype, quantize, trees=trees), *ids], sort_keys=True)
    return hashlib.sha256(told.encode()).hexdigest()[:32]


def known_by_files(model: "PreTrainedModel") -> bool:
    """Whether a model's files and the versions of `MAKERS` say what it computes: it has no code of its own."""
    return not _own_code(model)


def _made(kind: str, dtype: str, quantize: str | None, *, trees: bool) -> list[object]:
    """What a graph is made as, and what makes it."""
    return [SCHEMA_VERSION, dtype, quantize, trees, {name: version_of(name) for name in MAKERS}, kind, *processor()]


def processor(told: Path = Path("/proc/cpuinfo")) -> list[str]:
    """The kind of this machine's processor and what it can do.

    Args:
        told: the system's own account of it; where there is none, its name has to do.
    """
    try:
        lines = told.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    # Features of x86 and of ARM; all cores' are taken for the first one's.
    able = next((line.partition(":")[2] for line in lines if line.lower().startswith(("flags", "features"))), None)
    return [platform.machine(), platform.processor() if able is None else " ".join(sorted(able.split()))]


@cache
def version_of(package: str) -> str | None:
    """A package's version, whose reading takes half a millisecond; None where it is not installed."""
    if package == "specctl":  # a distribution of that name is another program
        return __version__
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _own_code(model: "nn.Module") -> list[Path]:
    """The files of a model's classes that are neither transformers' nor torch's; of remote code, all in its folder."""
    from specctl.models.passes.trimmed_output import TrimmedOutput

    names = {part.__module__ for module in model.modules() for part in type(module).__mro__}
    own = {name for name in names if name.partition(".")[0] not in NOT_OWN and name != TrimmedOutput.__module__}
    files = {Path(file) for name in own if (file := getattr(sys.modules.get(name), "__file__", None))}
    files |= {
        beside
        for name in own
        if name.startswith("transformers_modules.")
        for beside in Path(str(sys.modules[name].__file__)).parent.glob("*.py")
    }
    return sorted(path for path in files if path.is_file())


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
                manifest["schema_version"] == SCHEMA_VERSION
                and GRAPH in manifest["files"]
                and all(Path(name).name == name for name in manifest["files"])
                and all(_checksum(entry / name) == known for name, known in manifest["files"].items())
            )
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return None
        return entry / GRAPH if whole else None

    def facts(self, key: str) -> Path:
        """The file beside a graph in which `Kept` is told of its model."""
        return self.folder / f"{key}.model.json"

    def times(self, key: str) -> Path:
        """The file beside a graph in which `Times` are told."""
        return self.folder / f"{key}.times.json"

    def refusal(self, key: str) -> str | None:
        """Why no graph of this name can be used, as an earlier attempt has found; None if none has."""
        try:
            return self._refusal(key).read_text(encoding="utf-8")[:1000] or None
        except (OSError, ValueError):
            return None

    def refuse(self, key: str, why: str) -> None:
        """Keep why no graph of this name can be used, so that none is made in vain again; where it cannot be kept, one
        is."""
        with suppress(OSError):
            self._refusal(key).write_text(why, encoding="utf-8")

    def _refusal(self, key: str) -> Path:
        return self.folder / f"{key}.refused.txt"

    def packed(self, key: str, rows: int | str | None) -> Path:
        """The file beside a graph in which that is which was made of it, as `kept_packed` names them."""
        return self.folder / f"{key}.packed-{'steps' if rows is None else rows}.onnx"

    def remove(self, key: str) -> None:
        """Forget a graph, and those that were made of it."""
        shutil.rmtree(self.folder / key, ignore_errors=True)
        for made in (*self.folder.glob(f"{key}.packed-*.onnx"), *self.folder.glob(f".{key}.packed-*.onnx-*")):
            with suppress(OSError):
                made.unlink(missing_ok=True)

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
            (made / MANIFEST).write_text(
                json.dumps({"schema_version": SCHEMA_VERSION, "files": files}), encoding="utf-8"
            )
            self.remove(key)
            made.rename(self.folder / key)
        return self.folder / key / GRAPH

    @contextmanager
    def alone(self, key: str, waiting: Callable[[], None]) -> Iterator[None]:
        """Let no other process make this graph meanwhile; ``waiting`` is called once if another one does.

        What processes left behind that were killed while they made one is removed.

        Raises:
            OSError: the folder cannot be written to.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        for left in self.folder.glob(".*-*"):
            remove_abandoned(left, self._lock(left.name[1:].rpartition("-")[0]))
        with self._lock(key).open("ab") as file:
            if not locked(file.fileno()):
                waiting()
                while not locked(file.fileno()):
                    sleep(0.2)
            yield

    def _lock(self, key: str) -> Path:
        return self.folder / f".{key}.lock"


def passing_store() -> Store:
    """A store in a temporary folder that this process removes at its end; those of killed ones are removed now.

    Raises:
        OSError: there is no room for it.
    """
    for left in Path(tempfile.gettempdir()).glob(f"{PASSING}*"):
        remove_abandoned(left, left / ".lock")
    folder = Path(tempfile.mkdtemp(prefix=PASSING))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    file = (folder / ".lock").open("ab")
    locked(file.fileno())
    atexit.register(file.close)
    return Store(folder)


def _checksum(path: Path) -> list[int]:
    """Size and CRC of a file."""
    size = sum_ = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            size, sum_ = size + len(chunk), crc32(chunk, sum_)
    return [size, sum_]
