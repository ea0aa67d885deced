"""The host's time for a drafted token on the graph engine, without the replay: ``python -m tools.host_time``.

Passes are captured by a stand-in whose replay does nothing, on the CPU. What is left is what the host does for each
token: the policy's decision, the copy of the token's numbers, and reading the last ones. On a CUDA device calls of the
driver come on top, for two copies, a launch and a wait.
"""

from collections.abc import Callable
from statistics import median
from time import process_time
from typing import Annotated, Any

import torch
import typer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from specctl.decoding.drafters import ModelDrafter
from specctl.decoding.sampling import Sampling
from specctl.models.running.graph import GraphPasses
from specctl.models.running.slot import Slot
from specctl.policies import Setting, StoppingPolicy

BAR = 60.0
"""Microseconds that a drafted token may take of the host."""
DRAFTED = 8
CONTEXT = 20


def main(
    repeats: Annotated[int, typer.Option(min=1, help="Measurements of each row; the least of them counts.")] = 9,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds in a measurement.")] = 200,
) -> None:
    """Print microseconds of processor time for a drafted token, by policy and sampling; exits with 1 above the bar.

    What else a machine does only adds to them, so the least measurement is compared with the bar.
    """
    torch.set_num_threads(1)
    settings = [
        Setting("constant", (("draft_length", DRAFTED),)),
        Setting("svip", (("threshold", 1e9),)),
        # Tokens as good as free, so that it never stops: a draft of one token is mostly the round's beginning and end.
        Setting("cost-optimal", (("cost_ratio", 1e-9), ("max_draft", DRAFTED))),
    ]
    rows = [(setting, sampling) for setting in settings for sampling in (Sampling(), Sampling(1.0))]
    taken: list[list[float]] = [[] for _ in rows]
    for _ in range(repeats):  # in turn, so that a busy while falls on all rows
        for (setting, sampling), found in zip(rows, taken, strict=True):
            found.append(microseconds(setting.build(), sampling, rounds))
    for (setting, sampling), found in zip(rows, taken, strict=True):
        label = "greedy" if sampling.greedy else "temperature 1"
        print(f"{setting.policy:13} {label:14} {min(found):6.1f} us a drafted token (median {median(found):.1f})")
    if any(min(found) > BAR for found in taken):
        raise typer.Exit(1)


@torch.inference_mode()
def microseconds(policy: StoppingPolicy, sampling: Sampling, rounds: int) -> float:
    """Of processor time, for a drafted token in the middle of a text.

    Args:
        policy: ends the drafts.
        sampling: how tokens are drawn.
        rounds: how many drafts are timed.
    """
    runner = Slot(GraphPasses(_model(), 64, _nothing))
    drafter = ModelDrafter(runner, policy)
    runner.extend([1] * CONTEXT, keep=0)
    drafter.begin(sampling, frozenset(), torch.Generator())
    text = [1] * (CONTEXT + 1)
    drafter.draft(text, DRAFTED)
    drafted, began = 0, process_time()
    for _ in range(rounds):
        runner.rollback(CONTEXT)
        drafted += len(drafter.draft(text, DRAFTED).tokens)
    return 1e6 * (process_time() - began) / drafted


def _nothing(step: Callable[[], Any]) -> Callable[[], Any]:
    """A capture whose replay does nothing."""
    results = step()
    return lambda: results


def _model() -> PreTrainedModel:
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4
    )
    model: PreTrainedModel = LlamaForCausalLM(config)
    model.eval()  # type: ignore[no-untyped-call]
    return model


if __name__ == "__main__":
    typer.run(main)
