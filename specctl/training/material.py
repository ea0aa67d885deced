"""A folder of training data in safetensors shards, with an index of the complete ones."""

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
DEV_EVERY = 10  # One of this many prompts is used for development, the others for training


class Numbered(Protocol):
    """What was made of a prompt."""

    @property
    def number(self) -> int:
        """The prompt's index in its suite, from 0."""


Item = TypeVar("Item", bound=Numbered)


@dataclass(frozen=True, slots=True)
class Split(Generic[Item]):
    """What to train with and, from other prompts, what to evaluate with."""

    train: list[Item]
    dev: list[Item]


class Material(ABC, Generic[Item]):
    """What was made of prompts, a shard for every few of them.

    Args:
        path: the folder.
        index: contents of its index.json.
    """

    command: str  # that writes such folders, for messages
    contents: str  # what they hold, for messages

    def __init__(self, path: Path, index: dict[str, Any]) -> None:
        self.path = path
        self._index = index

    @classmethod
    def create(cls, path: Path, facts: dict[str, Any], prompts: int) -> Self:
        """A new, empty folder for the answers to a number of prompts; ``facts`` are what the data depend on."""
        folder = cls(path, {"schema_version": SCHEMA_VERSION, "facts": facts, "prompts": prompts, "shards": []})
        with naming(path):
            path.mkdir(parents=True, exist_ok=True)
        folder._write_index()
        return folder

    @classmethod
    def open(cls, path: Path) -> Self:
        """An existing folder.

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
        """Raise a UsageError if data that depend on these facts would be mixed with others in the folder."""
        for name, value in facts.items():
            if self.facts.get(name) != value:
                raise UsageError(
                    f"{self.path} holds other {self.contents}: {name!r} differs",
                    "resume with the same options, or use another folder",
                )

    @classmethod
    @abstractmethod
    def pack(cls, items: Sequence[Item]) -> dict[str, torch.Tensor]:
        """Items as tensors for a file."""

    @classmethod
    def content(cls, items: Sequence[Item]) -> bytes:
        """Items as the content of a shard's file."""
        return save(cls.pack(items))

    @abstractmethod
    def unpack(self, tensors: dict[str, torch.Tensor]) -> Iterator[Item]:
        """The items again."""

    def add(self, content: bytes, prompts: int, left_out: dict[str, str], seconds: float) -> None:
        """Write the `content` of the next ``prompts`` prompts as a shard, then add the shard to the index.

        Prompts that were left out count; ``left_out`` has the reasons by id. ``seconds`` is the time of collecting.
        """
        shards = self._index["shards"]
        name = f"shard-{len(shards):05}.safetensors"
        write_whole(self.path / name, content)
        shards.append({"file": name, "prompts": prompts, "left_out": left_out, "seconds": round(seconds, 3)})
        self._write_index()

    def split(self) -> Split[Item]:
        """Every item. Every tenth prompt is for development, or the last one if there are fewer than ten.

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
    """The parts as one tensor, which may be empty."""
    return torch.cat([part.to(kind) for part in parts]) if parts else torch.zeros(0, dtype=kind)


def parts_of(tensors: dict[str, torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Prompts and answers out of their joined ``tokens``, by ``prompt_lengths`` and ``answer_lengths``."""
    prompts, answers = tensors["prompt_lengths"].tolist(), tensors["answer_lengths"].tolist()
    lengths = [length for pair in zip(prompts, answers, strict=True) for length in pair]
    tokens = torch.split(tensors["tokens"], lengths)
    return list(zip(tokens[::2], tokens[1::2], strict=True))
