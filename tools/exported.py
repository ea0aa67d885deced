"""Runs exported settings in the engine itself: what its passes cost, and whether the exported setting is its best.

    python -m tools.exported costs transformers
    specctl calibrate --policy all --samples 20 --export transformers --costs ... --json > found.json
    python -m tools.exported check transformers found.json

``costs`` prints what ``--costs`` takes: milliseconds fitted to runs with drafts of 1, 3, 6 and 12 tokens. Such runs
tell a draft step and the token that it adds to a target pass only together: the first number is of both. ``check``
runs every length from 1 to 12 and the exported setting in turn, prompt by prompt, on the prompts that chose nothing,
and compares the exported setting with the fastest length.

Engines: transformers, on specctl's own models; openvino, with --peer-models FOLDER (of
``python -m specctl.peers.convert openvino``) and --peer-program PYTHON, the Python that has it. Run it on an idle
machine.
"""

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from specctl.decoding.prompt_format import PromptFormat
from specctl.errors import SpecctlError, UsageError
from specctl.models.loading.assembly import load_pair
from specctl.models.running.engines import EngineSettings
from specctl.models.running.pair import Pair
from specctl.peers.assisted import AssistedPeer
from specctl.peers.launch import launches
from specctl.peers.measured import MeasuredPeer
from specctl.peers.names import PeerSetting
from specctl.peers.process import PeerProcess
from specctl.profile import resolve
from specctl.profile.schema import SamplingTable
from specctl.prompts.suites import Suite, load_suite, sample
from specctl.statistics.intervals import Floats, Interval, bootstrap

LENGTHS = tuple(range(1, 13))
TO_FIT = (1, 3, 6, 12)
BAR = 0.03
"""How much slower than the engine's best length the exported setting may be."""


@dataclass(frozen=True, slots=True)
class Timed:
    """Runs of S settings on P prompts, each array ``(S, P)``: means over repeats.

    Attributes:
        labels: S of them.
        ms: milliseconds, the prompt's time included.
        tokens, passes, drafted: generated tokens, target passes and draft tokens.
        prompt_tokens: ``(P,)``.
    """

    labels: list[str]
    ms: Floats
    tokens: Floats
    passes: Floats
    drafted: Floats
    prompt_tokens: Floats


def peer_of(engine: str, keys: Mapping[str, Any], pair: Pair, options: argparse.Namespace, stack: ExitStack) -> Any:
    """The engine with a setting as `calibrate --export` writes it.

    Raises:
        UsageError: the setting is none of this engine, or the engine cannot be started.
    """
    if engine == "transformers":
        return AssistedPeer(pair, "exported", keys)
    values: dict[str, Any] = {"draft": "constant", "tokens": keys.get("num_assistant_tokens")}
    if threshold := keys.get("assistant_confidence_threshold"):
        values = {"draft": "confidence", "threshold": threshold}
    setting = PeerSetting(f"{engine}:{values}", engine, values)
    programs = {engine: options.peer_program} if options.peer_program else {}
    (launch,) = launches([setting], {engine: options.peer_models} if options.peer_models else {}, programs).values()
    return MeasuredPeer(pair, launch, stack.enter_context(PeerProcess(setting.label, launch.command)))


def length_keys(length: int) -> dict[str, Any]:
    """Drafts of one length, in the words that both engines have."""
    return {
        "num_assistant_tokens": length,
        "num_assistant_tokens_schedule": "constant",
        "assistant_confidence_threshold": 0.0,
    }


def timed(peers: Mapping[str, Any], prompts: Suite, pair: Pair, settings: SamplingTable, repeats: int) -> Timed:
    """Run all settings in turn on each prompt, beginning with another one each time; a first run of each is not timed.

    Only the first turn of a conversation is run.
    """
    formats = PromptFormat.of(pair.tokenizer, resolve("embedded").profile.prompt)
    ids = [_ids(formats, prompt.data) for prompt in prompts.prompts]
    labels = list(peers)
    for peer in peers.values():
        peer.generate(ids[0], settings)
    shape = len(labels), len(ids)
    ms, tokens, passes, drafted = (np.zeros(shape) for _ in range(4))
    for turn in range(repeats):
        for place, prompt in enumerate(ids):
            for step in range(len(labels)):
                row = (step + place + turn) % len(labels)
                peer = peers[labels[row]]
                completion = peer.generate(prompt, settings)
                ms[row, place] += 1e3 * completion.total_seconds / repeats
                tokens[row, place] = len(completion.tokens)
                passes[row, place], drafted[row, place] = peer.passes[-1]
            print(f"{turn * len(ids) + place + 1} of {repeats * len(ids)} prompts", file=sys.stderr)
    return Timed(labels, ms, tokens, passes, drafted, np.array([len(prompt) for prompt in ids], dtype=np.float64))


def _ids(formats: PromptFormat, data: Mapping[str, Any]) -> list[int]:
    if "turns" in data:
        return formats.conversation(data["turns"], [])
    return formats.messages(data["messages"]) if "messages" in data else formats.prompt(data["prompt"])


def fit(runs: Timed) -> tuple[float, float, float]:
    """Milliseconds of a draft token, of a target pass and of a token of the prompt, by least squares; and how far off.

    Returns:
        Draft, target, and the root mean square of the residuals over the mean of the times.
    """
    prompt = np.broadcast_to(runs.prompt_tokens, runs.ms.shape)
    columns = np.stack([runs.drafted.ravel(), runs.passes.ravel(), prompt.ravel()], axis=1)  # (S P, 3)
    found, *_ = np.linalg.lstsq(columns, runs.ms.ravel(), rcond=None)
    residuals = runs.ms.ravel() - columns @ found
    return float(found[0]), float(found[1]), float(np.sqrt((residuals**2).mean()) / runs.ms.mean())


def compared(runs: Timed, exported: str) -> tuple[str, Interval]:
    """The fastest length, and how fast the exported setting is in relation to it, with an interval over prompts."""
    totals = {label: runs.ms[row].sum() for row, label in enumerate(runs.labels) if label != exported}
    best = min(totals, key=lambda label: totals[label])
    own, other = runs.ms[runs.labels.index(exported)], runs.ms[runs.labels.index(best)]

    def ratio(weights: Floats) -> Floats:
        ratios: Floats = (weights @ other) / (weights @ own)
        return ratios

    return best, bootstrap(ratio, len(own))


def costs(options: argparse.Namespace, run: Callable[[Mapping[str, Mapping[str, Any]], Suite], Timed]) -> None:
    """Measure and print an engine's costs."""
    # Other prompts than those that calibrate draws with the profile's seed.
    prompts = sample(load_suite("embedded"), options.samples, resolve("embedded").profile.sampling.seed + 1)
    draft, target, off = fit(run({f"K = {length}": length_keys(length) for length in TO_FIT}, prompts))
    print(f"--costs {draft:.4g},{target:.4g}  # off by {off:.1%} (root mean square)")


def check(options: argparse.Namespace, run: Callable[[Mapping[str, Mapping[str, Any]], Suite], Timed]) -> bool:
    """Compare the exported setting with every length, and print the table and the verdict."""
    document = json.loads(options.file.read_text("utf-8"))
    exported = next((one for one in document.get("exports", []) if one["engine"] == options.engine), None)
    if exported is None:
        raise UsageError(f"{options.file} has no export for {options.engine}", "calibrate with --export and --json")
    whole = load_suite("embedded")
    wanted = set(document["reported_on"])
    prompts = Suite(whole.name, tuple(one for one in whole.prompts if one.id in wanted), whole.sha256)
    keys = json.loads(exported["text"])
    runs = run({**{f"K = {length}": length_keys(length) for length in LENGTHS}, "exported": keys}, prompts)
    predicted = {f"K = {point['draft_length']}": point["tokens_per_second"] for point in exported["curve"]}
    predicted["exported"] = exported["tokens_per_second"]
    for row, label in enumerate(runs.labels):
        speed = 1e3 * runs.tokens[row].sum() / runs.ms[row].sum()
        print(f"{label:9} measured {speed:8.1f} tokens/s, predicted after the prompt {predicted[label]:8.1f}")
    best, ratio = compared(runs, "exported")
    within = ratio.value >= 1 - BAR
    print(f"exported: {json.dumps(keys)}")
    print(f"exported over the fastest length ({best}): {ratio.value:.3f} ({_interval(ratio)}) on {len(wanted)} prompts")
    print(f"within {BAR:.0%} of the engine's best: {'yes' if within else 'no'}")
    return within


def _interval(interval: Interval) -> str:
    return "no interval" if interval.low is None else f"{interval.low:.3f} to {interval.high:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tools.exported", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("do", choices=("costs", "check"))
    parser.add_argument("engine", choices=("transformers", "openvino"))
    parser.add_argument("file", type=Path, nargs="?", help="for check: what calibrate --export --json printed")
    parser.add_argument("--peer-models", type=Path, help="for openvino: its models")
    parser.add_argument("--peer-program", type=Path, help="for openvino: the Python that has it")
    parser.add_argument("--samples", type=int, default=8, help="for costs: prompts (default 8)")
    parser.add_argument("--repeats", type=int, default=3, help="of every run (default 3)")
    parser.add_argument("-n", "--max-new-tokens", type=int, default=64, help="for each prompt (default 64)")
    options = parser.parse_args()
    if options.do == "check" and options.file is None:
        parser.error("check needs the file that calibrate --export --json printed")
    profile = resolve("embedded", flags={"engine": "eager"}).profile
    settings = profile.sampling.model_copy(update={"max_new_tokens": options.max_new_tokens})
    try:
        pair = load_pair(profile, engines=EngineSettings.of(profile), with_predictors=False)
        with ExitStack() as stack:

            def run(keys: Mapping[str, Mapping[str, Any]], prompts: Suite) -> Timed:
                peers = {label: peer_of(options.engine, each, pair, options, stack) for label, each in keys.items()}
                return timed(peers, prompts, pair, settings, options.repeats)

            if options.do == "costs":
                costs(options, run)
            elif not check(options, run):
                sys.exit(1)
    except SpecctlError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
