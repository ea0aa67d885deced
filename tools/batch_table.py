"""Speed and latency of several texts at once, by their number and by policy.

python -m tools.batch_table OUTPUTS --write

Runs `specctl bench --batch N` of the embedded pair on onnxruntime with one thread, greedy and at temperature 1, and
prints a table of each; with --write they become the section of docs/scale.md. What was measured is kept in the folder
and not measured again. About four minutes on an idle machine.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[1] / "docs" / "scale.md"
HEADING = "### Speed and latency by the number of texts"
BATCHES = (1, 2, 4, 8, 16)
POLICIES = ("constant:draft_length=5", "cost-optimal")
NAMES = {"none": "none", "constant": "constant, 5 tokens", "cost-optimal": "cost-optimal"}


def measured(folder: Path, batch: int, temperature: float, prompts: int, tokens: int) -> dict[str, Any]:
    """The document of one benchmark, from the folder if it is there."""
    done = folder / f"batch-{batch}-t{temperature:g}.json"
    if not done.exists():
        folder.mkdir(parents=True, exist_ok=True)
        policies = [word for policy in POLICIES for word in ("--policy", policy)]
        sizes = ["--batch", str(batch), "--limit", str(prompts), "-n", str(tokens)]
        settings = ["-t", f"{temperature:g}", "--threads", "1", "--set", "engine=onnx", "--json", "-q"]
        command = [sys.executable, "-m", "specctl", "bench", *policies, *sizes, *settings]
        print(" ".join(command[3:]), file=sys.stderr)
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        ran = subprocess.run(command, stdout=subprocess.PIPE, env=environment, check=True)
        done.write_bytes(ran.stdout)
    found: dict[str, Any] = json.loads(done.read_bytes())
    return found


def table(documents: dict[int, dict[str, Any]]) -> str:
    """A line for each policy and number of texts: tokens/s, and percentiles of latencies in milliseconds."""
    lines = [
        "| policy | texts | tokens/s | of none alone | first token p50, p99 (ms) | per token p50, p99 (ms) |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    found = {(each["candidate"], batch): each for batch, one in documents.items() for each in one["overall"]}
    alone = found["none", min(documents)]["tokens_per_second"]
    for name, shown in NAMES.items():
        for batch in documents:
            one = found[name, batch]
            rate, latency = one["tokens_per_second"], one["latency"]
            first, each = (
                f"{latency[kind]['p50']:.1f}, {latency[kind]['p99']:.1f}" if latency[kind] else "-"
                for kind in ("ttft_ms", "tpot_ms")
            )
            lines.append(f"| {shown} | {batch} | {rate:,.0f} | {rate / alone:.2f} | {first} | {each} |")
    return "\n".join(lines)


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
        _, following, later = rest.partition("\n##")
        return before + found + following + later
    before, heading, later = page.partition("\n### ")
    return f"{before}\n{found}{heading}{later}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what is missing, and show or write the tables."""
    parser = argparse.ArgumentParser(description="Speed and latency of several texts at once.")
    parser.add_argument("folder", type=Path, help="where what was measured is kept")
    parser.add_argument("--prompts", type=int, default=48, help="prompts of each benchmark")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens of each prompt")
    parser.add_argument("--write", action="store_true", help="write the section of docs/scale.md")
    options = parser.parse_args(arguments)
    sizes = options.prompts, options.tokens
    documents = {
        temperature: {batch: measured(options.folder, batch, temperature, *sizes) for batch in BATCHES}
        for temperature in (0.0, 1.0)
    }
    told = documents[0.0][1]["provenance"]
    facts = (
        f"`python -m tools.batch_table`: the embedded pair on onnxruntime, {sizes[0]} prompts of {sizes[1]} tokens, "
        f"{told['devices']['target']}, {told['created'][:10]}. Latencies are what a text waited, others' passes too."
    )
    found = section({temperature: table(some) for temperature, some in documents.items()}, facts)
    if options.write:
        PAGE.write_text(updated(PAGE.read_text("utf-8"), found), encoding="utf-8")
    print(found)


if __name__ == "__main__":
    main()
