"""Training examples of heads, and the folder that stores them."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from specctl.errors import UsageError
from specctl.outputs import naming, write_whole
from specctl.policies import DISTRIBUTION_SIGNALS

FORMAT_VERSION = 1
INDEX = "index.json"
PROMPTS_PER_SHARD = 16
"""Prompts that are lost at most when a run is killed."""
DEV_EVERY = 10
"""One of this many prompts is used for development, the others for training."""
_PER_TOKEN = ("proposals", "acceptance", *DISTRIBUTION_SIGNALS)


@dataclass(frozen=True, slots=True)
class Example:
    """One answer of the target, and the N draft tokens along it: of a draft model one at each position, so that N = T.

    Attributes:
        number: index of the prompt in its suite, from 0; the turns of a conversation share it.
        prompt: ``(P,)`` int32, the ids before the answer.
        answer: ``(T,)`` int32, the target's tokens: X of the SpecDec++ paper.
        proposals: ``(N,)`` int32, the draft tokens: Y of the paper. A draft model's token i is drawn after the prompt
            and the first i tokens of the answer; those of a draft head are `specctl.heads.rounds.RoundTokens`.
        acceptance: ``(N,)`` float32, the acceptance probability min(1, p(Y)/q(Y)), p and q the target's and the draft's
            distribution after temperature and filters.
        entropy, top_prob, token_prob: ``(N,)`` float32, the draft's signals when it drew Y, as in `DraftStep`.
        hidden: ``(N, H)`` in the draft's dtype, the states after the draft has read Y; None for a draft model, which
            can read Y again.
    """

    number: int
    prompt: torch.Tensor
    answer: torch.Tensor
    proposals: torch.Tensor
    acceptance: torch.Tensor
    entropy: torch.Tensor
    top_prob: torch.Tensor
    token_prob: torch.Tensor
    hidden: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Split:
    """Examples for training and, from other prompts, for evaluation."""

    train: list[Example]
    dev: list[Example]


class DataFolder:
    """Examples in safetensors shards, with an index of the complete shards.

    Args:
        path: the folder.
        index: contents of its index.json.
    """

    def __init__(self, path: Path, index: dict[str, Any]) -> None:
        self.path = path
        self._index = index

    @classmethod
    def create(cls, path: Path, facts: dict[str, Any], prompts: int) -> "DataFolder":
        """A new, empty folder.

        Args:
            path: the folder to create.
            facts: models and settings that the examples depend on.
            prompts: number of prompts to answer.
        """
        folder = cls(path, {"format_version": FORMAT_VERSION, "facts": facts, "prompts": prompts, "shards": []})
        with naming(path):
            path.mkdir(parents=True, exist_ok=True)
        folder._write_index()
        return folder

    @classmethod
    def open(cls, path: Path) -> "DataFolder":
        """An existing folder.

        Raises:
            UsageError: the folder has no index of this format.
        """
        try:
            index = json.loads((path / INDEX).read_text(encoding="utf-8"))
            version = index["format_version"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{path} holds no training data of specctl train-head ({error})") from error
        if version != FORMAT_VERSION:
            raise UsageError(f"{path} holds data of format {version}; this specctl reads format {FORMAT_VERSION}")
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
        """Wall time in seconds of collecting the examples."""
        return float(sum(shard["seconds"] for shard in self._index["shards"]))

    def add(self, examples: Sequence[Example], prompts: int, left_out: dict[str, str], seconds: float) -> None:
        """Write the examples of the next ``prompts`` prompts as a shard, then add the shard to the index.

        Args:
            examples: of the prompts, in order.
            prompts: number of prompts, including those left out.
            left_out: reasons by prompt id.
            seconds: wall time of collecting them.
        """
        shards = self._index["shards"]
        name = f"shard-{len(shards):05}.safetensors"
        tensors = {
            "numbers": torch.tensor([example.number for example in examples], dtype=torch.int32),
            "prompt_lengths": torch.tensor([len(example.prompt) for example in examples], dtype=torch.int32),
            "answer_lengths": torch.tensor([len(example.answer) for example in examples], dtype=torch.int32),
            "tokens": _joined([part for example in examples for part in (example.prompt, example.answer)], torch.int32),
        }
        for field in _PER_TOKEN:
            kind = torch.int32 if field == "proposals" else torch.float32
            tensors[field] = _joined([getattr(example, field) for example in examples], kind)
        if states := [example.hidden for example in examples if example.hidden is not None]:
            tensors["draft_lengths"] = torch.tensor([len(state) for state in states], dtype=torch.int32)
            tensors["hidden"] = torch.cat(states)
        write_whole(self.path / name, save(tensors))
        shards.append({"file": name, "prompts": prompts, "left_out": left_out, "seconds": round(seconds, 3)})
        self._write_index()

    def split(self) -> Split:
        """Every example. Every tenth prompt is for development, or the last one if there are fewer than ten.

        Raises:
            UsageError: prompts are still unanswered, a shard is damaged, or there are too few examples.
        """
        if self.done < self.prompts:
            raise UsageError(
                f"{self.path} has the answers to {self.done} of {self.prompts} prompts",
                "continue with --resume and the same options as before",
            )
        split = Split([], [])
        every = min(DEV_EVERY, self.prompts)
        for shard in self._index["shards"]:
            for example in self._read(shard["file"]):
                (split.dev if (example.number + 1) % every == 0 else split.train).append(example)
        if not split.train or not split.dev:
            raise UsageError(f"{self.path} has too few answers to train on", "use thousands of prompts")
        return split

    def _read(self, name: str) -> Iterator[Example]:
        try:
            with safe_open(self.path / name, framework="pt") as file:
                tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - not a mapping
        except (OSError, SafetensorError) as error:
            raise UsageError(
                f"{self.path / name} is damaged ({error})", "delete the folder and collect the examples again"
            ) from error
        answers = tensors["answer_lengths"].tolist()
        lengths = [length for pair in zip(tensors["prompt_lengths"].tolist(), answers, strict=True) for length in pair]
        tokens = tensors["tokens"].split(lengths)
        # Of a draft head's states, which may be larger than memory, only those in use are read from the file.
        stored = tensors.get("hidden")
        drafted = answers if stored is None else tensors["draft_lengths"].tolist()
        columns = [tensors[field].split(drafted) for field in _PER_TOKEN]
        states: Sequence[torch.Tensor | None] = [None] * len(answers) if stored is None else stored.split(drafted)
        for index, number in enumerate(tensors["numbers"].tolist()):
            drawn, accepted, entropy, top_prob, token_prob = (column[index] for column in columns)
            own = drawn, accepted, entropy, top_prob, token_prob
            yield Example(number, tokens[2 * index], tokens[2 * index + 1], *own, states[index])

    def _write_index(self) -> None:
        write_whole(self.path / INDEX, json.dumps(self._index, indent=1) + "\n")


def _joined(parts: Sequence[torch.Tensor], kind: torch.dtype) -> torch.Tensor:
    return torch.cat([part.to(kind) for part in parts]) if parts else torch.zeros(0, dtype=kind)
