"""How long a model's passes take by engine, beside the time that reading its weights from memory takes.

Passes of all engines take turns, and so does a sum over a tensor larger than any cache, which measures the bandwidth.

    python -m tools.pass_times FOLDER --quantize int4 --engines onnx eager compiled

prints for each engine and width the median of wall time and, with one thread, of processor time, which other processes
change less.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from operator import attrgetter
from statistics import median
from time import perf_counter, process_time

import torch
from torch import nn
from transformers import PreTrainedModel

from specctl.models.files.checkpoint import locate
from specctl.models.files.skeleton import skeleton
from specctl.models.loading.assembly import load_pair
from specctl.models.loading.model import load_model
from specctl.models.passes.compilation import Compiler
from specctl.models.passes.ordinary_tokens import LAST, ordinary_tokens
from specctl.models.running.eager import EagerPasses
from specctl.models.running.engines import EngineSettings
from specctl.models.running.pair import Pair
from specctl.models.running.slot import Slot
from specctl.models.running.static import StaticPasses
from specctl.observing.pass_times import fill
from specctl.printable import gib
from specctl.profile.schema import ModelTable, Profile

WIDTHS = (1, 2, 4, 6, 8)
PROBE = 1 << 28
"""Numbers in the tensor whose sum measures the bandwidth, 1 GiB."""
ENGINES = ("onnx", "eager", "compiled")


@dataclass(frozen=True, slots=True)
class Spent:
    """Milliseconds of wall and of processor time that some work took."""

    wall: float
    processor: float

    @classmethod
    def on(cls, work: Callable[[], object]) -> "Spent":
        wall, processor = perf_counter(), process_time()
        work()
        return cls((perf_counter() - wall) * 1e3, (process_time() - processor) * 1e3)

    @classmethod
    def median(cls, several: Sequence["Spent"]) -> "Spent":
        return cls(median(one.wall for one in several), median(one.processor for one in several))


def onnx_pair(table: ModelTable) -> Pair:
    """The model run by onnxruntime alone, with its tokenizer.

    Raises:
        SystemExit: onnxruntime does not run it.
    """
    profile = Profile(target=table, engine="onnx")
    settings = EngineSettings.of(profile, notice=print, progress=print)
    pair = load_pair(profile, drafts=[], engines=settings, measured=False, torch_weights=False)
    if not pair.target.engine.startswith("onnx"):
        raise SystemExit(f"onnxruntime does not run {table.model}, {table.quantize or 'as it is'}")
    return pair


def torch_runners(model: PreTrainedModel, compiles: bool) -> dict[str, Slot]:
    """The model run by torch, eagerly and, if wanted, compiled."""
    vocabulary = model.config.get_text_config().vocab_size
    runners: dict[str, Slot] = {"eager": Slot(EagerPasses(model, vocabulary))}
    if compiles:
        runners["compiled"] = Slot(StaticPasses(model, vocabulary, compiler=Compiler("it", print, print)))
    return runners


def graph_bytes(model: PreTrainedModel, quantize: str | None) -> int:
    """Bytes of the weights that a pass of onnxruntime reads: those of linear layers, if wanted `rounded`."""
    from specctl.models.onnx.blocks import BITS, OUTPUT_BITS, rounded_nbytes

    output = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    layers = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
    if quantize is None:
        return sum(layer.weight.numel() * torch.float32.itemsize for layer in layers)
    bits = {layer: OUTPUT_BITS if layer is output else BITS[quantize] for layer in layers}
    return sum(rounded_nbytes(layer.weight.shape, bits[layer]) for layer in layers)


def torch_bytes(model: PreTrainedModel) -> int:
    """Bytes of the weights that a pass of torch reads: all but embeddings that are not the output layer."""
    tables = {id(part.weight) for part in model.modules() if isinstance(part, nn.Embedding)}
    tables.discard(id(model.get_output_embeddings().weight))  # type: ignore[no-untyped-call]
    total = 0
    for weight in model.parameters():
        inner = weight.__tensor_flatten__()[0] if hasattr(weight, "__tensor_flatten__") else []
        parts = [getattr(weight, name) for name in inner] or [weight]
        total += sum(part.nbytes for part in parts) * (id(weight) not in tables)
    return total


@torch.inference_mode()
def measured(runners: Mapping[str, Slot], context: int, rounds: int) -> tuple[dict[tuple[str, int], Spent], Spent]:
    """What passes take, by engine and width, and what reading `PROBE` numbers takes."""
    probe = torch.ones(PROBE)

    def passes(key: tuple[str, int]) -> None:
        engine, width = key
        runners[engine].extend(ordinary_tokens(width, LAST), keep=width)
        runners[engine].rollback(context)

    for runner in runners.values():
        fill(runner, ordinary_tokens(context, LAST))
    keys = [*product(runners, WIDTHS)]
    for key in keys:  # a first pass may be compiled
        passes(key)
    found: dict[tuple[str, int], list[Spent]] = {key: [] for key in keys}
    sums = []
    for _ in range(rounds):
        for key, spent in found.items():
            spent.append(Spent.on(partial(passes, key)))
        sums.append(Spent.on(probe.sum))
    return {key: Spent.median(spent) for key, spent in found.items()}, Spent.median(sums)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.pass_times", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--quantize", choices=["int8", "int4"])
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=["onnx", "eager"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=20)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    table = ModelTable(model=given.model, device="cpu", quantize=given.quantize)
    checkpoint = locate(table, "target")
    reads: dict[str, float] = {}
    runners: dict[str, Slot] = {}
    if "onnx" in given.engines:
        runners["onnx"] = onnx_pair(table).target
        reads["onnx"] = graph_bytes(skeleton(checkpoint), given.quantize)
    if {"eager", "compiled"} & set(given.engines):
        model = load_model(table, role="target").model
        runners |= torch_runners(model, "compiled" in given.engines)
        reads |= dict.fromkeys(runners.keys() - {"onnx"}, torch_bytes(model))
    found, probe = measured(runners, given.context, given.rounds)
    clock = attrgetter("processor" if given.threads == 1 else "wall")
    speed = PROBE * torch.float32.itemsize / clock(probe)  # bytes a millisecond
    print(f"{given.model}, {given.quantize or 'as it is'}, {given.threads} threads, {given.context} tokens cached")
    print(f"{'':10}{'reads':>9}{f'at {speed / 1e6:.1f} GB/s':>16}", *(f"{f'{width} tokens':>16}" for width in WIDTHS))
    for engine in runners:
        cells = [found[engine, width] for width in WIDTHS]
        shown = [f"{f'{cell.wall:.1f} ({cell.processor:.1f})':>16}" for cell in cells]
        print(f"{engine:10}{gib(reads[engine]):>9}{reads[engine] / speed:>13.1f} ms", *shown)


if __name__ == "__main__":
    main()
