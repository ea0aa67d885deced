"""Exported graphs in a folder of the user, named by a hash of their sources, and small files next to them."""

import atexit
import hashlib
import json
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from math import isfinite
from pathlib import Path
from time import sleep
from typing import TYPE_CHECKING, Any
from zlib import crc32

from specctl import __version__
from specctl.models.files.cache import CPUINFO, cache_home, features, processor, write_small
from specctl.models.files.tokenizer import Spelling
from specctl.models.passes.draft_vocabulary import DraftVocabulary
from specctl.models.passes.tree_sight import WINDOWS
from specctl.outputs import locked, remove_abandoned

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

SCHEMA_VERSION = 5  # Of the graphs; those of another version are made again
GRAPH = "model.onnx"
MANIFEST = "manifest.json"
CHUNK = 1 << 24
PACKED = "packed"  # How a graph's weights are rounded where they are in blocks in the model's file
MAKERS = ("specctl", "torch", "transformers", "tokenizers", "onnxscript", "onnx", "onnxruntime", "onnxruntime-gpu")
"""Packages that decide what a graph computes, and how its model's tokenizer spells."""
# Packages with classes that are not a model's own code.
NOT_OWN = ("builtins", "torch", "transformers", "typing", "abc")
TEMPORARY = "specctl-onnx-"


def cache_folder() -> Path:
    """The folder of exported graphs: ``specctl/onnx`` in ``$XDG_CACHE_HOME``, by default ``~/.cache``."""
    return cache_home() / "onnx"


def key_of(model: "PreTrainedModel", quantize: str | None, *, trees: bool = False, files: str | None = None) -> str:
    """The name of a model's graph: a hash of everything that it is made from and checked with.

    That includes the weights, the configuration, the dtype, the quantisation, a custom model's code, the versions of
    `MAKERS`, and the kind of processor, since kernels differ.

    Args:
        model: the model.
        quantize: how its weights are rounded.
        trees: whether the graph reads trees.
        files: a hash of the files that the model was loaded from; None without files. For a model that is
            `known_by_files` the hash replaces its weights and configuration, which then are not read.
    """
    from specctl.models.passes.trimmed_output import vocabulary_of

    kind, ids = next(model.parameters()).device.type, vocabulary_of(model)
    if files is not None and known_by_files(model):
        dtype = str(model.dtype).removeprefix("torch.")
        return key_of_files(files, kind, dtype, quantize, trees=trees, vocabulary=ids)
    described = model.config.to_dict()
    for name in ("_name_or_path", "transformers_version", "architectures"):
        described.pop(name, None)
    described["generated"] = [type(model).__name__, *_making(kind, str(model.dtype), quantize, trees=trees)]
    return _digest_of([model], described)


def key_of_head(head: "nn.Module", borrowed: "Sequence[nn.Module]") -> str:
    """The same for the graphs of a draft head.

    Args:
        head: the draft head.
        borrowed: the modules of its verifier that it uses.
    """
    modules = [head, *borrowed]
    configs: list[Any] = [getattr(part, "config", None) for module in modules for part in module.modules()]
    described = [config.to_dict() if hasattr(config, "to_dict") else repr(config) for config in configs]
    weight = next(head.parameters())
    return _digest_of(
        modules, [type(head).__name__, described, *_making(weight.device.type, str(weight.dtype), None, trees=False)]
    )


def _digest_of(modules: "Sequence[nn.Module]", described: object) -> str:
    """A hash of a description of modules, their own code, and their weights."""
    import torch

    found = hashlib.sha256()
    for path in {path: None for module in modules for path in _own_code(module)}:
        found.update(path.read_bytes())
    found.update(json.dumps(described, sort_keys=True, default=str).encode())
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
    """`key_of` for a model that is known by its files and not loaded.

    Args:
        files: a hash of them.
        kind: of the device, such as ``cpu``.
        dtype: the dtype that the weights are loaded in, such as ``float32``.
        quantize, trees: see `key_of`.
        vocabulary: the ids of its logits' columns; None where columns are ids.
    """
    ids = [] if vocabulary is None else [vocabulary.digest]
    described = json.dumps([files, *_making(kind, dtype, quantize, trees=trees), *ids], sort_keys=True)
    return hashlib.sha256(described.encode()).hexdigest()[:32]


def known_by_files(model: "PreTrainedModel") -> bool:
    """Whether a model's files and the versions of `MAKERS` determine its results: it has no code of its own."""
    return not _own_code(model)


def _making(kind: str, dtype: str, quantize: str | None, *, trees: bool) -> list[object]:
    """The form of a graph, and the versions of the packages that make it."""
    return [SCHEMA_VERSION, dtype, quantize, trees, {name: version_of(name) for name in MAKERS}, kind, *processor()]


INTEGER_PRODUCTS = (
    ("x86_64", frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni"}), "AVX-512 VNNI"),
    ("x86_64", frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl"}), "AVX-512"),
    ("x86_64", frozenset({"avx2", "fma", "avx_vnni"}), "AVX-VNNI"),
    ("x86_64", frozenset({"avx2", "fma"}), "AVX2"),
    ("aarch64", frozenset({"asimddp", "i8mm"}), "NEON dot products and, with 8 bits, matrix products (i8mm)"),
    ("aarch64", frozenset({"asimddp"}), "NEON dot products"),
)
"""The instructions of onnxruntime's integer products with rounded weights, the first whose features a processor has.

onnxruntime uses neither AMX nor bfloat16 for them. Source: onnxruntime/core/mlas/lib/platform.cpp.
"""


def integer_products(path: Path = CPUINFO, machine: str | None = None) -> str | None:
    """The instructions that onnxruntime multiplies rounded weights with here; None if the processor is not known.

    Empty if it has none for integers: then activations are not rounded, and passes are slow.

    Args:
        path: see `processor`.
        machine: as `platform.machine` names it; None for this one.
    """
    able, machine = features(path), machine or platform.machine()
    if able is None or machine not in {kind for kind, _, _ in INTEGER_PRODUCTS}:
        return None
    return next((name for kind, needs, name in INTEGER_PRODUCTS if kind == machine and needs <= {*able}), "")


@cache
def version_of(package: str) -> str | None:
    """A package's version; None where it is not installed. Reading it takes half a millisecond."""
    if package == "specctl":  # a distribution of that name is another program
        return __version__
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _own_code(model: "nn.Module") -> list[Path]:
    """The files with a model's classes outside transformers and torch; for remote code, all files in its folder."""
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


class Unable(Exception):  # noqa: N818 - it is a finding
    """Why onnxruntime cannot run a model, as the end of a sentence.

    Args:
        why: the reason.
        lasting: whether a retry would fail the same way, even with more free memory.
    """

    def __init__(self, why: str, *, lasting: bool = True) -> None:
        super().__init__(why)
        self.lasting = lasting


def first_line(error: BaseException) -> str:
    """The first line of an error's message, cut to 200 characters; the error's type if the message is empty."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)[:200]


class Store:
    """A folder with a folder for each graph, which appears whole or not at all.

    Args:
        folder: created when the first graph is added.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def find(self, key: str) -> Path | None:
        """A graph with its weights; None if it is missing or damaged."""
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
        """The file of the `GraphFacts` next to a graph."""
        return self.folder / f"{key}.model.json"

    def times(self, key: str) -> Path:
        """The file of the `Times` next to a graph."""
        return self.folder / f"{key}.times.json"

    def refusal(self, key: str) -> str | None:
        """Why an earlier attempt found this graph unusable; None without such a finding."""
        try:
            return self._refusal(key).read_text(encoding="utf-8")[:1000] or None
        except (OSError, ValueError):
            return None

    def refuse(self, key: str, why: str) -> None:
        """Store why this graph is unusable, so that no run makes it in vain again."""
        write_small(self._refusal(key), why)

    def _refusal(self, key: str) -> Path:
        return self.folder / f"{key}.refused.txt"

    def remove(self, key: str) -> None:
        """Remove a graph."""
        shutil.rmtree(self.folder / key, ignore_errors=True)

    def put(self, key: str, write: Callable[[Path], None]) -> Path:
        """Add a graph, replacing a damaged one.

        Args:
            key: its name.
            write: writes it to a file, and its weights next to it; if it raises, nothing is added.

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
        """Keep other processes from making this graph meanwhile; ``waiting`` is called once if one is already making
        it.

        Also removes the folders that killed processes left.

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


def temporary_store() -> Store:
    """A store in a temporary folder that this process removes when it ends. Also removes those that killed processes
    left.

    Raises:
        OSError: there is no room for it.
    """
    for left in Path(tempfile.gettempdir()).glob(f"{TEMPORARY}*"):
        remove_abandoned(left, left / ".lock")
    folder = Path(tempfile.mkdtemp(prefix=TEMPORARY))
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


FACTS_VERSION = 3
# Why a graph cannot read trees although its model could have one that does.
CHAINS = "its onnx graph was made for chains"
HEAD_CHAINS = "the onnx graph of a draft head reads no trees"  # Why no graph of a draft head reads trees


@dataclass(frozen=True, slots=True)
class GraphFacts:
    """Facts about a model with a stored graph, so that the model itself need not be loaded."""

    rows: int  # width of its logits
    context: int  # the most tokens of a sequence
    eos: tuple[int, ...]  # the end-of-sequence ids of its generation settings, sorted
    # of its generation settings; None where these have other token rules, or settings that specctl cannot honour
    repetition_penalty: float | None
    everything: bool  # whether every layer sees the whole sequence
    checked: bool  # whether rollbacks are checked against a fresh read by default
    parameters: int  # how many weights it has
    weight_bytes: int  # size of its weights in torch, in bytes
    spelling: Spelling | None  # of its tokenizer; None where only transformers can spell

    @classmethod
    def read(cls, path: Path) -> "GraphFacts | None":
        """The facts in a file; None if it does not exist, has another version, or is damaged."""
        try:
            first, _, second = path.read_text(encoding="utf-8").partition("\n")
            if json.loads(first) != _heading(second):
                return None
            found: dict[str, Any] = json.loads(second)
            spelling = None if found["spelling"] is None else Spelling.from_json(found["spelling"])
            return cls(**{**found, "eos": tuple(found["eos"]), "spelling": spelling})
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return None

    def write(self, path: Path) -> None:
        """Write a line with a checksum and a line with the facts; see `write_small`."""
        facts = json.dumps(asdict(self))
        write_small(path, f"{json.dumps(_heading(facts))}\n{facts}")


def _heading(facts: str) -> dict[str, int]:
    return {"schema_version": FACTS_VERSION, "sum": crc32(facts.encode())}


def no_tree_graph(everything: bool, kind: str, quantize: str | None) -> str | None:
    """Why a model's graph cannot read trees, as the end of a sentence; None if it can.

    A quantised graph rounds the inputs of its products to 8 bits, and a tree's branch has other cache slots than a
    chain. On the embedded target, a branch's logits differed from the chain's by 0.03 of their spread; in a graph
    without quantisation they differed by 4e-6.

    Args:
        everything: whether every layer sees the whole sequence.
        kind: of its device, such as ``cpu``.
        quantize: how the graph's weights are rounded.
    """
    if quantize is not None:
        return f"onnxruntime computes something else for the branches of a tree where weights are {quantize}"
    if not everything:
        return WINDOWS
    if kind != "cpu":
        return "specctl lets onnxruntime read trees on a CPU only"
    return None


PACKAGES = ("onnxruntime", "onnx", "onnxscript")
MAKING = 1.5
"""Bytes of memory that making and checking a graph takes at its peak, next to the weights, for each byte of them.
Measured with weights in float32 files, which can be dropped from memory meanwhile: 0.7 for 135 million, 0.5 for Gemma 3
270M. Weights that were converted as they were loaded cannot be dropped."""
EAGER, ONNX = "eager", "onnx"


def packages_there() -> bool:
    """Whether all packages for making and running graphs are installed."""
    return all(find_spec(package) is not None for package in PACKAGES)


class Times:
    """A file with times of small rounds in torch and in onnxruntime, by machine and number of threads.

    An unreadable file counts as empty. If it cannot be written, nothing is stored.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def _all(self) -> dict[str, dict[str, float]]:
        try:
            found = json.loads(self._path.read_text(encoding="utf-8"))
            return {str(place): {str(k): float(v) for k, v in times.items()} for place, times in found.items()}
        except (OSError, ValueError, TypeError, AttributeError, RecursionError):
            return {}

    def here(self, threads: int) -> dict[str, float] | None:
        """Milliseconds by engine on this machine with this number of threads; None if not measured."""
        found = self._all().get(_machine(threads))
        if found is None or (found and {EAGER, ONNX} - found.keys()) or not all(map(isfinite, found.values())):
            return None
        return found

    def onnx_is_faster(self, threads: int | None) -> bool:
        """Whether onnxruntime was measured to be faster on this machine.

        Args:
            threads: torch's number of threads; None for all measured numbers, if there are any.
        """
        most = os.cpu_count() or 1
        found = [one for n in ([threads] if threads else range(1, most + 1)) if (one := self.here(n)) is not None]
        return bool(found) and all(one and one[ONNX] < one[EAGER] for one in found)

    def note(self, times: dict[str, float], threads: int) -> None:
        """Store the times on this machine with this number of threads; empty if onnxruntime cannot run the model."""
        write_small(self._path, json.dumps(self._all() | {_machine(threads): times}))


def _machine(threads: int) -> str:
    return f"{platform.node()}, {threads} threads"
