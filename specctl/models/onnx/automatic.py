"""The onnxruntime runner where nobody asked for it: it is there, and faster."""

import shutil
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import psutil  # type: ignore[import-untyped]
from transformers import PreTrainedModel

from specctl.models.onnx.engine_times import EAGER, MAKING, ONNX, Times, packages_there
from specctl.models.onnx.onnx_engine import build_onnx_runner, obstacle, reads_trees
from specctl.models.onnx.store import Store, cache_folder, key_of
from specctl.models.passes.weights import page_out
from specctl.models.running.eager import EagerRunner
from specctl.models.running.engines import EngineSettings, Where
from specctl.models.running.runner import Runner
from specctl.models.running.threads import small_round, timed, torch_threads
from specctl.printable import gib

if TYPE_CHECKING:
    from specctl.models.onnx.onnx_runner import OnnxRunner

LONG_RUN = 2_000
"""Exporting a small model, which takes as long as some hundred to a thousand tokens do, pays from this many on."""


def may_be_faster(model: PreTrainedModel, where: Where) -> bool:
    """Whether onnxruntime may be tried for a model that nobody asked it for: it is installed, and able to run it.

    Args:
        model: loaded, or its skeleton.
        where: its weights are or will be.
    """
    return packages_there() and where.device.type == "cpu" and obstacle(model, where) is None


def no_room(weights: int, folder: Path) -> str | None:
    """Why there is no room to make the graph of a model that is loaded, as the end of a sentence; None if there is.

    Args:
        weights: its bytes.
        folder: where the graph is to be kept.
    """
    making, free = int(MAKING * weights), psutil.virtual_memory().available
    if making > free:
        takes = f"making its graph for onnxruntime takes {gib(making)} of memory besides its weights"
        return f"{takes}, and {gib(free)} is free"
    there = next(place for place in (folder, *folder.parents) if place.exists())
    if weights > (free := shutil.disk_usage(there).free):
        return f"its graph for onnxruntime takes {gib(weights)} in {there}, and {gib(free)} is free"
    return None


def automatic_runner(
    model: PreTrainedModel,
    vocabulary: int,
    name: str,
    settings: EngineSettings,
    files: Callable[[], str | None] = lambda: None,
) -> "OnnxRunner | None":
    """The runner of a model's graph, if onnxruntime is installed, able and faster than torch's eager passes.

    A graph is made only for a long run, and where memory and disk have room for it, or a notice says that they have
    not; one that is there is used in short runs too. What a small round takes with either engine is measured once for
    each machine and number of threads, and kept with the graph.

    Args:
        model: in eval mode.
        vocabulary: the pair's shared vocabulary.
        name: the model's, in messages.
        settings: how long the run is, and whom to tell.
        files: gives what `key_of` is told of the model's files, which may take reading all of them.

    Returns:
        None where torch is to run the model.
    """
    where = Where.of(model)
    if not may_be_faster(model, where):
        return None
    store, long = Store(cache_folder()), settings.expected_tokens >= LONG_RUN
    if not long and not store.folder.exists():
        return None  # before all weights are hashed
    known_files = files()
    key = key_of(model, None, trees=reads_trees(model, settings), files=known_files)
    times, threads = Times(store.times(key)), torch_threads()
    known = times.here(threads)
    if known is not None and known.get(ONNX, 0.0) >= known.get(EAGER, 0.0):
        return None  # slower, or unable: then nothing is noted
    if not long and store.find(key) is None:
        return None
    new = not (store.folder / key).exists() and store.refusal(key) is None
    if new and (why := no_room(where.weights, store.folder)) is not None:
        settings.notice(f"{name} runs on torch: {why}")
        return None
    eager = 0.0
    if known is None:  # one after the other, for each holds the weights
        eager = milliseconds(EagerRunner(model, vocabulary), vocabulary)
        page_out(model.parameters())
    runner = build_onnx_runner(model, vocabulary, name, settings, key=key, files=known_files)
    if known is None:
        known = {} if runner is None else {EAGER: eager, ONNX: milliseconds(runner, vocabulary)}
        times.note(known, threads)
    return runner if runner is not None and known[ONNX] < known[EAGER] else None


def milliseconds(runner: Runner, vocabulary: int) -> float:
    """What a small round takes; the runner's cache is empty afterwards."""
    play = small_round([runner], vocabulary)
    (seconds,) = timed(lambda _: play(), [None]).values()
    runner.rollback(0)
    return round(median(seconds) * 1e3, 4)
