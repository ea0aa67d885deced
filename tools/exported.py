"""Runs exported settings in the engine itself: what its passes cost, and whether the exported setting is its best.

    python -m tools.exported costs transformers
    specctl calibrate --policy all --samples 20 --export transformers --costs ... --json > found.json
    python -m tools.exported check transformers found.json

``costs`` prints what ``--costs`` takes: milliseconds fitted to runs with drafts of 2, 4, 8 and 12 tokens, and without
a draft in engines that bench measures so. Runs with drafts tell a draft step and the token that it adds to a target
pass only together: the first number is of both, and the third 0. ``check`` runs the engine's own grid in turn, prompt
by prompt, on the prompts that chose nothing: no draft, every length from 1 to 12, some
settings of each of its other rules, and the exported setting, which it compares with the fastest. Where the export says
that no draft pays, that is what it says to run.

Engines: transformers, on specctl's own models; onnxruntime-genai, openvino and llama.cpp with --peer-models FOLDER (of
``python -m specctl.peers.convert``) and --peer-program, the Python that has the engine or its program; vllm with
--peer-program alone, and there lengths only, since its builds for CPUs have no adaptive verification. Run it on an idle
machine.
"""

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from specctl.decoding.prompt_format import PromptFormat
from specctl.errors import SpecctlError, UsageError
from specctl.export.engines import ENGINES, UNCAPPED, Pairing, rule_space, words_of
from specctl.models.loading.assembly import load_pair
from specctl.models.running.engines import EngineSettings
from specctl.models.running.pair import Pair
from specctl.peers.assisted import AssistedPeer
from specctl.peers.engines import ENGINES as PEERS
from specctl.peers.engines import NO_DRAFT, Converted, Launch, PeerSetting, launches
from specctl.peers.process import MeasuredPeer, PeerProcess
from specctl.policies import NONE, Setting
from specctl.profile import resolve
from specctl.profile.schema import SamplingTable, model_path
from specctl.prompts.suites import Suite, load_suite, sample
from specctl.statistics import Interval
from tools.timed_runs import Timed, compared, fit, flag_of

LENGTHS = tuple(range(1, 13))
TO_FIT = (2, 4, 8, 12)
BAR = 0.03
"""How much slower than the best of the engine's own grid the exported setting may be."""
LONGEST_CAPPED = 16
COARSE: dict[str, tuple[float, ...]] = {
    "threshold": (0.2, 0.4, 0.6, 0.8),
    "least": (1, 2, 4),
    "max_draft": (LONGEST_CAPPED, UNCAPPED),
    "draft_length": (5,),
}
"""The values of an engine's other rules that are run."""
MEASURED = ("transformers", "onnxruntime-genai", "openvino", "llama.cpp", "vllm")


def length(k: int) -> Setting:
    """Drafts of one length."""
    return Setting.of({"name": "constant", "draft_length": k})


def grid_of(engine: str) -> list[Setting]:
    """The settings of an engine's own rules that are run."""
    space = rule_space(ENGINES[engine], ENGINES[engine].confidence, LONGEST_CAPPED)
    others = [one for one in space if one.policy != "constant"]
    return [
        *map(length, LENGTHS),
        *(
            one
            for one in others
            if engine != "vllm" and all(value in COARSE.get(key, (value,)) for key, value in one.values)
        ),
    ]


def peer_of(engine: str, setting: Setting, pair: Pair, options: argparse.Namespace, stack: ExitStack) -> Any:
    """The engine with a setting of its own rules.

    Raises:
        UsageError: the engine cannot be started.
    """
    values = setting.all_values
    if engine == "transformers":
        keys = json.loads(ENGINES[engine].write(Pairing("", ""), setting).text)
        return AssistedPeer(pair, "exported", keys)
    told: dict[str, Any] = {"draft": "constant", "tokens": values.get("draft_length")}
    if not setting.drafts:
        told = {"draft": NO_DRAFT}
    if setting.policy == "max-confidence":
        told = {"draft": "confidence", "threshold": values["threshold"], "tokens": values["max_draft"]}
    elif setting.policy == "probed-length":
        way = "constant" if values["least"] == values["max_draft"] else "adaptive"
        told = {"draft": way, "tokens": values["least"], "cooldown": values["cooldown"]}
    setting_of_peer = PeerSetting(f"{engine}: {words_of(setting)}", engine, told)
    if engine == "vllm":
        target, draft = (str(model_path(role)) for role in ("target", "draft"))
        command = (str(options.peer_program), str(Path(__file__).with_name("vllm_worker.py")), target, draft)
        launch = Launch(setting_of_peer, command, Path(), Converted(engine, target, draft, "float32", "float32", ""))
        return MeasuredPeer(pair, launch, stack.enter_context(PeerProcess(setting_of_peer.label, command)))
    programs = {engine: options.peer_program} if options.peer_program else {}
    folders = {engine: options.peer_models} if options.peer_models else {}
    (launch,) = launches([setting_of_peer], folders, programs).values()
    return MeasuredPeer(pair, launch, stack.enter_context(PeerProcess(setting_of_peer.label, launch.command)))


def timed(
    start: Callable[[ExitStack], Mapping[str, Any]],
    prompts: Suite,
    pair: Pair,
    settings: SamplingTable,
    repeats: int,
) -> Timed:
    """Run all settings on each prompt, in another order each time; a first run of each is not timed.

    Processes of the same setting differ by up to a fifth for as long as they live. So every repeat starts its own.
    Only the first turn of a conversation is run.
    """
    formats = PromptFormat.of(pair.tokenizer, resolve("embedded").profile.prompt)
    ids = [_ids(formats, prompt.data) for prompt in prompts.prompts]
    runs = []
    order = np.random.default_rng(0)
    for turn in range(repeats):
        with ExitStack() as stack:
            peers = start(stack)
            runs.append(_timed_once(peers, ids, settings, order))
        print(f"{turn + 1} of {repeats} repeats", file=sys.stderr)
    ms = np.min([one.ms for one in runs], axis=0)
    return replace(runs[-1], ms=ms)


def _timed_once(
    peers: Mapping[str, Any], ids: Sequence[list[int]], settings: SamplingTable, order: np.random.Generator
) -> Timed:
    labels = list(peers)
    for peer in peers.values():
        peer.generate(ids[0], settings)
    shape = len(labels), len(ids)
    ms, tokens, passes, drafted = (np.zeros(shape) for _ in range(4))
    for place, prompt in enumerate(ids):
        for row in order.permutation(len(labels)):
            peer = peers[labels[row]]
            completion = peer.generate(prompt, settings)
            ms[row, place] = 1e3 * completion.total_seconds
            tokens[row, place] = len(completion.tokens)
            passes[row, place], drafted[row, place] = peer.passes[-1]
    return Timed(labels, ms, tokens, passes, drafted, np.array([len(prompt) for prompt in ids], dtype=np.float64))


def _ids(formats: PromptFormat, data: Mapping[str, Any]) -> list[int]:
    if "turns" in data:
        return formats.conversation(data["turns"], [])
    return formats.messages(data["messages"]) if "messages" in data else formats.prompt(data["prompt"])


Run = Callable[[Sequence[Setting], Suite], Timed]


def advised(exported: Mapping[str, Any]) -> Setting:
    """What an export says to run: no draft where none pays, if the engine is run without one here."""
    pays = exported["pays"] or exported["engine"] not in PEERS
    return Setting.of(exported["rule"]) if pays else NONE


def costs(options: argparse.Namespace, run: Run) -> None:
    """Measure and print an engine's costs."""
    # Other prompts than those that calibrate draws with the profile's seed.
    prompts = sample(load_suite("embedded"), options.samples, resolve("embedded").profile.sampling.seed + 1)
    alone = [NONE] if options.engine in PEERS else []
    found, off = fit(run([*map(length, TO_FIT), *alone], prompts))
    print(f"{flag_of(found, options.engine)}  # off by {off:.1%} (root mean square)")


def check(options: argparse.Namespace, run: Run) -> bool:
    """Compare the exported setting with the grid, and print the table and the verdict."""
    document = json.loads(options.file.read_text("utf-8"))
    exported = next((one for one in document.get("exports", []) if one["engine"] == options.engine), None)
    if exported is None:
        raise UsageError(f"{options.file} has no export for {options.engine}", "calibrate with --export and --json")
    whole = load_suite("embedded")
    wanted = set(document["reported_on"])
    prompts = Suite(whole.name, tuple(one for one in whole.prompts if one.id in wanted), whole.sha256)
    chosen, alone = advised(exported), [NONE] if options.engine in PEERS else []
    runs = run([*dict.fromkeys([*alone, *grid_of(options.engine), chosen])], prompts)
    predicted = {f"K = {point['draft_length']}": point["tokens_per_second"] for point in exported["curve"]}
    predicted[words_of(chosen)] = exported["tokens_per_second"]
    for row, label in enumerate(runs.labels):
        speed = 1e3 * runs.tokens[row].sum() / runs.ms[row].sum()
        known = f", predicted after the prompt {predicted[label]:8.1f}" if label in predicted else ""
        print(f"{label:32} measured {speed:8.1f} tokens/s, {runs.passes[row].sum():6.0f} target passes{known}")
    best, ratio = compared(runs, words_of(chosen))
    within = ratio.value >= 1 - BAR
    lengths = [row for row, label in enumerate(runs.labels) if label in {words_of(length(k)) for k in TO_FIT}]
    found, off = fit(runs.of(lengths))
    print(f"fitted to these runs: {flag_of(found, options.engine)}  # off by {off:.1%}")
    print(f"exported: {words_of(chosen)}")
    print(f"exported over the fastest ({best}): {ratio.value:.3f} ({_interval(ratio)}) on {len(wanted)} prompts")
    print(f"within {BAR:.0%} of the engine's best: {'yes' if within else 'no'}")
    return within


def _interval(interval: Interval) -> str:
    return "no interval" if interval.low is None else f"{interval.low:.3f} to {interval.high:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tools.exported", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("do", choices=("costs", "check"))
    parser.add_argument("engine", choices=MEASURED)
    parser.add_argument("file", type=Path, nargs="?", help="for check: what calibrate --export --json printed")
    parser.add_argument("--peer-models", type=Path, help="of an engine in a process of its own: its models")
    parser.add_argument("--peer-program", type=Path, help="the Python that has such an engine, or its program")
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

        def run(grid: Sequence[Setting], prompts: Suite) -> Timed:
            def start(stack: ExitStack) -> dict[str, Any]:
                return {words_of(each): peer_of(options.engine, each, pair, options, stack) for each in grid}

            return timed(start, prompts, pair, settings, options.repeats)

        if options.do == "costs":
            costs(options, run)
        elif not check(options, run):
            sys.exit(1)
    except SpecctlError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
