"""What one draft step costs, by passes, bytes and time: a draft head beside a small draft model, at a real shape.

Weights are random: a step's cost does not depend on them. The head reads random states.

    python -m tools.step_costs llama3-8b-1b --dtype bfloat16

prints for each network its parameters, the weights that every step reads (the target's embeddings, which the head uses,
are in memory already), the time of a step behind a context, and its cache.
"""

import argparse
import gc
from collections.abc import Callable
from statistics import median
from time import perf_counter

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from specctl.models.draft_heads.chain_runner import ChainPasses
from specctl.models.draft_heads.eagle3 import Eagle3Config, Eagle3Head
from specctl.models.draft_heads.head_layers import LayerShape
from specctl.models.passes.ordinary_tokens import LAST, ordinary_tokens
from specctl.models.passes.synchronisation import wait
from specctl.models.running.eager import EagerPasses
from specctl.models.running.slot import Slot
from specctl.observing.pass_times import fill
from specctl.printable import gib
from tools.synthetic.shapes import SHAPES, Shape

DRAFT_VOCABULARY = 32000
"""What published EAGLE-3 heads draft from."""


def head_of(shape: Shape, dtype: torch.dtype, device: str) -> tuple[Slot, nn.Module]:
    """An EAGLE-3 head for a target of this shape, over embeddings like the target's; its runner and the head."""
    layer = LayerShape(shape.hidden, shape.intermediate, shape.heads, shape.kv_heads, shape.head_dim)
    drafts = min(DRAFT_VOCABULARY, shape.vocabulary)
    layers = (2, shape.layers // 2, shape.layers - 3)
    config = Eagle3Config(layer, layers, shape.vocabulary, drafts, shape.hidden, context=shape.context)
    with torch.device(device):
        embeddings = nn.Embedding(shape.vocabulary, shape.hidden, dtype=dtype)
        head = Eagle3Head(config, torch.arange(drafts), embeddings).to(dtype).eval()
    return Slot(ChainPasses(head, shape.vocabulary)), head


def draft_of(shape: Shape, dtype: torch.dtype, device: str) -> tuple[Slot, nn.Module]:
    """A draft model of this shape; its runner and the model."""
    config = LlamaConfig(**shape.config, tie_word_embeddings=True, dtype=dtype)
    with torch.device(device):
        model = LlamaForCausalLM(config).to(dtype).eval()  # type: ignore[arg-type]
    return Slot(EagerPasses(model, shape.vocabulary)), model


def step_times(runner: Slot, context: int, steps: int) -> list[float]:
    """Milliseconds of single steps behind a context, in rounds of four as they are drafted."""
    found = []
    with torch.inference_mode():
        fill(runner, ordinary_tokens(context, LAST))
        for _ in range(steps):
            for token in ordinary_tokens(4, LAST):
                wait(runner.device)
                began = perf_counter()
                runner.extend([token], keep=1)
                wait(runner.device)
                found.append((perf_counter() - began) * 1e3)
            runner.rollback(context)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=8, help="of four steps, for each network")
    args = parser.parse_args()
    target, draft = SHAPES[args.shape]
    dtype = getattr(torch, args.dtype)
    makers: dict[str, Callable[[], tuple[Slot, nn.Module]]] = {
        "EAGLE-3 head": lambda: head_of(target, dtype, args.device),
        "draft model": lambda: draft_of(draft, dtype, args.device),
    }
    made = {name: make() for name, make in makers.items()}
    gc.collect()
    times: dict[str, list[float]] = {name: [] for name in made}
    for _ in range(args.rounds):  # interleaved, so that a machine that slows down slows both
        for name, (runner, _) in made.items():
            times[name] += step_times(runner, args.context, 2)[4:]  # the first round is a warm-up
    print(f"{args.shape}, {args.dtype}, {args.device}, {torch.get_num_threads()} threads, {args.context} tokens cached")
    print(f"{'':14}{'parameters':>15}{'read a step':>14}{'passes':>8}{'ms a step':>12}{'cache / 1k':>12}")
    item = torch.empty(0, dtype=dtype).element_size()
    for name, (_, network) in made.items():
        weights = sum(weight.numel() * weight.element_size() for weight in network.parameters())
        parameters = sum(weight.numel() for weight in network.parameters())
        cached = (
            network.cached_values
            if isinstance(network, Eagle3Head)
            else 2 * draft.layers * draft.kv_heads * draft.head_dim
        )
        print(
            f"{name:14}{parameters:>15,}{gib(weights):>14}{1:>8}{median(times[name]):>12.1f}"
            f"{gib(cached * item * 1000):>12}"
        )
    ours, theirs = (median(times[name]) for name in made)
    print(f"a step of the head takes {ours / theirs:.2f} of the draft model's")


if __name__ == "__main__":
    main()
