"""Pairs of real shapes on a pretended device, whose clock says what rounds take."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from random import Random
from statistics import mean
from typing import Literal
from unittest.mock import patch

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from specctl.decoding.drafters import ModelDrafter
from specctl.decoding.round import verified_round
from specctl.decoding.sampling import Sampling
from specctl.models.placing.engine_table import build_runner
from specctl.models.running.engines import EngineSettings
from specctl.models.running.slot import Slot
from tests.support.pretend_cuda import Costs, Devices
from tests.support.pretend_cuda.captures import Node
from tools.synthetic.shapes import Shape

CLOCKED = ("specctl.models.passes.preparation_time",)
CONTEXT, WARM, LONGEST = 500, 24, 8
ACCEPTED = 0.7
"""How probable it is that a token of the draft is the target's too."""

Played = Callable[[ModelDrafter | None, int], float]
"""Plays rounds of a drafter and tells the mean milliseconds of those after the first `WARM`."""


@cache
def model(shape: Shape) -> PreTrainedModel:
    """A Llama in bfloat16 without numbers."""
    config = LlamaConfig(**shape.config, tie_word_embeddings=False)
    with torch.device("meta"):
        return LlamaForCausalLM(config).to(torch.bfloat16).eval()


@contextmanager
def clocked(
    shapes: tuple[Shape, Shape], engine: Literal["eager", "graph"], sampling: Sampling, costs: Costs
) -> Iterator[tuple[Slot, Played]]:
    """A pair on one device: its draft, and what plays rounds."""
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
        settings = EngineSettings(engine=engine, notice=print)
        target, draft = (
            build_runner(cuda.move(model(shape), "cuda:0"), shape.vocabulary, "it", settings) for shape in shapes
        )
        generator, text = torch.Generator("cuda:0"), [1] * CONTEXT
        for runner in (target, draft):
            runner.extend(text[:-1], keep=0)

        def played(drafter: ModelDrafter | None, count: int) -> float:
            if drafter is not None:
                drafter.begin(sampling, frozenset(), generator)
            took: list[float] = []
            for index in range(count):
                began = cuda.clock.now
                verified_round(target, drafter, text, LONGEST, sampling, frozenset(), generator, index=index)
                took.append(cuda.clock.now - began)
                for runner in (target, draft):  # the context stays as long as it is
                    runner.rollback(CONTEXT - 1)
            return 1e3 * mean(took[WARM:] or [0.0])

        yield draft, played
