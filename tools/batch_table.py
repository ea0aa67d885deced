"""Speed and latency of several texts at once, by their number and by policy.

python -m tools.batch_table OUTPUTS --write
python -m tools.batch_table OUTPUTS --peers FOLDER --write

Runs `specctl bench --batch N` of the embedded pair on onnxruntime with one thread, greedy and at temperature 1, and
prints a table of each; with --write they become the section of docs/scale.md. With --peers other engines that can run
several texts at once take their turns in the greedy benchmarks, without a draft. What was measured is kept in the
folder and not measured again. About five minutes on an idle machine, with peers seven. What stands behind the tables on
the page stays there.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specctl.peers.engines import ENGINES, NO_DRAFT

PAGE = Path(__file__).parents[1] / "docs" / "scale.md"
HEADING = "### Speed and latency by the number of texts"
BATCHES = (1, 2, 4, 8, 16)
REPEATS = 2
"""How often each candidate runs all prompts: the machine's speed changes from one candidate's turn to the next."""
POLICIES = ("constant:draft_length=5", "cost-optimal")
NAMES = {"none": "none", "constant": "constant, 5 tokens", "cost-optimal": "cost-optimal"}
PEERS = {f"{name}:{NO_DRAFT}": name for name, peer in ENGINES.items() if peer.batches}


def measured(
    folder: Path, batch: int, temperature: float, prompts: int, tokens: int, peers: Path | None = None
) -> dict[str, Any]:
    """The document of one benchmark, from the folder if it is there.

    Args:
        peers: what `tools.install_peers` wrote; None to measure no peers.
    """
    done = folder / f"batch-{batch}-t{temperature:g}{'' if peers is None else '-peers'}.json"
    if not done.exists():
        folder.mkdir(parents=True, exist_ok=True)
        policies = [word for policy in POLICIES for word in ("--policy", policy)]
        sizes = ["--batch", str(batch), "--limit", str(prompts), "-n", str(tokens), "--repeats", str(REPEATS)]
        settings = ["-t", f"{temperature:g}", "--threads", "1", "--set", "engine=onnx", "--json", "-q"]
        others = [] if peers is None else [word for peer in PEERS for word in peer_flags(peer, peers)]
        command = [sys.executable, "-m", "specctl", "bench", *policies, *others, *sizes, *settings]
        print(" ".join(command[3:]), file=sys.stderr)
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        ran = subprocess.run(command, stdout=subprocess.PIPE, env=environment, check=True)
        done.write_bytes(ran.stdout)
    found: dict[str, Any] = json.loads(done.read_bytes())
    return found


def peer_flags(label: str, peers: Path) -> list[str]:
    """How `specctl bench` is told to measure a peer that was installed in this folder."""
    name = PEERS[label]
    models, program = f"{name}={peers / name / 'models'}", f"{name}={peers / name / 'env' / 'bin' / 'python'}"
    return ["--peer", label, "--peer-models", models, "--peer-program", program]


def table(documents: dict[int, dict[str, Any]]) -> str:
    """A line for each policy and number of texts: tokens/s, and percentiles of latencies in milliseconds."""
    lines = [
        "| policy | texts | tokens/s | of none alone | first token p50, p99 (ms) | per token p50, p99 (ms) |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    found = {(each["candidate"], batch): each for batch, one in documents.items() for each in one["overall"]}
    alone = found["none", min(documents)]["tokens_per_second"]
    there = {name for name, _ in found}
    shown_names = {**NAMES, **{label: f"`{label}`" for label in PEERS if label in there}}
    for name, shown in shown_names.items():
        for batch in documents:
            if (name, batch) not in found:  # a peer that failed
                lines.append(f"| {shown} | {batch} | - | - | - | - |")
                continue
            one = found[name, batch]
            rate, latency = one["tokens_per_second"], one["latency"]
            first, each = (
                f"{latency[kind]['p50']:.1f}, {latency[kind]['p99']:.1f}" if latency[kind] else "-"
                for kind in ("ttft_ms", "tpot_ms")
            )
            lines.append(f"| {shown} | {batch} | {rate:,.0f} | {rate / alone:.2f} | {first} | {each} |")
    return "\n".join(lines)


def against_peers(documents: dict[int, dict[str, Any]]) -> str:
    """How our fastest compares with each peer at its best, what differs in their texts, and why a peer failed."""
    speeds: dict[str, list[tuple[float, int]]] = {}
    for batch, one in documents.items():
        for each in one["overall"]:
            speeds.setdefault(each["candidate"], []).append((each["tokens_per_second"], batch))
    best = {name: max(found) for name, found in speeds.items()}
    ours = max(NAMES, key=lambda name: best[name])
    told = [f"The fastest is {NAMES[ours]} with {best[ours][1]} texts."]
    for label in PEERS:
        if label in best:
            rate, size = best[label]
            runs = sum(
                each["runs"] for one in documents.values() for each in one["overall"] if each["candidate"] == label
            )
            differing = sum(each["candidate"] == label for one in documents.values() for each in one["differences"])
            told.append(
                f"It writes {best[ours][0] / rate:.2f} times the tokens/s of `{label}` with {size}, whose texts "
                f"differ from ours in {differing} of {runs} runs."
            )
        for batch, one in documents.items():
            if (why := one.get("failed", {}).get(label)) is not None:
                told.append(f"With {batch} texts it failed: {why}.")
    waits = (
        "Peers take N prompts at once, padded to the longest, and wait for the last of them; they run without a draft."
    )
    return " ".join([*told, waits]) if len(told) > 1 else ""


def section(tables: dict[float, str], facts: str) -> str:
    """The section of the page."""
    parts = [f"{HEADING}\n\n{facts}"]
    for temperature, rows in tables.items():
        parts.append(f"{'Greedy' if not temperature else f'Temperature {temperature:g}'}:\n\n{rows}")
    return "\n\n".join(parts) + "\n"


def updated(page: str, found: str) -> str:
    """The page with the section in the place of an earlier one, or before the next heading like it."""
    if HEADING in page:
        before, _, rest = page.partition(HEADING)
        former, following, later = rest.partition("\n##")
        return before + found + former.rpartition("|\n")[2] + following + later
    before, heading, later = page.partition("\n### ")
    return f"{before}\n{found}{heading}{later}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what is missing, and show or write the tables."""
    parser = argparse.ArgumentParser(description="Speed and latency of several texts at once.")
    parser.add_argument("folder", type=Path, help="where what was measured is kept")
    parser.add_argument("--prompts", type=int, default=48, help="prompts of each benchmark")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens of each prompt")
    parser.add_argument("--peers", type=Path, help="what tools.install_peers wrote, to measure those peers too")
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES, help="numbers of texts, 1 among them")
    parser.add_argument("--write", action="store_true", help="write the section of docs/scale.md")
    options = parser.parse_args(arguments)
    sizes = options.prompts, options.tokens
    documents = {
        temperature: {batch: measured(options.folder, batch, temperature, *sizes, peers) for batch in options.batches}
        for temperature, peers in ((0.0, options.peers), (1.0, None))
    }
    told = next(iter(documents[0.0].values()))["provenance"]
    facts = (
        f"`python -m tools.batch_table`: the embedded pair on onnxruntime, {sizes[0]} prompts of {sizes[1]} tokens, "
        f"{told['devices']['target']}, {told['created'][:10]}. Latencies are what a text waited, others' passes too."
    )
    if told_of_peers := against_peers(documents[0.0]):
        facts = f"{facts}\n\n{told_of_peers}"
    found = section({temperature: table(some) for temperature, some in documents.items()}, facts)
    if options.write:
        PAGE.write_text(updated(PAGE.read_text("utf-8"), found), encoding="utf-8")
    print(found)


if __name__ == "__main__":
    main()
