"""A checkpoint's files and its LoRA adapter's: location, contents and licence."""

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from specctl.errors import ModelError, pip_install, too_deep
from specctl.models.files.gguf import small_files
from specctl.models.files.gguf_header import parts_of, read_header
from specctl.models.files.gguf_names import HubFiles, find
from specctl.models.files.library_calls import ADAPTER, adapter, explained, hushed_hub, pickle_only, similar_models
from specctl.profile.schema import ModelTable

if TYPE_CHECKING:
    import torch
    from torch import nn

WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."  # The prefix of the base model's module names in the names of an adapter's tensors
TUNED = re.compile(r"^(.+?)(?:\.base_layer)*\.lora_")
"""Suffix of an update's tensor after the name of the changed module; several updates to one module are nested."""
DOWN_UP = ((".lora_A.weight", ".lora_B.weight"), (".lora_embedding_A", ".lora_embedding_B"))


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter that is on this machine."""

    name: str  # a folder or hub id, as in the profile
    role: str  # of the model that it changes, a key in the profile
    folder: Path  # of its files
    commit: str | None  # of one from the hub; None for a folder
    base: str  # the model that it was trained on, by its files; empty where they do not say
    rank: int  # the largest rank of its updates

    def __str__(self) -> str:
        return f"The {self.role} adapter {self.name!r}"

    @classmethod
    def find(cls, name: str, role: str) -> "Adapter":
        """Find an adapter in a folder or on the hub; a hub adapter is downloaded completely.

        ``role`` is the role of the adapted model. Raises ModelError if there is no adapter, it is not LoRA, or its
        weights are not safetensors.
        """
        folder, commit = Path(name).expanduser(), None
        subject = f"The {role} adapter {name!r}"
        if not folder.is_dir():
            if name.startswith(("/", "./", "../", "~")) or name.count("/") != 1:
                raise ModelError(
                    f"{subject}: there is no such folder.",
                    f"Paths are relative to the current directory, {Path.cwd()}.",
                )
            import huggingface_hub

            with explained(role, name), hushed_hub():
                folder = Path(huggingface_hub.snapshot_download(name, allow_patterns=[ADAPTER, WEIGHTS]))
            commit = folder.name
        found = _settings(subject, folder)
        if (kind := str(found.get("peft_type"))) != "LORA":
            raise ModelError(f"{subject} is of the kind {kind}; specctl loads LoRA.", f"Leave adapter out of [{role}].")
        if not (folder / WEIGHTS).is_file():
            raise ModelError(
                f"{subject}: {folder} holds no {WEIGHTS}; weights in other formats can run code when they are read.",
                "Save it again with peft's `save_pretrained`, which writes safetensors.",
            )
        pattern = found.get("rank_pattern") or {}
        if not isinstance(pattern, dict):
            raise _damaged(subject, "rank_pattern is not an object")
        ranks = [found.get("r"), *pattern.values()]
        return cls(
            name,
            role,
            folder,
            commit,
            base=str(found.get("base_model_name_or_path") or ""),
            rank=max((rank for rank in ranks if isinstance(rank, int)), default=0),
        )

    @property
    def summary(self) -> str:
        """A summary in one line."""
        return f"{self.name}: LoRA of rank {self.rank}, trained on {self.base or 'a model that its files do not name'}"

    @property
    def files(self) -> list[Path]:
        """The files that determine its updates."""
        return [self.folder / ADAPTER, self.folder / WEIGHTS]

    def require_fit(self, model: "nn.Module") -> None:
        """Raise a ModelError if peft is missing, or the updates do not match the modules of a model's `skeleton`."""
        if find_spec("peft") is None:
            raise ModelError(f"{self} needs peft.", f"Run `{pip_install('peft')}`.")
        shapes = self._shapes()
        modules = {name for name, _ in model.named_modules()}
        known = {
            name: tuple(weight.shape)
            for name, weight in model.named_parameters(remove_duplicate=False)  # tied ones have both names
            if weight.ndim == 2
        }
        for name in sorted({found[1] for key in shapes if (found := TUNED.match(key))} - modules):
            if ".experts." not in name:  # peft also finds the names of older transformers, where experts are modules
                raise self._of_another_base(f"the model has no {name}")
        for name, changed in _changes(shapes):
            here = known.get(f"{name}.weight")
            if here is not None and sorted(here) != sorted(changed):  # some layers keep their weights transposed
                raise self._of_another_base(f"it changes {name} of {_by(changed)}, which is {_by(here)} here")

    def require_whole(self, lacking: Sequence[str], unknown: Sequence[str]) -> None:
        """Raise a ModelError if the adapter has too few or too many tensors for a model.

        ``lacking`` are tensors that the model needs and the files lack; ``unknown`` are tensors of the files that the
        model does not know.
        """
        if unknown:
            raise self._of_another_base(f"the model has no place for {len(unknown)} tensor(s), first {unknown[0]}")
        if lacking:
            raise self._of_another_base(f"it lacks {len(lacking)} tensor(s) of this model's, first {lacking[0]}")

    def _of_another_base(self, why: str) -> ModelError:
        trained = f"It was trained on {self.base!r}: set" if self.base else "Set"
        return ModelError(
            f"{self} is for another base: {why}.", f"{trained} model in [{self.role}] to the model it was trained on."
        )

    def _shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The tensors' shapes, by the name of the changed module."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(self.folder / WEIGHTS, framework="np") as file:
                read: Callable[[str], Any] = file.get_slice
                names = list(file.keys())
                return {name.removeprefix(PREFIX): tuple(read(name).get_shape()) for name in names}
        except (SafetensorError, OSError) as error:
            raise ModelError(
                f"{self}: {self.folder / WEIGHTS} is damaged ({error}).", "Copy or download it again."
            ) from error


def _changes(shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, tuple[int, int]]]:
    """The modules changed by two matrices, with the update's rows and columns."""
    for down, up in DOWN_UP:
        for name in (key.removesuffix(down) for key in shapes if key.endswith(down)):
            if len(shapes[name + down]) == len(shapes.get(name + up, ())) == 2:
                yield name, (shapes[name + up][0], shapes[name + down][1])


def _by(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))


def _settings(subject: str, folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / ADAPTER).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelError(f"{subject}: there is no {ADAPTER} in {folder}.", "Name what peft has written.") from error
    except (OSError, ValueError, RecursionError) as error:
        raise _damaged(subject, str(error)) from error
    if not isinstance(found, dict):
        raise _damaged(subject, "it is not an object")
    return found


def _damaged(subject: str, reason: str) -> ModelError:
    return ModelError(f"{subject} has a damaged {ADAPTER}: {reason}.", "Copy or download it again.")


SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
GENERATION = "generation_config.json"
PROCESSOR_TEMPLATE = "chat_template.json"
SMALL_FILES = ["*.json", "*.model", "*.txt", "*.jinja", "*.py", "*.tiktoken", "*.bpe", "*.vocab", "README.md"]
TOKENIZER_FILES = (
    *("tokenizer_config.json", "tokenizer.json", "vocab.json", "tekken.json"),
    *("*.model", "vocab*.txt", "*.tiktoken", "*.bpe", "*.vocab"),
)
"""Every tokenizer has a file that matches one of these; byte tokenizers and custom ones may have settings only."""


@dataclass(frozen=True, slots=True)
class WeightHeaders:
    """Contents of the weight files, from their headers."""

    counts: dict[str, int]  # number of weights by stored dtype, with safetensors names such as ``BF16``
    stored_bytes: int  # size of all weights in bytes
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)  # of every tensor, by its name

    def bytes_without(self, *looked_up: str) -> int:
        """The approximate size of all weights except embeddings, given their names' endings: a pass reads only single
        rows of them.
        """
        sizes = {name: math.prod(shape) for name, shape in self.shapes.items()}
        left_out = sum(size for name, size in sizes.items() if name.endswith(looked_up))
        return round(self.stored_bytes * (1 - left_out / max(1, sum(sizes.values()))))


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The files of one model; the weights of a hub checkpoint may not be downloaded yet."""

    name: str
    role: str
    revision: str | None
    path: Path  # the folder of its files; for a GGUF file the file itself, the first one of a split model
    source: Literal["embedded", "folder", "hub", "file"]
    adapter: Adapter | None = None

    def __str__(self) -> str:
        return f"The {self.role} model {self.name!r}"

    @property
    def weights(self) -> Path | None:
        """The GGUF file with its weights; None for a folder."""
        return self.path if self.source == "file" else None

    @property
    def folder(self) -> Path:
        """The folder of its files; for a GGUF file a folder with `small_files`, made now if it is missing.

        Raises ModelError where transformers cannot read the GGUF file.
        """
        return self.path if self.weights is None else small_files(self.weights)

    def settings(self) -> dict[str, Any]:
        """The contents of config.json."""
        return self._json("config.json")

    def quantization(self) -> dict[str, Any] | None:
        """The quantisation that config.json describes, for the whole model or for its text decoder."""
        settings = self.settings()
        for table in (settings, settings.get("text_config")):
            found = table.get("quantization_config") if isinstance(table, dict) else None
            if isinstance(found, dict):
                return found
        return None

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
        """The model's weight files, whether they exist or not; without an index, a single file."""
        if self.weights is not None:
            return parts_of(self.weights)
        index = self._index()
        return [self.folder / SINGLE] if index is None else sorted(set(index.values()))

    def tensor_files(self) -> dict[str, Path]:
        """Each tensor's file, by tensor name; from the hub, only headers are read.

        Raises ModelError where files are missing, damaged, or not safetensors.
        """
        index, path = self._index(), self.folder / SINGLE
        if index is not None:
            return index
        if path.exists():
            with self._opened(path) as file:
                return dict.fromkeys(file.keys(), path)
        return {name: self.folder / file for name, file in self._remote_headers().weight_map.items()}

    def read(self, names: Iterable[str], files: Mapping[str, Path] | None = None) -> dict[str, "torch.Tensor"]:
        """Read some tensors, each from its file, and no others.

        ``files`` are those of `tensor_files`, on this machine; None to fetch missing ones and find each tensor's.

        Raises ModelError where a file is missing or damaged, or does not hold a tensor that the index promises.
        """
        if files is None:
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
        """Whether there is a tokenizer file; whether it has a vocabulary is known only after loading."""
        return any(path.is_file() for pattern in TOKENIZER_FILES for path in self.folder.glob(pattern))

    def headers(self) -> WeightHeaders:
        """Read the headers of the weight files, from disk if present, else from the hub.

        Raises ModelError where files are missing, damaged, or not safetensors.
        """
        if not self.has_weights():
            metadata = self._remote_headers()
            files = metadata.files_metadata.values()
            ends = [max((tensor.data_offsets[1] for tensor in file.tensors.values()), default=0) for file in files]
            by_dtype = {str(kind): count for kind, count in metadata.parameter_count.items()}
            each = {name: tuple(tensor.shape) for file in files for name, tensor in file.tensors.items()}
            return WeightHeaders(by_dtype, sum(ends), each)
        counts: Counter[str] = Counter()
        shapes: dict[str, tuple[int, ...]] = {}
        if self.weights is not None:
            header = read_header(self.weights)
            for tensor in header.tensors:
                shapes[tensor.name] = tensor.shape[::-1]
                counts[tensor.type] += math.prod(tensor.shape)
            return WeightHeaders(dict(counts), sum(path.stat().st_size for path in header.files), shapes)
        for path in self.weight_files():
            with self._opened(path) as file:
                for key in file.keys():  # noqa: SIM118 - not a mapping
                    tensor = file.get_slice(key)
                    shapes[key] = tuple(tensor.get_shape())
                    counts[tensor.get_dtype()] += math.prod(shapes[key])
        return WeightHeaders(dict(counts), sum(path.stat().st_size for path in self.weight_files()), shapes)

    def fetch_weights(self) -> None:
        """Download missing weights; on a terminal, the hub client shows progress bars."""
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
            self._remote_headers()  # raises an error offline, where the snapshot may be incomplete
            raise ModelError(*pickle_only(str(self), self.role, self.name))

    def _index(self) -> dict[str, Path] | None:
        """Each tensor's file according to the index; None for a single file."""
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
        """Open a weight file: with torch (``pt``) to read tensors, with numpy for the header only. Raises ModelError
        for a faulty file.
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
    """Find a model's files; from the hub, only small files (configuration, tokenizer), an adapter and GGUF files are
    downloaded.

    ``role`` is the table's key in the profile, for messages. Raises ModelError if the model or adapter does not exist
    or access is denied.
    """
    found = _located(table, role)
    return found if table.adapter is None else replace(found, adapter=Adapter.find(table.adapter, role))


def _located(table: ModelTable, role: str) -> Checkpoint:
    if table.model.startswith("embedded:"):
        _no_revision(table, role)
        return _with_config(Checkpoint(table.model, role, None, Path(table.checkpoint), "embedded"))
    folder = Path(table.model).expanduser()
    if folder.exists():
        _no_revision(table, role)
    if (found := find(table.model, role, table.revision)) is not None:
        return _of_gguf(found, table, role)
    if folder.is_dir():
        return _with_config(Checkpoint(table.model, role, None, folder, "folder"))
    if folder.is_file():
        raise ModelError(
            f"The {role} model {table.model!r} is a file.",
            "Give the folder that holds config.json, the tokenizer and the safetensors weights.",
        )
    if table.model.startswith(("/", "./", "../", "~")) or table.model.count("/") > 1:
        hint = f"{similar_models(table.model)}Paths are relative to the current directory, {Path.cwd()}."
        raise ModelError(f"The {role} model {table.model!r}: there is no such folder.", hint)
    made = Checkpoint(table.model, role, table.revision, _snapshot(table, role), "hub")
    if not (made.folder / "config.json").exists():
        with suppress(ModelError):  # of a repository without GGUF files, and offline
            found = find(table.model, role, table.revision, certain=True)
        if found is not None:
            return _of_gguf(found, table, role)
    return _with_config(made)


def _of_gguf(found: Path | HubFiles, table: ModelTable, role: str) -> Checkpoint:
    """The checkpoint of a GGUF file, which is downloaded if need be."""
    file = found.fetch(role) if isinstance(found, HubFiles) else found
    return Checkpoint(table.model, role, None, file, "file")


def _snapshot(table: ModelTable, role: str) -> Path:
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    with explained(role, table.model), hushed_hub():
        try:
            folder = huggingface_hub.snapshot_download(
                table.model, revision=table.revision, allow_patterns=SMALL_FILES, ignore_patterns=["*/*"]
            )
        except LocalEntryNotFoundError as error:
            # Set by newer hub clients only: the cache lacks a small file that may not be needed.
            folder = getattr(error, "snapshot_path", "")
            if not folder:
                raise
    return Path(folder)


def _with_config(checkpoint: Checkpoint) -> Checkpoint:
    if (checkpoint.folder / "config.json").exists():
        return checkpoint
    if (checkpoint.folder / ADAPTER).exists():
        raise ModelError(*adapter(str(checkpoint), checkpoint.role, checkpoint.name, checkpoint.folder))
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


ITEM_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}  # Bytes per number
SAFETENSORS_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Dtypes by name in headers of safetensors files."""

PICKLED = "pytorch_model.bin"  # A draft head's weights as pickled by torch
_WHOLE = 64 << 20  # Largest size in bytes of a file that is hashed completely; hashing a 70B model would take minutes
_SAMPLES, _SAMPLE = 256, 256 << 10


def files_hash(files: Iterable[Path], *, whole: bool = False) -> str:
    """SHA-256 of files' contents, in the given order.

    For a file of more than 64 MiB only its size and 256 evenly spread blocks of 256 KiB are hashed. This suffices
    because training changes weights everywhere. With ``whole`` every byte is hashed, which detects even a single
    changed weight. Raises OSError if a file cannot be read.
    """
    digest = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        digest.update(size.to_bytes(8, "little"))
        with path.open("rb") as file:
            if size <= _WHOLE:
                digest.update(file.read())
                continue
            if whole:
                while chunk := file.read(_WHOLE):
                    digest.update(chunk)
                continue
            for block in range(_SAMPLES):
                file.seek((size - _SAMPLE) * block // (_SAMPLES - 1))
                digest.update(file.read(_SAMPLE))
    return digest.hexdigest()


def stored_weights(checkpoint: Checkpoint) -> list[Path]:
    """The local weight files of a model or draft head; a draft head's may be pickled."""
    pickled = checkpoint.folder / PICKLED
    return [pickled] if pickled.exists() and not checkpoint.has_weights() else checkpoint.weight_files()


def weights_hash(checkpoint: Checkpoint) -> str:
    """`files_hash` of a model's or draft head's local weights and adapter."""
    return files_hash([*stored_weights(checkpoint), *(checkpoint.adapter.files if checkpoint.adapter else ())])


def terms_of(checkpoint: Checkpoint) -> tuple[str | None, str | None]:
    """The licence in the model card, and for a hub model whether its files are gated."""
    if checkpoint.source == "embedded":
        return "apache-2.0", None  # as specctl's own; MODEL_CARD.md names the training data
    if checkpoint.weights is not None:
        return read_header(checkpoint.weights).values.get("general.license"), None
    import huggingface_hub
    from huggingface_hub import constants

    licence = gated = None
    card = checkpoint.folder / "README.md"
    with suppress(Exception):  # a card is free text and may be malformed
        if card.exists():
            licence = (huggingface_hub.metadata_load(card) or {}).get("license")
    if checkpoint.source == "hub" and not constants.HF_HUB_OFFLINE:
        with suppress(Exception), hushed_hub():
            answer = huggingface_hub.HfApi().model_info(checkpoint.name, timeout=10).gated
            kinds = {"auto": "yes, access granted automatically", "manual": "yes, access granted by the owner"}
            gated = kinds.get(str(answer), "no")
    return licence, gated
