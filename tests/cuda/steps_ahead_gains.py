"""What steps that run ahead gain at the shapes of real pairs, by the clock of pretended devices. Prints a table.

    PYTHONPATH=. python tests/cuda/steps_ahead_gains.py

A replay costs the device the bytes that its kernels move over a bandwidth, and the least time of a kernel; a call costs
the host a fixed time, a wait some more, and each replay the Python around it. Rounds end where a coin says so, the
same coins for every row: what a policy costs does not hang on why it stops.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from random import Random
from statistics import mean
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from pretend_cuda import Costs, Devices
from pretend_cuda.captures import Node
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from specctl.decoding.drafters import ModelDrafter
from specctl.decoding.lead import Lead
from specctl.decoding.round import verified_round
from specctl.decoding.sampling import Sampling
from specctl.models.running.engines import EngineSettings, build_runner
from specctl.models.running.graph import Capturing
from specctl.policies.base import Rule
from specctl.policies.constant import Constant
from specctl.records import DraftStep
from tools.synthetic.shapes import SHAPES, Shape

CLOCKED = ("specctl.models.running.preparing",)
CONTEXT, WARM, LONGEST = 500, 24, 8
ACCEPTED = 0.7
"""How probable it is that a token of the draft is the target's too."""
WAYS: dict[str, Callable[[ExitStack], None]] = {
    "waits for each": lambda stack: stack.enter_context(patch.object(Capturing, "runs_ahead", False)),
    "always ahead": lambda stack: stack.enter_context(patch.object(Lead, "pays", lambda _, __: True)),
    "as it pays": lambda _: None,
}


class StopsByChance(Rule):
    """Stops after each token with the same probability."""

    def __init__(self, share: float) -> None:
        self._share, self._coins = share, Random(1)

    def draft_limit(self) -> int:
        return LONGEST

    def should_stop(self, step: DraftStep) -> bool:  # noqa: ARG002 - signature of the interface
        return self._coins.random() < self._share


@cache
def model(shape: Shape) -> PreTrainedModel:
    """A Llama in bfloat16 without numbers."""
    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=shape.context,
        tie_word_embeddings=False,
    )
    with torch.device("meta"):
        return LlamaForCausalLM(config).to(torch.bfloat16).eval()


Row = list[float]
"""Milliseconds of a round in each of the `WAYS`, the mean once everything is captured and timed."""


def rows(pair: str, sampling: Sampling, policies: list[Callable[[], Rule]], costs: Costs, rounds: int) -> Iterator[Row]:
    """Of each policy, on one device that has captured all there is to capture."""
    big, small = SHAPES[pair]
    coins = Random(2)

    def numbers(tensor: torch.Tensor) -> torch.Tensor:
        """The draft's tokens are all 0, and the target's often."""
        found = torch.zeros(tensor.shape, dtype=tensor.dtype)
        if tensor.dtype == torch.int64 or tensor.dim() == 2:
            found[...] = torch.tensor([float(coins.random() > ACCEPTED) for _ in range(found.numel())]).view_as(found)
        return found

    with ExitStack() as stack:
        stack.enter_context(patch.object(Node, "run", lambda _: None))  # there are no numbers
        stack.enter_context(patch.object(Node, "outside", lambda _: []))
        cuda = stack.enter_context(Devices(shapes_only=True, clock=CLOCKED, costs=costs))
        stack.enter_context(torch.inference_mode())
        cuda.answers = numbers
        settings = EngineSettings(engine="graph", notice=print)
        target, draft = (
            build_runner(cuda.move(model(shape), "cuda:0"), shape.vocabulary, "it", settings) for shape in (big, small)
        )
        generator, text = torch.Generator("cuda:0"), [1] * CONTEXT
        for runner in (target, draft):
            runner.extend(text[:-1], keep=0)

        def played(drafter: ModelDrafter, count: int) -> float:
            drafter.begin(sampling, frozenset(), generator)
            took: list[float] = []
            for index in range(count):
                began = cuda.clock.now
                verified_round(target, drafter, text, LONGEST, sampling, frozenset(), generator, index=index)
                took.append(cuda.clock.now - began)
                for runner in (target, draft):  # the context stays as long as it is
                    runner.rollback(CONTEXT - 1)
            return 1e3 * mean(took[WARM:] or [0.0])

        for length in range(1, LONGEST + 1):
            played(ModelDrafter(draft, Constant(length)), 1)
        for policy in policies:
            found: Row = []
            for way in WAYS.values():
                with ExitStack() as inner:
                    way(inner)
                    found.append(played(ModelDrafter(draft, policy()), WARM + rounds))
            yield found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", nargs="+", default=["llama3-8b-1b", "llama2-7b-68m"], choices=SHAPES)
    parser.add_argument("--call", type=float, default=8.0, help="microseconds of the host for a call (default 8)")
    parser.add_argument("--python", type=float, default=40.0, help="microseconds of Python for a replay (default 40)")
    parser.add_argument("--sampling", nargs="+", default=["greedy", "T=1"], choices=["greedy", "T=1"])
    parser.add_argument("--bandwidth", type=float, default=3.35, help="of the device's memory in TB/s (default 3.35)")
    parser.add_argument("--rounds", type=int, default=100, help="rounds that are measured (default 100)")
    given = parser.parse_args()
    replay = (given.call + given.python) * 1e-6
    costs = Costs(call=given.call * 1e-6, replay=replay, bandwidth=given.bandwidth * 1e12)
    print("| pair | sampling | a draft ends | " + " | ".join(f"{way}, ms a round" for way in WAYS) + " |")
    print("| --- | --- | --- |" + " --- |" * len(WAYS))
    policies: dict[str, Callable[[], Rule]] = {"after 5 tokens": lambda: Constant(5)}
    for share in (0.02, 0.1, 0.3):
        policies[f"after each with {share:.0%}"] = lambda share=share: StopsByChance(share)  # type: ignore[misc]
    for pair in given.pairs:
        for name in given.sampling:
            sampling = Sampling(float(name == "T=1"))
            for ends, row in zip(
                policies, rows(pair, sampling, [*policies.values()], costs, given.rounds), strict=True
            ):
                print(f"| {pair} | {name} | {ends} | " + " | ".join(f"{one:.2f}" for one in row) + " |", flush=True)


if __name__ == "__main__":
    main()
