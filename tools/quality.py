"""What rounding a model's weights does to its predictions: perplexity, and how much of its greedy text stays.

    python -m tools.quality FOLDER TEXT.txt --forms float32 int8 int4 FILE.gguf --roundings 4/32/symmetric+8

prints a row for each form. A form is run by onnxruntime; instead of a name it may be another model with the same
tokenizer, run as it is. A rounding, ``BITS/BLOCK/FORM`` of `Blocks.of`, is run by torch, with inputs of products
rounded to 8 bits as onnxruntime does; ``+8`` rounds the output layer too, in blocks of 32 without zeros. The first form
is what the others are compared with.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import exp
from pathlib import Path
from typing import Any, Self, cast, get_args

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from specctl.decoding.draft_tokens import read_along
from specctl.decoding.loop import decode
from specctl.decoding.prompt_format import PromptFormat
from specctl.decoding.sampling import Sampling
from specctl.models.files.tokenizer import Tokenizer
from specctl.models.loading.model import load_model
from specctl.models.onnx.blocks import BITS, BLOCK, Blocks, Form
from specctl.models.onnx.check import coarse
from specctl.models.running.eager import EagerPasses
from specctl.models.running.slot import Slot
from specctl.profile.schema import ModelTable
from tools.pass_times import onnx_pair

PROMPTS = Path(__file__).with_name("real_prompts.jsonl")
WINDOW, WINDOWS = 256, 16
"""Tokens of a window of the text, of which each is read alone, and the number of windows."""
LENGTH = 96  # Greedy tokens after each prompt
WHOLE = "float32"  # The form that is not rounded


@dataclass(frozen=True, slots=True)
class Sample:
    """What forms are compared on.

    Attributes:
        windows: of a text, each read alone.
        texts: prompts with the greedy text after them.
    """

    windows: list[list[int]]
    texts: list[tuple[list[int], list[int]]]

    @classmethod
    def of(cls, slot: Slot, windows: list[list[int]], prompts: list[list[int]], length: int = LENGTH) -> Self:
        """Let a model, the one to compare with, continue the prompts by ``length`` tokens each."""
        return cls(windows, [(prompt, greedy(slot, prompt, length)) for prompt in prompts])


@dataclass(frozen=True, slots=True)
class Quality:
    """How a form of a model does on a `Sample`.

    Attributes:
        losses: ``(P,)`` float64, nats of every predicted token of the windows.
        kept: ``(T,)`` for each text whether its tokens are the form's largest logits after the same tokens.
    """

    losses: np.ndarray
    kept: list[np.ndarray]

    @property
    def perplexity(self) -> float:
        return exp(self.losses.mean())

    @property
    def stays(self) -> float:
        """The share of greedy tokens that stay."""
        return float(np.concatenate(self.kept).mean())

    @property
    def until(self) -> float:
        """The mean number of tokens until a text parts from the other; a text that does not counts as a whole."""
        return float(np.mean([len(each) if each.all() else int(each.argmin()) for each in self.kept]))

    def above(self, other: "Quality") -> tuple[float, float]:
        """How much larger the perplexity is than another form's, as a share, and the standard error of that."""
        more = self.losses - other.losses
        return exp(more.mean()) - 1, float(more.std() / len(more) ** 0.5)


def predicted(slot: Slot, prompt: Sequence[int], text: Sequence[int]) -> Iterator[tuple[np.ndarray, int]]:
    """Each token of a text after the logits ``(V,)`` that predict it, which the next pass overwrites."""
    for part, (forward,) in read_along([slot], prompt, text):
        columns: Any = forward.columns
        yield from zip(np.asarray(columns), text[part], strict=True)


def greedy(slot: Slot, prompt: Sequence[int], length: int) -> list[int]:
    """The tokens with the largest logits after a prompt."""
    slot.rollback(0)
    return [token for round_ in decode(slot, None, prompt, length, Sampling()) for token in round_.emitted]


def quality(slot: Slot, sample: Sample) -> Quality:
    """How a form of a model does; the slot is empty afterwards."""
    with torch.inference_mode():
        losses = [loss(*pair) for window in sample.windows for pair in predicted(slot, window[:1], window[1:])]
        kept = [
            np.array([logits.argmax() == token for logits, token in predicted(slot, *text)]) for text in sample.texts
        ]
    slot.rollback(0)
    return Quality(np.array(losses), kept)


def loss(logits: np.ndarray, token: int) -> float:
    """Nats of a token."""
    row = logits.astype(np.float64)
    most = row.max()
    return float(most + np.log(np.exp(row - most).sum()) - row[token])


def windows_of(tokens: Sequence[int], start: Sequence[int], count: int = WINDOWS) -> list[list[int]]:
    """Windows at equal distances in a text.

    Args:
        tokens: of the text.
        start: ids that every window begins with.
        count: their number.
    """
    step = max(WINDOW, len(tokens) // count)
    return [[*start, *tokens[place : place + WINDOW]] for place in range(0, len(tokens) - WINDOW, step)][:count]


@dataclass(frozen=True, slots=True)
class Rounding:
    """How torch is to round a model.

    Attributes:
        bits, block, form: of `Blocks.of`; bits is 0 to round nothing.
        output: bits of the output layer, 0 for none.
    """

    bits: int
    block: int
    form: Form
    output: int = 0

    @classmethod
    def read(cls, text: str) -> Self:
        first, _, output = text.partition("+")
        bits, block, form = first.split("/")
        if form not in get_args(Form):
            raise ValueError(f"{form} is none of {', '.join(get_args(Form))}")
        return cls(int(bits), int(block), cast("Form", form), int(output or 0))

    def __str__(self) -> str:
        return f"{self.bits}/{self.block}/{self.form}" + (f"+{self.output}" if self.output else "")

    @contextmanager
    def on(self, model: PreTrainedModel) -> Iterator[None]:
        """Round a model's products; its weights are restored afterwards."""
        head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
        layers = [each for each in model.modules() if isinstance(each, nn.Linear)]
        whole = {each: each.weight for each in layers}
        sizes: dict[nn.Module, int] = {}
        for layer, weight in whole.items():
            how = replace(self, bits=self.output, block=BLOCK, form="symmetric") if layer is head else self
            if how.bits:
                blocks = Blocks.of(weight.detach().float().numpy(), how.bits, block=how.block, form=how.form)
                layer.weight = nn.Parameter(torch.from_numpy(blocks.values()).to(weight.dtype), requires_grad=False)
                sizes[layer] = how.block
        try:
            with coarse(sizes):
                yield
        finally:
            for layer, weight in whole.items():
                layer.weight = weight


def onnx_slot(folder: str, form: str) -> tuple[Slot, Tokenizer]:
    """A form of a model in onnxruntime, and its tokenizer.

    Args:
        folder: the model.
        form: float32, int8, int4, or another model.

    Raises:
        SystemExit: onnxruntime does not run it.
    """
    quantize: Any = form if form in BITS else None
    model = folder if quantize or form == WHOLE else form
    pair = onnx_pair(ModelTable(model=model, device="cpu", quantize=quantize))
    return pair.target.bare, pair.tokenizer


def table_row(name: str, found: Quality, first: Quality) -> str:
    """A row of the printed table."""
    more, error = found.above(first)
    return f"{name[:24]:25}{found.perplexity:>12.3f}{more:>+10.2%} ({error:.2%}){found.stays:>9.1%}{found.until:>9.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.quality", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("text", type=Path)
    parser.add_argument("--forms", nargs="+", default=[WHOLE, *BITS])
    parser.add_argument("--roundings", nargs="*", default=[], type=Rounding.read)
    parser.add_argument("--prompts", type=Path, default=PROMPTS)
    parser.add_argument("--windows", type=int, default=WINDOWS)
    parser.add_argument("--length", type=int, default=LENGTH)
    given = parser.parse_args()
    slot, tokenizer = onnx_slot(given.model, given.forms[0])
    ids = tokenizer.encode(given.text.read_text(encoding="utf-8"), add_special_tokens=False)
    start = tokenizer.encode("")
    texts = [json.loads(line)["prompt"] for line in given.prompts.read_text(encoding="utf-8").splitlines()]
    prompts = [*map(PromptFormat(tokenizer).prompt, texts)]
    with torch.inference_mode():
        sample = Sample.of(slot, windows_of(ids, start, given.windows), prompts, given.length)
    print(f"{'':25}{'perplexity':>12}{'more (error)':>18}{'stays':>10}{'until':>9}")
    first = quality(slot, sample)
    print(table_row(given.forms[0], first, first), f" ({len(first.losses)} tokens, {len(prompts)} texts)", flush=True)
    for form in given.forms[1:]:
        slot, _ = onnx_slot(given.model, form)
        print(table_row(Path(form).name, quality(slot, sample), first), flush=True)
    del slot
    if given.roundings:
        model = load_model(ModelTable(model=given.model, device="cpu"), role="target").model
        for rounding in given.roundings:
            with rounding.on(model):
                slot = Slot(EagerPasses(model, model.config.get_text_config().vocab_size))
                print(table_row(str(rounding), quality(slot, sample), first), flush=True)


if __name__ == "__main__":
    main()
