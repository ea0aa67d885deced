"""The onnxruntime runner where nobody asked for it: it is there, and faster."""

from collections.abc import Callable
from statistics import median
from typing import TYPE_CHECKING

from transformers import PreTrainedModel

from specctl.models.onnx.engine_times import EAGER, LARGEST, ONNX, Times, packages_there
from specctl.models.onnx.onnx_engine import build_onnx_runner, obstacle, reads_trees
from specctl.models.onnx.store import Store, cache_folder, key_of
from specctl.models.running.eager import EagerRunner
from specctl.models.running.engines import EngineSettings, Where
from specctl.models.running.threads import small_round, timed, torch_threads

if TYPE_CHECKING:
    from specctl.models.onnx.onnx_runner import OnnxRunner

LONG_RUN = 2_000
"""Exporting a small model, which takes as long as some hundred to a thousand tokens do, pays from this many on."""


def may_be_faster(model: PreTrainedModel, where: Where) -> bool:
    """Whether onnxruntime is to be tried for a model that nobody asked it for: it is installed, and the model small.

    Args:
        model: loaded, or its skeleton.
        where: its weights are or will be.
    """
    if not packages_there():
        return False
    return where.device.type == "cpu" and where.weights <= LARGEST and obstacle(model, where) is None


def automatic_runner(
    model: PreTrainedModel,
    vocabulary: int,
    name: str,
    settings: EngineSettings,
    files: Callable[[], str | None] = lambda: None,
) -> "OnnxRunner | None":
    """The runner of a model's graph, if onnxruntime is installed, able and faster than torch's eager passes.

    A graph is made only for a long run; one that is there is used in short runs too. What a small round takes with
    either engine is measured once for each machine and number of threads, and kept with the graph.

    Args:
        model: in eval mode.
        vocabulary: the pair's shared vocabulary.
        name: the model's, in messages.
        settings: how long the run is, and whom to tell.
        files: gives what `key_of` is told of the model's files, which may take reading all of them.

    Returns:
        None where torch is to run the model.
    """
    if not may_be_faster(model, Where.of(model)):
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
    runner = build_onnx_runner(model, vocabulary, name, settings, key=key, files=known_files)
    if known is None:
        known = {} if runner is None else milliseconds(model, runner, vocabulary)
        times.note(known, threads)
    return runner if runner is not None and known[ONNX] < known[EAGER] else None


def milliseconds(model: PreTrainedModel, runner: "OnnxRunner", vocabulary: int) -> dict[str, float]:
    """What a small round takes with each engine; the runner's cache is empty afterwards."""
    rounds = {
        EAGER: small_round([EagerRunner(model, vocabulary)], vocabulary),
        ONNX: small_round([runner], vocabulary),
    }
    seconds = timed(lambda engine: rounds[engine](), list(rounds))
    runner.rollback(0)
    return {engine: round(median(found) * 1e3, 4) for engine, found in seconds.items()}
