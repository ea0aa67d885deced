"""What HTTP costs: the CPU time of a server for its texts over that of the same texts without one.

python -m tools.serve_costs --blocks 6 --concurrency 1 16

Both are processes of their own that take turns, block by block, with one thread for passes and a policy that reads no
clock. With several clients the server's texts share passes, and so do those of `generate_many` beside it. Clients keep
their connections, as OpenAI's do. What the thread takes that does HTTP is told by itself: two processes that write the
same differ by more than that.
"""

import argparse
import asyncio
import json
import subprocess
import sys
from pathlib import Path

import httpx
import numpy as np

from specctl.reporting.table import show_interval
from specctl.statistics import Interval, bootstrap
from tools.own_server import own_server
from tools.server_stress import OPENINGS, PATH

TOKENS = 160
TEXTS = 16
"""Of a block."""
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


async def ask(client: httpx.AsyncClient, parts: list[list[str]], *, stream: bool) -> None:
    """Requests for texts, those of a part all at once."""

    async def one(prompt: str) -> None:
        body = {"prompt": prompt, "max_tokens": TOKENS, "logit_bias": {"0": -100}, "stream": stream, "temperature": 0}
        async with client.stream("POST", PATH, json=body) as answer:
            assert answer.status_code == 200, await answer.aread()
            async for _ in answer.aiter_bytes():
                pass

    for prompts in parts:
        await asyncio.gather(*map(one, prompts))


def cpu_seconds(process: int) -> np.ndarray:
    """Seconds on a processor: of all threads, and of the first one, whose event loop does HTTP."""
    threads = Path(f"/proc/{process}/task")
    first = float((threads / str(process) / "schedstat").read_text().split()[0])
    return np.array([sum(float(one.read_text().split()[0]) for one in threads.glob("*/schedstat")), first]) / 1e9


class Writer:
    """A process that writes the same texts without a server."""

    def __init__(self, profile: str, rows: int) -> None:
        command = [sys.executable, "-c", WRITER, profile, str(TOKENS), str(rows)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def seconds(self, prompts: list[str]) -> float:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps(prompts), file=self.process.stdin, flush=True)
        return float(self.process.stdout.readline())


def measure(profile: str, concurrency: int, blocks: int) -> dict[str, list[Interval]]:
    """Ratios over blocks, streamed and whole: of the server to the same texts without one, and of its HTTP to these."""
    prompts = [f"{OPENINGS[number % len(OPENINGS)]} {number}" for number in range(max(TEXTS, concurrency))]
    parts = [prompts[start : start + concurrency] for start in range(0, len(prompts), concurrency)]
    found: dict[str, list[np.ndarray]] = {"whole": [], "stream": []}
    writer = Writer(profile, concurrency)
    with (
        own_server("-p", profile, "--batch", str(concurrency), "--set", "threads=1") as (url, process),
        asyncio.Runner() as runner,
    ):
        client = httpx.AsyncClient(base_url=url, timeout=600)
        try:
            for block in range(-1, blocks):  # the first warms up
                alone = sum(map(writer.seconds, parts))
                for kind, ratios in found.items():
                    before = cpu_seconds(process.pid)
                    runner.run(ask(client, parts, stream=kind == "stream"))
                    if block >= 0:
                        ratios.append((cpu_seconds(process.pid) - before) / alone)
        finally:
            runner.run(client.aclose())
            writer.process.kill()
            writer.process.wait()
    return {kind: [mean(values) for values in np.array(ratios).T] for kind, ratios in found.items()}


def mean(values: np.ndarray) -> Interval:
    return bootstrap(lambda weights: weights @ values / len(values), len(values))


def share(ratio: Interval) -> str:
    interval = "" if ratio.low is None else f" [{ratio.low:.1%}, {ratio.high:.1%}]"
    return f"{ratio.value:.1%}{interval}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--profile", default="embedded-constant")
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 16])
    asked = parser.parse_args()
    for concurrency in asked.concurrency:
        for kind, (whole, http) in measure(asked.profile, concurrency, asked.blocks).items():
            told = f"{show_interval(whole)} of the CPU time without a server, HTTP {share(http)} of it"
            print(f"{concurrency} at once, {kind}: {told}", flush=True)


if __name__ == "__main__":
    main()
