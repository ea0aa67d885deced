"""A LoRA adapter's files: a change of low rank to the weights of the model that it was trained on."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specctl.errors import ModelError, pip_install
from specctl.models.files.hushing import hushed_hub
from specctl.models.files.loading_failures import ADAPTER, explained

if TYPE_CHECKING:
    from torch import nn

WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
"""Before the names of the base model's modules, in those of an adapter's tensors."""
TUNED = re.compile(r"^(.+?)(?:\.base_layer)*\.lora_")
"""A tensor of a change, and before it the module that is changed; of several to one module, one stands in another."""
DOWN_UP = ((".lora_A.weight", ".lora_B.weight"), (".lora_embedding_A", ".lora_embedding_B"))


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter that is on this machine.

    Attributes:
        name: a folder or hub id, as the profile has it.
        role: of the model that it changes, a key in the profile.
        folder: of its files.
        commit: of one from the hub; None for a folder.
        base: the model that it was trained on, as its files name it; empty where they do not.
        rank: the largest of its changes.
    """

    name: str
    role: str
    folder: Path
    commit: str | None
    base: str
    rank: int

    def __str__(self) -> str:
        return f"The {self.role} adapter {self.name!r}"

    @classmethod
    def find(cls, name: str, role: str) -> "Adapter":
        """An adapter in a folder or on the hub, from which it is downloaded whole.

        Args:
            name: a folder, or a hub id.
            role: of the model that it changes, for messages.

        Raises:
            ModelError: there is none, it is no LoRA adapter, or its weights are not safetensors.
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
        told = _settings(subject, folder)
        if (kind := str(told.get("peft_type"))) != "LORA":
            raise ModelError(f"{subject} is of the kind {kind}; specctl loads LoRA.", f"Leave adapter out of [{role}].")
        if not (folder / WEIGHTS).is_file():
            raise ModelError(
                f"{subject}: {folder} holds no {WEIGHTS}; weights in other formats can run code when they are read.",
                "Save it again with peft's `save_pretrained`, which writes safetensors.",
            )
        pattern = told.get("rank_pattern") or {}
        if not isinstance(pattern, dict):
            raise _damaged(subject, "rank_pattern is not an object")
        ranks = [told.get("r"), *pattern.values()]
        return cls(
            name,
            role,
            folder,
            commit,
            base=str(told.get("base_model_name_or_path") or ""),
            rank=max((rank for rank in ranks if isinstance(rank, int)), default=0),
        )

    @property
    def told(self) -> str:
        """What it is, in a line."""
        return f"{self.name}: LoRA of rank {self.rank}, trained on {self.base or 'a model that its files do not name'}"

    @property
    def files(self) -> list[Path]:
        """Those that decide what it changes."""
        return [self.folder / ADAPTER, self.folder / WEIGHTS]

    def require_fit(self, model: "nn.Module") -> None:
        """Raise a ModelError where peft is not installed, or the changes are not of a model's modules.

        Args:
            model: the model's `skeleton`.
        """
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
            if ".experts." not in name:  # peft finds those of older transformers, whose experts are modules
                raise self._of_another_base(f"the model has no {name}")
        for name, changed in _changes(shapes):
            here = known.get(f"{name}.weight")
            if here is not None and sorted(here) != sorted(changed):  # some layers keep their weights transposed
                raise self._of_another_base(f"it changes {name} of {_by(changed)}, which is {_by(here)} here")

    def require_whole(self, lacking: Sequence[str], unknown: Sequence[str]) -> None:
        """Raise a ModelError if not all of it, or more than it, belongs to a model.

        Args:
            lacking: tensors of the model's changes that its files do not have.
            unknown: tensors of its files that the model has no place for.
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
        """Of its tensors, by the names of the modules that they change."""
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
    """The modules that are changed by two matrices, with rows and columns of the change."""
    for down, up in DOWN_UP:
        for name in (key.removesuffix(down) for key in shapes if key.endswith(down)):
            if len(shapes[name + down]) == len(shapes.get(name + up, ())) == 2:
                yield name, (shapes[name + up][0], shapes[name + down][1])


def _by(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))


def _settings(subject: str, folder: Path) -> dict[str, Any]:
    try:
        told = json.loads((folder / ADAPTER).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelError(f"{subject}: there is no {ADAPTER} in {folder}.", "Name what peft has written.") from error
    except (OSError, ValueError, RecursionError) as error:
        raise _damaged(subject, str(error)) from error
    if not isinstance(told, dict):
        raise _damaged(subject, "it is not an object")
    return told


def _damaged(subject: str, reason: str) -> ModelError:
    return ModelError(f"{subject} has a damaged {ADAPTER}: {reason}.", "Copy or download it again.")
