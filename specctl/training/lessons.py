"""What the target says about the answers that a draft head learns from, kept on disk between epochs."""

import hashlib
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch.nn.functional import linear
from transformers import PreTrainedModel

from specctl.errors import OutputError
from specctl.models.draft_heads.training import Lesson, Teacher
from specctl.models.passes.watching import LAST
from specctl.outputs import naming, write_whole

SHARE_OF_DISK = 0.25  # The largest share of a disk's free space that kept states may take
CLOSE = 1e-2  # Tolerance for logits computed from the last states, relative to the largest


class Text(Protocol):
    """A prompt with its answer."""

    @property
    def prompt(self) -> torch.Tensor:
        """``(P,)`` int32."""

    @property
    def tokens(self) -> torch.Tensor:
        """The answer, ``(A,)`` int32."""


class Lessons:
    """The lessons of numbered answers. The target reads each answer once, if its states are kept.

    The states of a float32 target are rounded to float16, whether they are kept or not, so that a head does not depend
    on it. States too large for float16 keep their values. Logits are computed from the last states by the target's
    output layer. If this gives other logits than the target, for example because it caps them, the target reads the
    answer again in every epoch.

    Args:
        target: a causal language model in eval mode.
        layers: the layers whose states the head reads.
        texts: the answers.
        tokens: the ids ``(D,)`` int64 whose logits are needed, ascending; None for all.
        folder: for the states, one file for each answer; None to keep none. Unreadable files, and those of other texts,
            are replaced.

    Attributes:
        read: the number of answers that the target has read.

    Raises:
        ModelError: the target has no list of decoder layers to watch.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        layers: Iterable[int],
        texts: Sequence[Text],
        tokens: torch.Tensor | None = None,
        folder: Path | None = None,
    ) -> None:
        self._layers = sorted({*layers, LAST})
        self._teacher, self._texts, self._folder, self.read = Teacher(target, self._layers), texts, folder, 0
        self._tokens = None if tokens is None else tokens.to(self._teacher.device)
        self._output: Any = target.get_output_embeddings()  # type: ignore[no-untyped-call]
        self._rows: torch.Tensor | None = None  # (D, H) float32 of the output layer
        self._bias: torch.Tensor | None = None  # (D,)

    def __len__(self) -> int:
        return len(self._texts)

    def length(self, index: int) -> int:
        """A, the number of an answer's tokens."""
        return len(self._texts[index].tokens)

    @torch.no_grad()
    def lesson(self, index: int) -> Lesson:
        """The lesson of an answer, with logits ``(A, D)``."""
        text = self._texts[index]
        ids, first = torch.cat([text.prompt, text.tokens]).long().to(self._teacher.device), len(text.prompt)
        path = None if self._folder is None else self._folder / f"{index:06}.safetensors"
        mark = hashlib.sha256(f"{self._layers} {ids.tolist()}".encode()).hexdigest()
        rounded = None if path is None else _kept(path, mark)
        read: torch.Tensor | None = None  # (A, D) of the target's own pass
        if rounded is None:
            whole, self.read = self._teacher.lesson(text.prompt, text.tokens), self.read + 1
            rounded = {str(layer): _rounded(states) for layer, states in whole.states.items()}
            rounded["likeliest"] = whole.logits.argmax(-1).int()
            read = whole.logits if self._tokens is None else whole.logits[:, self._tokens]
        moved = {name: part.to(ids.device) for name, part in rounded.items()}
        states = {layer: moved[str(layer)].float() for layer in self._layers}
        logits = self._logits(states[LAST][first - 1 : -1])
        if read is not None:
            if (logits - read).abs().amax() > CLOSE * read.abs().amax():
                logits = read
            elif path is not None and not _keep(path, rounded, mark):
                self._folder = None
        counted = None if self._tokens is None else torch.isin(moved["likeliest"], self._tokens)
        return Lesson(ids, first, states, logits, counted)

    def each(self, advance: Callable[[], None]) -> Iterator[Lesson]:
        """All lessons in order; ``advance`` is called after each."""
        for index in range(len(self)):
            yield self.lesson(index)
            advance()

    def _logits(self, states: torch.Tensor) -> torch.Tensor:
        """The logits ``(A, D)`` that the output layer computes from last states ``(A, H)``."""
        if self._rows is None:
            rows, bias = self._output.weight.detach(), self._output.bias
            self._rows = (rows if self._tokens is None else rows[self._tokens]).float()
            if bias is not None:
                self._bias = (bias if self._tokens is None else bias[self._tokens]).detach().float()
        return linear(states, self._rows, self._bias)


def room_for_states(folder: Path, texts: Sequence[Text], layers: Iterable[int], width: int) -> bool:
    """Whether the states of some texts, ``width`` numbers in each layer, take little of a disk's free space.

    Args:
        folder: an existing folder on the disk.
        texts, layers: as in `Lessons`.
        width: of the target's states.
    """
    tokens = sum(len(text.prompt) + len(text.tokens) for text in texts)
    return tokens * len({*layers, LAST}) * width * 2 < SHARE_OF_DISK * shutil.disk_usage(folder).free


def _rounded(states: torch.Tensor) -> torch.Tensor:
    """States in 16 bits where all are in float16's range."""
    half = states.half()
    return half if bool(half.isfinite().all()) else states


def _kept(path: Path, mark: str) -> dict[str, torch.Tensor] | None:
    """The tensors of a readable file with this mark."""
    try:
        with safe_open(path, framework="pt") as file:
            if (file.metadata() or {}).get("text") != mark:
                return None
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    except (OSError, SafetensorError):
        return None


def _keep(path: Path, tensors: dict[str, torch.Tensor], mark: str) -> bool:
    """Write a file; False if the disk does not take it."""
    content = save({name: part.cpu().contiguous() for name, part in tensors.items()}, {"text": mark})
    try:
        with naming(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, content)
    except OutputError:
        return False
    return True
