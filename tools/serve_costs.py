"""What HTTP costs: the CPU time of a server for its texts over that of the same texts without one.

python -m tools.serve_costs --blocks 6 --concurrency 1 16

Both are processes of their own that take turns, block by block, with one thread for passes and a policy that reads no
clock. With several clients the server's texts share passes, and so do those of `generate_many` beside it.
"""

import argparse
import asyncio
import json
import subprocess
import sys

import httpx
import numpy as np
import psutil  # type: ignore[import-untyped]

from specctl.statistics.intervals import Interval, bootstrap
from tools.measure.engines import written
from tools.own_server import own_server
from tools.server_stress import OPENINGS, PATH

TOKENS = 160
PAIR = ("-p", "embedded-constant", "--set", "threads=1")
WRITER = """
import json, sys, time, specctl
profile, tokens, rows = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
pair = specctl.load(profile, overrides=["threads=1"])
for line in sys.stdin:
    prompts = json.loads(line)
    began = time.process_time()
    for text in pair.generate_many(prompts, batch=rows, max_new_tokens=tokens, logit_bias={"0": -100.0}):
        assert text.tokens, text
    print(time.process_time() - began, flush=True)
"""


async def ask(url: str, prompts: list[str], *, stream: bool) -> None:
    """Requests for texts, all at once."""

    async def one(prompt: str) -> None:
        body = {"prompt": prompt, "max_tokens": TOKENS, "logit_bias": {"0": -100}, "stream": stream, "temperature": 0}
        async with client.stream("POST", f"{url}{PATH}", json=body) as answer:
            assert answer.status_code == 200, await answer.aread()
            async for _ in answer.aiter_bytes():
                pass

    async with httpx.AsyncClient(timeout=600) as client:
        await asyncio.gather(*map(one, prompts))


def cpu_seconds(process: psutil.Process) -> float:
    spent = process.cpu_times()
    return float(spent.user + spent.system)


class Writer:
    """A process that writes the same texts without a server."""

    def __init__(self, rows: int) -> None:
        command = [sys.executable, "-c", WRITER, PAIR[1], str(TOKENS), str(rows)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def seconds(self, prompts: list[str]) -> float:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps(prompts), file=self.process.stdin, flush=True)
        return float(self.process.stdout.readline())


def measure(concurrency: int, blocks: int) -> dict[str, Interval]:
    """The ratios over blocks, streamed and whole."""
    rounds = max(1, 8 // concurrency)
    prompts = [f"{OPENINGS[number % len(OPENINGS)]} {number}" for number in range(concurrency * rounds)]
    parts = [prompts[start : start + concurrency] for start in range(0, len(prompts), concurrency)]
    found: dict[str, list[float]] = {"whole": [], "stream": []}
    writer = Writer(concurrency)
    with own_server("--batch", str(concurrency), *PAIR) as (url, process):
        server = psutil.Process(process.pid)
        try:
            for block in range(-1, blocks):  # the first warms up
                alone = sum(map(writer.seconds, parts))
                for kind, ratios in found.items():
                    before = cpu_seconds(server)
                    for part in parts:
                        asyncio.run(ask(url, part, stream=kind == "stream"))
                    if block >= 0:
                        ratios.append((cpu_seconds(server) - before) / alone)
        finally:
            writer.process.kill()
            writer.process.wait()
    return {kind: mean(ratios) for kind, ratios in found.items()}


def mean(ratios: list[float]) -> Interval:
    values = np.array(ratios)
    return bootstrap(lambda weights: weights @ values / len(values), len(values))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 16])
    asked = parser.parse_args()
    for concurrency in asked.concurrency:
        for kind, ratio in measure(concurrency, asked.blocks).items():
            print(f"{concurrency} at once, {kind}: {written(ratio)} of the CPU time without a server", flush=True)


if __name__ == "__main__":
    main()
