"""Finding a checkpoint's files: an embedded model, a local folder, or a snapshot in the hub's cache."""

import json
import math
import shlex
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from specctl.errors import ModelError, pip_install
from specctl.models.files.adapter import Adapter
from specctl.models.files.hushing import hushed_hub
from specctl.models.files.loading_failures import ADAPTER, adapter, explained, pickle_only, similar_models
from specctl.nesting import too_deep
from specctl.profile.schema import ModelTable

if TYPE_CHECKING:
    import torch

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
GENERATION = "generation_config.json"
PROCESSOR_TEMPLATE = "chat_template.json"
SMALL_FILES = ["*.json", "*.model", "*.txt", "*.jinja", "*.py", "*.tiktoken", "*.bpe", "*.vocab", "README.md"]
TOKENIZER_FILES = (
    *("tokenizer_config.json", "tokenizer.json", "vocab.json", "tekken.json"),
    *("*.model", "vocab*.txt", "*.tiktoken", "*.bpe", "*.vocab"),
)
"""Patterns of which a tokenizer has a file. One of bytes, or with code of its own, may have a configuration alone."""


@dataclass(frozen=True, slots=True)
class WeightHeaders:
    """Contents of the weight files, from their headers.

    Attributes:
        counts: number of weights by stored dtype, with safetensors names such as ``BF16``.
        stored_bytes: size of all weights in bytes.
        shapes: of every tensor, by its name.
    """

    counts: dict[str, int]
    stored_bytes: int
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def bytes_without(self, *looked_up: str) -> int:
        """About the size of all weights but those of tensors whose names end so, of which a pass reads single rows."""
        sizes = {name: math.prod(shape) for name, shape in self.shapes.items()}
        left_out = sum(size for name, size in sizes.items() if name.endswith(looked_up))
        return round(self.stored_bytes * (1 - left_out / max(1, sum(sizes.values()))))


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The files of one model; the weights of a hub checkpoint may not be downloaded yet."""

    name: str
    role: str
    revision: str | None
    folder: Path
    source: Literal["embedded", "folder", "hub"]
    adapter: Adapter | None = None

    def __str__(self) -> str:
        return f"The {self.role} model {self.name!r}"

    def settings(self) -> dict[str, Any]:
        """The contents of config.json."""
        return self._json("config.json")

    def generation_settings(self) -> dict[str, Any] | None:
        """The contents of generation_config.json; None if there is no such file."""
        return self._json(GENERATION) if (self.folder / GENERATION).exists() else None

    def processor_template(self) -> str | None:
        """The chat template in chat_template.json; None if there is no such file, or no template in it."""
        if not (self.folder / PROCESSOR_TEMPLATE).exists():
            return None
        found = self._json(PROCESSOR_TEMPLATE).get("chat_template")
        return found if isinstance(found, str) else None

    def weight_files(self) -> list[Path]:
        """The model's safetensors files, whether they exist or not; without an index, a single file."""
        index = self._index()
        return [self.folder / SINGLE] if index is None else sorted(set(index.values()))

    def tensor_files(self) -> dict[str, Path]:
        """The file of every tensor, by its name; from the hub, only a header is read.

        Raises:
            ModelError: files are missing, damaged, or not safetensors.
        """
        index, path = self._index(), self.folder / SINGLE
        if index is not None:
            return index
        if path.exists():
            with self._opened(path) as file:
                return dict.fromkeys(file.keys(), path)
        return {name: self.folder / file for name, file in self._remote_headers().weight_map.items()}

    def read(self, names: Iterable[str]) -> dict[str, "torch.Tensor"]:
        """Some tensors, each from its file; other tensors are not read.

        Raises:
            ModelError: a file is missing or damaged, or does not hold a tensor that the index promises.
        """
        self.fetch_weights()
        files = self.tensor_files()
        found: dict[str, torch.Tensor] = {}
        for path, group in groupby(sorted(names, key=files.__getitem__), key=files.__getitem__):
            with self._opened(path, "pt") as file:
                found |= {name: file.get_tensor(name) for name in group}
        return found

    def has_weights(self) -> bool:
        return all(path.exists() for path in self.weight_files())

    def has_tokenizer(self) -> bool:
        """Whether there is a file of a tokenizer; whether it has a vocabulary is known once it is loaded."""
        return any(path.is_file() for pattern in TOKENIZER_FILES for path in self.folder.glob(pattern))

    def headers(self) -> WeightHeaders:
        """Read the headers of the weight files, from disk if they are there, else from the hub.

        Raises:
            ModelError: files are missing, damaged, or not safetensors.
        """
        if not self.has_weights():
            metadata = self._remote_headers()
            files = metadata.files_metadata.values()
            ends = [max((tensor.data_offsets[1] for tensor in file.tensors.values()), default=0) for file in files]
            told = {str(kind): count for kind, count in metadata.parameter_count.items()}
            each = {name: tuple(tensor.shape) for file in files for name, tensor in file.tensors.items()}
            return WeightHeaders(told, sum(ends), each)
        counts: Counter[str] = Counter()
        shapes: dict[str, tuple[int, ...]] = {}
        for path in self.weight_files():
            with self._opened(path) as file:
                for key in file.keys():  # noqa: SIM118 - not a mapping
                    tensor = file.get_slice(key)
                    shapes[key] = tuple(tensor.get_shape())
                    counts[tensor.get_dtype()] += math.prod(shapes[key])
        return WeightHeaders(dict(counts), sum(path.stat().st_size for path in self.weight_files()), shapes)

    def fetch_weights(self) -> None:
        """Download weights that are missing; on a terminal, the hub client shows its progress bars."""
        if self.has_weights():
            return
        if self.source != "hub":
            raise self._no_weights()
        import huggingface_hub

        with explained(self.role, self.name):
            huggingface_hub.snapshot_download(
                self.name, revision=self.revision, allow_patterns=[path.name for path in self.weight_files()]
            )
        if not self.has_weights():
            self._remote_headers()  # which says why where there is no network: a snapshot with other files is given out
            raise ModelError(*pickle_only(str(self), self.role, self.name))

    def _index(self) -> dict[str, Path] | None:
        """The file of every tensor according to the index; None for a single file."""
        if (self.folder / SINGLE).exists() or not (self.folder / INDEX).exists():
            return None
        names = self._json(INDEX).get("weight_map")
        if not isinstance(names, dict) or not names or not all(isinstance(name, str) for name in names.values()):
            raise self._bad_json(INDEX, "it has no weight_map of file names")
        return {name: self.folder / file for name, file in names.items()}

    def _remote_headers(self) -> Any:
        if self.source != "hub":
            raise self._no_weights()
        import huggingface_hub

        with explained(self.role, self.name), hushed_hub():
            return huggingface_hub.HfApi().get_safetensors_metadata(self.name, revision=self.revision)

    @contextmanager
    def _opened(self, path: Path, framework: Literal["np", "pt"] = "np") -> Iterator[Any]:
        """A weight file, of which torch (``pt``) reads tensors and numpy no more than the header; whatever goes wrong
        with it inside the block is a ModelError.
        """
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, framework=framework) as file:
                yield file
        except (SafetensorError, OSError) as error:
            raise self._damaged(path, str(error)) from error

    def _damaged(self, path: Path, reason: str) -> ModelError:
        with path.open("rb") as file:
            if file.read(40).startswith(b"version https://git-lfs"):
                return ModelError(
                    f"{self}: {path} is a git-lfs pointer, not the weights.", "Run `git lfs pull` in that folder."
                )
        return ModelError(
            f"{self}: {path} is damaged ({reason}).",
            "Copy or download it again; the last transfer may have been cut short.",
        )

    def _no_weights(self) -> ModelError:
        if missing := [path.name for path in self.weight_files() if not path.exists() and path.name != SINGLE]:
            return ModelError(
                f"{self}: {len(missing)} weight file(s) named by {INDEX} are missing, first {missing[0]}.",
                f"Copy or download them into {self.folder}.",
            )
        if any(self.folder.glob("*.bin")) or any(self.folder.glob("*.pt*")):
            return ModelError(*pickle_only(str(self), self.role, self.name))
        return ModelError(f"{self}: {self.folder} holds no weights.", f"The folder must contain {SINGLE} or {INDEX}.")

    def _json(self, name: str) -> dict[str, Any]:
        try:
            contents = json.loads((self.folder / name).read_text(encoding="utf-8"))
        except RecursionError as error:
            raise self._bad_json(name, "it is nested too deeply") from error
        except (OSError, ValueError) as error:
            raise self._bad_json(name, str(error)) from error
        if not isinstance(contents, dict):
            raise self._bad_json(name, "it is not an object")
        if too_deep(contents):
            raise self._bad_json(name, "it is nested too deeply")
        return contents

    def _bad_json(self, name: str, reason: str) -> ModelError:
        return ModelError(f"{self} has a damaged {name}: {reason}.", f"Copy or download {self.folder / name} again.")


def locate(table: ModelTable, role: str) -> Checkpoint:
    """Find a model's files; from the hub, only small files (configuration, tokenizer) are downloaded, and an adapter.

    Args:
        table: the model's profile table.
        role: the table's key in the profile, for messages: ``target``, ``draft``, ``draft.draft``.

    Raises:
        ModelError: there is no such model or adapter, or no access to it.
    """
    found = _located(table, role)
    return found if table.adapter is None else replace(found, adapter=Adapter.find(table.adapter, role))


def _located(table: ModelTable, role: str) -> Checkpoint:
    if table.model.startswith("embedded:"):
        _no_revision(table, role)
        return _with_config(Checkpoint(table.model, role, None, Path(table.checkpoint), "embedded"))
    folder = Path(table.model).expanduser()
    if folder.is_dir():
        _no_revision(table, role)
        return _with_config(Checkpoint(table.model, role, None, folder, "folder"))
    if folder.is_file():
        if _is_gguf(folder):
            raise _gguf(f"The {role} model {table.model!r} is a GGUF file", role, folder)
        raise ModelError(
            f"The {role} model {table.model!r} is a file.",
            "Give the folder that holds config.json, the tokenizer and the safetensors weights.",
        )
    if table.model.startswith(("/", "./", "../", "~")) or table.model.count("/") > 1:
        hint = f"{similar_models(table.model)}Paths are relative to the current directory, {Path.cwd()}."
        kind = "file" if folder.suffix.lower() == ".gguf" else "folder"
        raise ModelError(f"The {role} model {table.model!r}: there is no such {kind}.", hint)
    return _with_config(Checkpoint(table.model, role, table.revision, _snapshot(table, role), "hub"))


def _snapshot(table: ModelTable, role: str) -> Path:
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    with explained(role, table.model), hushed_hub():
        try:
            folder = huggingface_hub.snapshot_download(
                table.model, revision=table.revision, allow_patterns=SMALL_FILES, ignore_patterns=["*/*"]
            )
        except LocalEntryNotFoundError as error:
            # Set by newer hub clients only: the cache lacks some small file, which may not be needed.
            folder = getattr(error, "snapshot_path", "")
            if not folder:
                raise
    return Path(folder)


def _with_config(checkpoint: Checkpoint) -> Checkpoint:
    if (checkpoint.folder / "config.json").exists():
        return checkpoint
    if (checkpoint.folder / ADAPTER).exists():
        raise ModelError(*adapter(str(checkpoint), checkpoint.role, checkpoint.name, checkpoint.folder))
    if found := sorted(path for path in checkpoint.folder.iterdir() if path.is_file() and _is_gguf(path)):
        raise _gguf(f"{checkpoint} is a folder with a GGUF file", checkpoint.role, found[0])
    if checkpoint.source == "hub" and "gguf" in checkpoint.name.lower():
        raise _gguf(f"{checkpoint} is a repository of GGUF files", checkpoint.role, Path("FILE.gguf"))
    if checkpoint.source == "hub":
        hint = "If you are offline, download it on a machine with a network; else choose a transformers checkpoint."
    else:
        hint = "Give the folder that `save_pretrained` wrote."
    raise ModelError(f"{checkpoint}: there is no config.json in {checkpoint.folder}.", hint)


def _no_revision(table: ModelTable, role: str) -> None:
    if table.revision is not None:
        raise ModelError(
            f"[{role}] revision = {table.revision!r} has no effect: {table.model!r} is a folder, not a hub id.",
            "Remove revision, or give the hub id.",
        )


def _is_gguf(file: Path) -> bool:
    """Whether a file is GGUF by its name or by its first bytes."""
    if file.suffix.lower() == ".gguf":
        return True
    try:
        with file.open("rb") as opened:
            return opened.read(4) == b"GGUF"
    except OSError:
        return False


def _gguf(subject: str, role: str, file: Path) -> ModelError:
    """The error about a GGUF file, with the command that unpacks it for this installation."""
    folder = file.name.removesuffix(file.suffix)
    command = [sys.executable, "-m", "specctl.models.files.unpack_gguf", str(file), folder]
    return ModelError(
        f"{subject}, which specctl does not run as it is.",
        "Use the checkpoint that it was made from, with quantize if that is too large. Or unpack the file into float32 "
        f"weights of up to 8 times its size: `{pip_install('gguf')}`, then `{shlex.join(command)}`, and set "
        f"model = {folder!r} in [{role}].",
    )
