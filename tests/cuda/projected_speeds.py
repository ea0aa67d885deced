"""What drafts would bring at the shapes of real pairs, by the clock of pretended devices. Prints a table.

    PYTHONPATH=. python tests/cuda/projected_speeds.py

The device takes for a kernel the bytes that it moves over the bandwidth, and a least time; the host a fixed time for a
call. A round of K draft tokens is counted with the tokens that it brings if each draft token is accepted with the
same probability a, whatever the others are: (1 - a^(K + 1)) / (1 - a) (Leviathan et al. 2023, equation 1).
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

from clocked_pairs import WARM, clocked
from pretend_cuda import Costs

from specctl.decoding.drafters import ModelDrafter
from specctl.decoding.sampling import Sampling
from specctl.policies.rules.constant import Constant
from tools.synthetic.shapes import SHAPES, Shape

ROUNDS = 6
PAIRS = SHAPES | {"llama3-70b-8b": (Shape(80, 8192, 64, 8, 28672, 128256), SHAPES["llama3-8b-1b"][0])}


def tokens(length: int, accepted: float) -> float:
    """The mean number of tokens of a round."""
    return (1 - accepted ** (length + 1)) / (1 - accepted)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair", default="llama3-8b-1b", choices=PAIRS)
    parser.add_argument("--call", type=float, default=8.0, help="microseconds of the host for a call (default 8)")
    parser.add_argument("--python", type=float, default=40.0, help="microseconds of Python for a replay (default 40)")
    parser.add_argument("--bandwidth", type=float, default=3.35, help="of the device's memory in TB/s (default 3.35)")
    parser.add_argument("--lengths", type=int, nargs="+", default=[3, 5, 7], help="of a draft (default 3 5 7)")
    parser.add_argument("--accepted", type=float, nargs="+", default=[0.6, 0.7, 0.8], help="default 0.6 0.7 0.8")
    parser.add_argument("--engines", nargs="+", default=["eager", "graph"], choices=["eager", "graph"])
    given = parser.parse_args()
    replay = (given.call + given.python) * 1e-6
    costs = Costs(call=given.call * 1e-6, replay=replay, bandwidth=given.bandwidth * 1e12)
    print("| engine | draft tokens | ms a round | " + " | ".join(f"a = {one:.0%}" for one in given.accepted) + " |")
    print("| --- | --- | --- |" + " --- |" * len(given.accepted))
    for engine in given.engines:
        with clocked(PAIRS[given.pair], engine, Sampling(), costs) as (draft, played):
            alone = played(None, WARM + ROUNDS)
            print(f"| `{engine}` | none | {alone:.2f} | " + f"{1e3 / alone:.0f} tokens/s | " * len(given.accepted))
            for length in given.lengths:
                took = played(ModelDrafter(draft, Constant(length)), WARM + ROUNDS)
                found = [tokens(length, one) / took for one in given.accepted]
                shown = [f"{1e3 * one:.0f} tokens/s, {one * alone:.2f}x" for one in found]
                print(f"| `{engine}` | {length} | {took:.2f} | " + " | ".join(shown) + " |", flush=True)


if __name__ == "__main__":
    main()
