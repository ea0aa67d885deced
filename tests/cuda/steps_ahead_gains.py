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
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parent))

from clocked_pairs import LONGEST, WARM, clocked

from specctl.decoding.drafters import ModelDrafter
from specctl.decoding.sampling import Sampling
from specctl.decoding.steps_ahead import Lead
from specctl.models.running.graph import Capturing
from specctl.policies.base import Rule
from specctl.policies.published import Constant
from specctl.records import DraftStep
from tests.support.pretend_cuda import Costs
from tools.synthetic.shapes import SHAPES

WAYS: dict[str, tuple[Any, ...]] = {
    "waits for each": (patch.object(Capturing, "runs_ahead", False),),
    "always ahead": (patch.object(Lead, "pays", lambda _, __: True),),
    "as it pays": (),
}


class StopsByChance(Rule):
    """Stops after each token with the same probability."""

    def __init__(self, share: float) -> None:
        self._share, self._coins = share, Random(1)

    def draft_limit(self) -> int:
        return LONGEST

    def should_stop(self, step: DraftStep) -> bool:  # noqa: ARG002 - signature of the interface
        return self._coins.random() < self._share


Row = list[float]
"""Milliseconds of a round in each of the `WAYS`, the mean once everything is captured and timed."""


def rows(pair: str, sampling: Sampling, policies: list[Callable[[], Rule]], costs: Costs, rounds: int) -> Iterator[Row]:
    """Of each policy, on one device that has captured all there is to capture."""
    with clocked(SHAPES[pair], "graph", sampling, costs) as (draft, played):
        for length in range(1, LONGEST + 1):
            played(ModelDrafter(draft, Constant(length)), 1)
        for policy in policies:
            found: Row = []
            for way in WAYS.values():
                with ExitStack() as inner:
                    for patched in way:
                        inner.enter_context(patched)
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
