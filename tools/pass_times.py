"""How long a model's passes take by engine, beside the time that reading its weights from memory takes.

Passes of all engines take turns, and so does a sum over a tensor larger than any cache, which measures the bandwidth.

    python -m tools.pass_times FOLDER --quantize int4 --threads 2
"""

import argparse
from collections.abc import Mapping
from itertools import product
from statistics import median
from time import perf_counter, process_time

import torch
from torch import nn
from transformers import PreTrainedModel

from specctl.models.loading.model import load_model
from specctl.models.loading.pair import load_pair
from specctl.models.running.compilation import Compiler
from specctl.models.running.engines import EngineSettings, engine_name
from specctl.models.running.runner import EagerRunner, Runner
from specctl.models.running.static import StaticRunner
from specctl.observing.timing import fill, ordinary_tokens
from specctl.profile.schema import ModelTable, Profile

WIDTHS = (1, 2, 4, 6, 8)
PROBE = 1 << 28
"""Numbers in the tensor whose sum measures the bandwidth, 1 GiB."""
ENGINES = ("onnx", "eager", "compiled")


def onnx_runner(table: ModelTable) -> Runner:
    """The model run by onnxruntime alone."""
    profile = Profile(target=table, engine="onnx")
    settings = EngineSettings.of(profile, notice=print, progress=print)
    pair = load_pair(profile, with_drafts=False, engines=settings, measured=False, torch_weights=False)
    if not engine_name(pair.target).startswith("onnx"):
        raise SystemExit("onnxruntime does not run it")
    return pair.target


def torch_runners(model: PreTrainedModel, compiles: bool) -> dict[str, Runner]:
    """The model run by torch, eagerly and, if wanted, compiled."""
    vocabulary = model.config.get_text_config().vocab_size
    runners: dict[str, Runner] = {"eager": EagerRunner(model, vocabulary)}
    if compiles:
        runners["compiled"] = StaticRunner(model, vocabulary, compiler=Compiler("it", print, print))
    return runners


def read_bytes(model: PreTrainedModel) -> int:
    """Bytes of the weights that a pass reads: all but tables of embeddings that are not the output layer too."""
    tables = {id(part.weight) for part in model.modules() if isinstance(part, nn.Embedding)}
    tables.discard(id(model.get_output_embeddings().weight))  # type: ignore[no-untyped-call]
    total = 0
    for weight in model.parameters():
        inner = weight.__tensor_flatten__()[0] if hasattr(weight, "__tensor_flatten__") else []
        parts = [getattr(weight, name) for name in inner] or [weight]
        total += sum(part.nbytes for part in parts) * (id(weight) not in tables)
    return total


@torch.inference_mode()
def times(
    runners: Mapping[str, Runner], context: int, rounds: int
) -> tuple[dict[tuple[str, int], list[tuple[float, float]]], float]:
    """Wall and processor seconds of passes by engine and width, and the bandwidth in bytes a second."""
    found: dict[tuple[str, int], list[tuple[float, float]]] = {key: [] for key in product(runners, WIDTHS)}
    probe, sums = torch.ones(PROBE), []
    for runner in runners.values():
        fill(runner, ordinary_tokens(context, frozenset()))
    for round_ in range(rounds + 1):  # the first one is a warm-up
        for (engine, width), spent in found.items():
            wall, own = perf_counter(), process_time()
            runners[engine].extend(ordinary_tokens(width, frozenset()), keep=width)
            if round_:
                spent.append((perf_counter() - wall, process_time() - own))
            runners[engine].rollback(context)
        wall = perf_counter()
        probe.sum()
        sums.append(perf_counter() - wall)
    return found, probe.nbytes / median(sums)


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
    runners: dict[str, Runner] = {"onnx": onnx_runner(table)} if "onnx" in given.engines else {}
    reads = 0
    if {"eager", "compiled"} & set(given.engines):
        model = load_model(table, role="target").model
        reads = read_bytes(model)
        runners |= torch_runners(model, "compiled" in given.engines)
    found, bandwidth = times(runners, given.context, given.rounds)
    print(f"{given.model}, {given.quantize}, {given.threads} threads, {given.context} tokens cached")
    print(f"a sum of 1 GiB reads {bandwidth / 1e9:.1f} GB/s")
    if reads:
        print(f"torch reads {reads / 1e6:.0f} MB for a pass, which takes {reads / bandwidth * 1e3:.1f} ms")
    for engine in runners:
        cells = (
            f"{width}: {median(wall for wall, _ in spent) * 1e3:.1f} ms"
            f" (processor {median(own for _, own in spent) * 1e3:.1f}, least {min(spent)[0] * 1e3:.1f})"
            for width in WIDTHS
            if (spent := found[engine, width])
        )
        print(f"{engine:9}", "; ".join(cells))


if __name__ == "__main__":
    main()
