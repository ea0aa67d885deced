"""Asks a server of its own at random, and counts answers that are lost, doubled or mixed up.

python -m tools.server_stress --requests 10000 --fuzz 1000 --workers 2

Some requests are asked alone first. Then they are asked at several concurrencies, whole and streamed, while some
clients read slowly, go away in the middle, drop their connection or send bad bodies. What must be 0: texts that differ
from those of the request alone, streams without exactly one end, bad bodies that are no 4xx, other errors, and texts
that are still written when nobody is left. Memory is shown before and after each part.
"""

import argparse
import asyncio
import json
import random
import re
import sys
import time
from collections import Counter
from contextlib import suppress
from typing import Any

import httpx
import psutil  # type: ignore[import-untyped]

from tools.own_server import own_server

PATH = "/v1/completions"
CONCURRENCIES = (1, 4, 16, 64)
OPENINGS = ("Once upon a time", "The old man", "One day, a girl", "It was", "The river and", "A dog", "Tom said", "Why")
HUES = ("whole", "whole", "stream", "stream", "stream", "slow", "leaves", "leaves early", "drops", "bad")


def requests() -> list[dict[str, Any]]:
    """Requests of several kinds whose texts are the same each time."""
    found: list[dict[str, Any]] = []
    for number in range(40):
        one: dict[str, Any] = {"prompt": OPENINGS[number % len(OPENINGS)], "max_tokens": 4 + number % 29}
        if number % 3:
            one |= {"temperature": 0.5 + number % 2, "seed": number}
        if number % 5 == 1:
            one["stop"] = ["."]
        if number % 10 == 9:
            one["specctl"] = {"draft": False}
        found.append(one)
    return found


def bad_body(draw: random.Random) -> bytes:
    """A body that is no request."""
    good = json.dumps({"prompt": "a", "max_tokens": 3}).encode()
    kind = draw.randrange(5)
    if kind == 0:
        return good[: draw.randrange(len(good))]
    if kind == 1:
        return bytes(draw.randrange(256) for _ in range(draw.randrange(1, 60)))
    if kind == 2:
        return json.dumps(_anything(draw, 4)).encode()
    key = draw.choice(["prompt", "max_tokens", "temperature", "stop", "n", "logit_bias", "specctl", "stream", "x"])
    return json.dumps({"prompt": "a", "max_tokens": 3, key: _anything(draw, 3)}).encode()


def _anything(draw: random.Random, depth: int) -> Any:
    simple = [None, True, -1, 1 << 70, 1e308, "", "\ud800", "x" * draw.randrange(50), draw.random() - 3]
    if not depth or draw.random() < 0.5:
        return draw.choice(simple)
    inner = [_anything(draw, depth - 1) for _ in range(draw.randrange(4))]
    return inner if draw.random() < 0.5 else {f"k{number}": one for number, one in enumerate(inner)}


class Clients:
    """Ask, and count what comes.

    Args:
        url: of the server.
        seed: of what they do.
    """

    def __init__(self, url: str, seed: int) -> None:
        limits = httpx.Limits(max_connections=128, max_keepalive_connections=32)
        self.http = httpx.AsyncClient(base_url=url, timeout=600, limits=limits)
        self.draw = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.asked = requests()
        self.texts: list[str] = []

    async def alone(self) -> None:
        """Learn each request's text."""
        for one in self.asked:
            self.texts.append((await self.http.post(PATH, json=one)).json()["choices"][0]["text"])

    async def part(self, count: int, concurrency: int) -> None:
        """So many requests, so many at a time."""
        left = iter(range(count))

        async def client() -> None:
            for _ in left:
                await self.ask(self.draw.choice(HUES), self.draw.randrange(len(self.asked)))

        await asyncio.gather(*(client() for _ in range(concurrency)))

    async def ask(self, kind: str, number: int) -> None:
        self.counts[kind] += 1
        try:
            await self._ask(kind, number)
        except httpx.HTTPError as error:
            self.counts[f"FAILED {type(error).__name__}"] += 1

    async def _ask(self, kind: str, number: int) -> None:
        body = self.asked[number]
        if kind == "bad":
            await self.fuzz()
        elif kind == "whole":
            answer = await self.http.post(PATH, json=body)
            if answer.status_code != 200:
                self.counts[f"FAILED {answer.status_code}"] += 1
            elif answer.json()["choices"][0]["text"] != self.texts[number]:
                self.counts["FAILED mixed up"] += 1
        elif kind == "leaves early":
            with suppress(TimeoutError):
                await asyncio.wait_for(self.http.post(PATH, json=body), self.draw.random() * 0.05)
        elif kind == "drops":
            await self._drop(body)
        else:
            await self._stream(kind, body, self.texts[number])

    async def _stream(self, kind: str, body: dict[str, Any], expected: str) -> None:
        text, ends, done = "", 0, 0
        async with self.http.stream("POST", PATH, json={**body, "stream": True}) as answer:
            if answer.status_code != 200:
                self.counts[f"FAILED {answer.status_code}"] += 1
                return
            pieces = 0
            async for line in answer.aiter_lines():
                if not line:
                    continue
                if line == "data: [DONE]":
                    done += 1
                    continue
                choice = json.loads(line.removeprefix("data: "))["choices"][0]
                text += choice["text"]
                ends += choice["finish_reason"] is not None
                pieces += 1
                if kind == "leaves" and pieces > self.draw.randrange(4):
                    if not expected.startswith(text):
                        self.counts["FAILED mixed up"] += 1
                    return
                if kind == "slow":
                    await asyncio.sleep(self.draw.random() * 0.05)
        if (ends, done) != (1, 1):
            self.counts["FAILED lost or doubled"] += 1
        if text != expected:
            self.counts["FAILED mixed up"] += 1

    async def _drop(self, body: dict[str, Any]) -> None:
        """A connection that ends without a word, at any time."""
        sent = json.dumps({**body, "stream": True}).encode()
        head = (
            f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(sent)}\r\n\r\n"
        )
        _, writer = await asyncio.open_connection(self.http.base_url.host, self.http.base_url.port)
        whole = head.encode() + sent
        writer.write(whole[: self.draw.choice([len(whole), self.draw.randrange(len(whole))])])
        await asyncio.sleep(self.draw.random() * 0.05)
        writer.transport.abort()

    async def fuzz(self) -> None:
        """A bad body; some may happen to be good."""
        kind = {"content-type": "application/json"}
        answer = await self.http.post(PATH, content=bad_body(self.draw), headers=kind)
        self.counts[f"bad body: {answer.status_code}"] += 1
        if answer.status_code >= 500 or (answer.status_code >= 400 and "message" not in answer.json()["error"]):
            self.counts["FAILED bad body"] += 1

    async def rest(self) -> None:
        """Nothing must be left."""
        until = time.monotonic() + 30
        figure = "?"
        while time.monotonic() < until:
            page = (await self.http.get("/metrics")).text
            figure = " ".join(re.findall(r"^specctl_(?:texts_running|requests_waiting) (\S+)$", page, re.M))
            if figure == "0.0 0.0":
                return
            await asyncio.sleep(0.1)
        self.counts[f"FAILED left: {figure}"] += 1


async def campaign(url: str, process: psutil.Process, options: argparse.Namespace) -> Counter[str]:
    clients = Clients(url, options.seed)

    def memory(what: str) -> None:
        used = sum(one.memory_info().rss for one in (process, *process.children(recursive=True)))
        print(f"{what:>24}  {used / 2**20:7.1f} MiB", flush=True)

    await clients.alone()
    memory("requests alone")
    each = options.requests // (options.turns * len(CONCURRENCIES))
    for turn in range(options.turns):
        for concurrency in CONCURRENCIES:
            await clients.part(each, concurrency)
            await clients.rest()
            memory(f"{each} at {concurrency}, turn {turn + 1}")
    for _ in range(options.fuzz):
        await clients.fuzz()
    memory(f"{options.fuzz} bad bodies")
    await clients.http.aclose()
    return clients.counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--turns", type=int, default=2, help="through all concurrencies")
    parser.add_argument("--fuzz", type=int, default=200)
    parser.add_argument("--batch", default="8")
    parser.add_argument("--workers", help="processes that each write as many texts; their memory is counted too")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    flags = ["--batch", options.batch, "--policy", "constant:draft_length=3", "--set", "sampling.verification=token"]
    flags += ["--workers", options.workers] if options.workers else []
    with own_server("--engine", "onnx", "--threads", "1", *flags) as (url, process):
        counts = asyncio.run(campaign(url, psutil.Process(process.pid), options))
    code = process.returncode
    for what, count in sorted(counts.items()):
        print(f"{what:>24}  {count}")
    failed = sum(count for what, count in counts.items() if what.startswith("FAILED"))
    print(f"exit code {code}, failures {failed}")
    sys.exit(1 if failed or code else 0)


if __name__ == "__main__":
    main()
