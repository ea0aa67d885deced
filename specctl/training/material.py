"""A folder of training data in safetensors shards, with an index of the complete shards."""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, Self, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from specctl.errors import UsageError
from specctl.outputs import naming, write_whole

SCHEMA_VERSION = 1
INDEX = "index.json"
DEV_EVERY = 10  # One in this number of prompts is for development, the others for training


class Numbered(Protocol):
    """Training data made from a prompt."""

    @property
    def number(self) -> int:
        """The prompt's index in its suite, from 0."""


Item = TypeVar("Item", bound=Numbered)


@dataclass(frozen=True, slots=True)
class Split(Generic[Item]):
    """Items for training and, from other prompts, for evaluation."""

    train: list[Item]
    dev: list[Item]


class Material(ABC, Generic[Item]):
    """Training data from prompts, in shards of a few prompts each.

    Args:
        path: the folder.
        index: contents of its index.json.
    """

    command: str  # the command that writes such folders, for messages
    contents: str  # their contents, for messages

    def __init__(self, path: Path, index: dict[str, Any]) -> None:
        self.path = path
        self._index = index

    @classmethod
    def create(cls, path: Path, facts: dict[str, Any], prompts: int) -> Self:
        """Create an empty folder for the answers to a number of prompts; ``facts`` determine the data."""
        folder = cls(path, {"schema_version": SCHEMA_VERSION, "facts": facts, "prompts": prompts, "shards": []})
        with naming(path):
            path.mkdir(parents=True, exist_ok=True)
        folder._write_index()
        return folder

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open an existing folder.

        Raises:
            UsageError: the folder has no index of this version.
        """
        try:
            index = json.loads((path / INDEX).read_text(encoding="utf-8"))
            version = index["schema_version"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{path} holds no training data of specctl {cls.command} ({error})") from error
        if version != SCHEMA_VERSION:
            raise UsageError(f"{path} holds data with schema_version {version}; this specctl reads {SCHEMA_VERSION}")
        return cls(path, index)

    @property
    def facts(self) -> dict[str, Any]:
        facts: dict[str, Any] = self._index["facts"]
        return facts

    @property
    def prompts(self) -> int:
        """Number of prompts to answer."""
        return int(self._index["prompts"])

    @property
    def done(self) -> int:
        """Number of prompts that are answered or left out."""
        return sum(shard["prompts"] for shard in self._index["shards"])

    @property
    def left_out(self) -> dict[str, str]:
        """Prompts that could not be answered, by id, with the reason."""
        return {key: value for shard in self._index["shards"] for key, value in shard["left_out"].items()}

    @property
    def seconds(self) -> float:
        """Wall time in seconds of collecting the data."""
        return float(sum(shard["seconds"] for shard in self._index["shards"]))

    def require_same(self, facts: Mapping[str, Any]) -> None:
        """Raise a UsageError if the folder's data depend on other facts than these."""
        for name, value in facts.items():
            if self.facts.get(name) != value:
                raise UsageError(
                    f"{self.path} holds other {self.contents}: {name!r} differs",
                    "resume with the same options, or use another folder",
                )

    @classmethod
    @abstractmethod
    def pack(cls, items: Sequence[Item]) -> dict[str, torch.Tensor]:
        """Pack items into tensors for a file."""

    @classmethod
    def content(cls, items: Sequence[Item]) -> bytes:
        """Pack items into the content of a shard's file."""
        return save(cls.pack(items))

    @abstractmethod
    def unpack(self, tensors: dict[str, torch.Tensor]) -> Iterator[Item]:
        """Unpack the items of a shard."""

    def add(self, content: bytes, prompts: int, left_out: dict[str, str], seconds: float) -> None:
        """Write the `content` of the next ``prompts`` prompts as a shard, then add the shard to the index.

        Skipped prompts count too; ``left_out`` has the reasons by id. ``seconds`` is the collection time.
        """
        shards = self._index["shards"]
        name = f"shard-{len(shards):05}.safetensors"
        write_whole(self.path / name, content)
        shards.append({"file": name, "prompts": prompts, "left_out": left_out, "seconds": round(seconds, 3)})
        self._write_index()

    def split(self) -> Split[Item]:
        """Load every item. Every tenth prompt is for development, or the last one if there are fewer than ten.

        Raises:
            UsageError: prompts are still unanswered, a shard is damaged, or there are too few answers.
        """
        if self.done < self.prompts:
            raise UsageError(
                f"{self.path} has the answers to {self.done} of {self.prompts} prompts",
                "continue with --resume and the same options as before",
            )
        split: Split[Item] = Split([], [])
        every = min(DEV_EVERY, self.prompts)
        for shard in self._index["shards"]:
            for item in self.unpack(self._read(self.path / shard["file"])):
                (split.dev if (item.number + 1) % every == 0 else split.train).append(item)
        if not split.train or not split.dev:
            raise UsageError(f"{self.path} has too few answers to train on", "use thousands of prompts")
        return split

    def _read(self, path: Path) -> dict[str, torch.Tensor]:
        try:
            with safe_open(path, framework="pt") as file:
                return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - not a mapping
        except (OSError, SafetensorError) as error:
            raise UsageError(
                f"{path} is damaged ({error})", f"delete the folder and collect the {self.contents} again"
            ) from error

    def _write_index(self) -> None:
        write_whole(self.path / INDEX, json.dumps(self._index, indent=1) + "\n")


def joined(parts: Sequence[torch.Tensor], kind: torch.dtype) -> torch.Tensor:
    """Concatenate the parts into one tensor, which may be empty."""
    return torch.cat([part.to(kind) for part in parts]) if parts else torch.zeros(0, dtype=kind)


def parts_of(tensors: dict[str, torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Split joined ``tokens`` into prompts and answers, by ``prompt_lengths`` and ``answer_lengths``."""
    prompts, answers = tensors["prompt_lengths"].tolist(), tensors["answer_lengths"].tolist()
    lengths = [length for pair in zip(prompts, answers, strict=True) for length in pair]
    tokens = torch.split(tensors["tokens"], lengths)
    return list(zip(tokens[::2], tokens[1::2], strict=True))
