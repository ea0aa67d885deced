"""What HTTP costs: the CPU time of a server for its texts over that of the same texts without one.

python -m tools.serve_costs --blocks 6 --concurrency 1 16

Both are processes of their own that take turns, block by block, with one thread for passes and a policy that reads no
clock. With several clients the server's texts share passes, and so do those of `generate_many` beside it.
"""

import argparse
import asyncio
import json
import re
import subprocess
import sys
from typing import Any

import httpx
import numpy as np
import psutil  # type: ignore[import-untyped]

TOKENS = 160
OPENINGS = ("Once upon a time", "The old man", "One day, a girl", "It was", "The river and", "A dog", "Tom said", "Why")
PAIR = ("-p", "embedded-constant", "--set", "threads=1")
WRITER = """
import json, os, sys, time, specctl
profile, tokens, rows = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
pair = specctl.load(profile, overrides=["threads=1"])
for line in sys.stdin:
    prompts = json.loads(line)
    began = time.process_time()
    for text in pair.generate_many(prompts, batch=rows, max_new_tokens=tokens, logit_bias={"0": -100.0}):
        assert text.tokens, text
    print(time.process_time() - began, flush=True)
"""


class Server:
    """A server of its own, and what a block of requests costs it."""

    def __init__(self, rows: int) -> None:
        command = [sys.executable, "-m", "specctl", "serve", "--port", "0", "--batch", str(rows), *PAIR]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        self.url = next(found[0] for line in self.process.stderr if (found := re.search(r"http://[^/\s]+", line)))
        self._costs = psutil.Process(self.process.pid)

    def seconds(self, prompts: list[str], *, stream: bool) -> float:
        """Of CPU for a block, its requests all at once."""
        before = sum(self._costs.cpu_times()[:2])
        asyncio.run(self._ask(prompts, stream))
        return float(sum(self._costs.cpu_times()[:2]) - before)

    async def _ask(self, prompts: list[str], stream: bool) -> None:
        async with httpx.AsyncClient(timeout=600) as client:
            await asyncio.gather(*(self._one(client, prompt, stream) for prompt in prompts))

    async def _one(self, client: httpx.AsyncClient, prompt: str, stream: bool) -> None:
        body = {"prompt": prompt, "max_tokens": TOKENS, "logit_bias": {"0": -100}, "stream": stream, "temperature": 0}
        async with client.stream("POST", f"{self.url}/v1/completions", json=body) as answer:
            assert answer.status_code == 200, await answer.aread()
            async for _ in answer.aiter_bytes():
                pass


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


def interval(ratios: list[float]) -> str:
    """The mean with a bootstrap's 95%."""
    draws = np.random.default_rng(0).choice(ratios, (2000, len(ratios))).mean(1)
    low, high = np.quantile(draws, [0.025, 0.975])
    return f"{np.mean(ratios):.3f} [{low:.3f}, {high:.3f}]"


def measure(concurrency: int, blocks: int) -> dict[str, Any]:
    """The ratios of blocks, streamed and whole."""
    server, writer = Server(concurrency), Writer(concurrency)
    rounds = max(1, 8 // concurrency)
    prompts = [f"{OPENINGS[number % len(OPENINGS)]} {number}" for number in range(concurrency * rounds)]
    parts = [prompts[start : start + concurrency] for start in range(0, len(prompts), concurrency)]
    found: dict[str, list[float]] = {"whole": [], "stream": []}
    try:
        for block in range(-1, blocks):  # the first warms up
            alone = sum(writer.seconds(part) for part in parts)
            for kind, ratios in found.items():
                taken = sum(server.seconds(part, stream=kind == "stream") for part in parts)
                if block >= 0:
                    ratios.append(taken / alone)
    finally:
        for process in (server.process, writer.process):
            process.kill()
            process.wait()
    return {kind: interval(ratios) for kind, ratios in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 16])
    asked = parser.parse_args()
    for concurrency in asked.concurrency:
        for kind, ratio in measure(concurrency, asked.blocks).items():
            print(f"{concurrency} at once, {kind}: {ratio} of the CPU time without a server", flush=True)


if __name__ == "__main__":
    main()
