"""Whether onnxruntime can run a model, and how."""

import gc
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from tempfile import gettempdir
from time import perf_counter
from typing import TYPE_CHECKING

from specctl.errors import ModelError, pip_install
from specctl.models.onnx.store import (
    CHAINS,
    EAGER,
    MAKING,
    ONNX,
    PACKED,
    Store,
    Times,
    Unable,
    cache_folder,
    key_of,
    known_by_files,
    no_tree_graph,
    packages_there,
    temporary_store,
)
from specctl.models.passes.tree_sight import WIDEST
from specctl.models.passes.weights import Where, page_out, weight_bytes
from specctl.models.running.context import context_length
from specctl.models.running.engines import EngineSettings
from specctl.models.running.slot import Slot
from specctl.models.running.threads import small_round, timed, torch_threads
from specctl.printable import gib

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from specctl.models.onnx.weights import Weights

NEEDS = ("onnxruntime", "onnxscript")  # Packages that this engine needs; onnxscript installs onnx
LONGEST = 1 << 17  # The most positions with tabulated angles


def require_onnxruntime() -> None:
    """Raise a ModelError if onnxruntime is not installed."""
    _require("onnxruntime")


def require_exporter() -> None:
    """Raise a ModelError if a package that exports models is not installed."""
    _require("onnx")
    _require("onnxscript")


def _require(package: str) -> None:
    if find_spec(package) is None:
        raise ModelError(f'engine = "onnx" needs {package}, which is not installed.', f"Run `{pip_install(*NEEDS)}`.")


def build_onnx_runner(
    model: "PreTrainedModel",
    vocabulary: int,
    name: str,
    settings: EngineSettings,
    quantize: str | None = None,
    key: str | None = None,
    *,
    keeps: bool = True,
    files: str | None = None,
    weights: "Weights | None" = None,
) -> Slot | None:
    """Open a model's graph, made and stored first if it is missing.

    Args:
        model: in eval mode, not quantised.
        vocabulary: the pair's shared vocabulary.
        name: the model's name for messages.
        settings: the engine settings, with the callbacks for notices.
        quantize: of `blocks.BITS`, `PACKED` or None.
        key: from `key_of`; None if not known yet.
        keeps: whether torch's weights stay in memory; without them the model is left as by `release`.
        files: see `key_of`.
        weights: of a `packed_model`.

    Returns:
        None, after a notice with the reason, where torch has to run the model.

    Raises:
        ModelError: onnxruntime, or a package that exports models for it, is not installed.
    """
    require_onnxruntime()
    from specctl.models.onnx.check import require_equal
    from specctl.models.onnx.passes import BOUND_WIDTH, Opening
    from specctl.models.passes.trimmed_output import vocabulary_of

    context = context_length(model) or LONGEST
    no_trees = tree_graph_obstacle(model, quantize) if settings.trees else CHAINS
    trees = no_trees is None
    device, ids = next(model.parameters()).device, vocabulary_of(model)
    opening = Opening(device, vocabulary, context, quantize, no_trees, ids)

    def write(path: Path) -> None:
        # A tree at the end of the context needs more slots than it has positions, and so do repeated rows.
        places = context + max(WIDEST, BOUND_WIDTH)
        _write(model, places if context <= LONGEST else 0, quantize, path, trees, weights)
        gc.collect()  # the exporter leaves reference cycles
        require_equal(opening.passes, path, model, vocabulary, quantize, trees=trees, weights=weights)

    try:
        if why := obstacle(model):
            raise Unable(why)
        key = key or key_of(model, quantize, trees=trees, files=files)
        path, seconds = graph_path(key, name, settings, write)
    except Unable as reason:
        settings.notice(f"{name} runs on torch: {reason}")
        return None
    if not keeps:  # frees torch's weights before onnxruntime reads its own
        release(model)
    numbers = {1, settings.most_threads} if settings.most_threads else {torch_threads()}
    passes = opening.fastest(path, weight_bytes(model), numbers, seconds)
    store = Store(cache_folder())
    if files is not None and known_by_files(model) and path.parent.parent == store.folder:
        passes.facts = store.facts(key)
    return Slot(passes)


def release(model: "PreTrainedModel") -> None:
    """Free the memory of a model's weights. Its configuration, its modules and their shapes stay."""
    model.to("meta")  # type: ignore[arg-type]


def obstacle(model: "PreTrainedModel", where: Where | None = None) -> str | None:
    """Why a model's configuration rules out an export, as the end of a sentence; None if it does not.

    Args:
        model: loaded, or its skeleton.
        where: where its weights are or will be; None to look at the loaded model.
    """
    import torch
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = model.config.get_text_config(decoder=True)
    where = where or Where.of(model)
    if where.sharded is not None:
        return "it is in shards"
    if len(where.devices) > 1:
        return "it is spread over several devices"
    kind = where.device.type
    if kind not in ("cpu", "cuda"):
        return f"specctl drives onnxruntime on a CPU and on CUDA only, and it is on {kind}"
    if kind == "cuda":
        import onnxruntime

        if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
            return "the installed onnxruntime has no CUDA provider (`pip install onnxruntime-gpu`)"
    if where.quantised is not None:
        return "its checkpoint is quantised already"
    wanted = (torch.float32,) if kind == "cpu" else (torch.float16, torch.bfloat16)
    if model.dtype not in wanted:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in wanted)
        return f"onnxruntime computes in {names} on {kind}, and its dtype is {str(model.dtype).removeprefix('torch.')}"
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = {each.get("rope_type") for each in (rope, *rope.values()) if isinstance(each, dict)}
    if moving := kinds & {"dynamic", "longrope"} & set(ROPE_INIT_FUNCTIONS):
        return f"the angles of its positions depend on the length of the text ({moving.pop()})"
    return None


def tree_graph_obstacle(model: "PreTrainedModel", quantize: str | None = None) -> str | None:
    """Why a model's graph cannot read trees, as the end of a sentence; None if it can."""
    from specctl.models.passes.masks import attends_to_everything

    return no_tree_graph(attends_to_everything(model), next(model.parameters()).device.type, quantize)


def reads_trees(model: "PreTrainedModel", settings: EngineSettings) -> bool:
    """Whether a model that is not quantised gets a graph that reads trees."""
    return settings.trees and tree_graph_obstacle(model) is None


def graph_path(
    key: str, name: str, settings: EngineSettings, write: Callable[[Path], None]
) -> tuple[Path, float | None]:
    """A graph of the store, made if missing. Where it cannot be stored, it is in a folder that this process removes.

    Args:
        key: its name in the store.
        name: the model's name for messages.
        settings: with the callbacks for notices.
        write: see `Store.put`.

    Returns:
        Its path, and the seconds spent on making it; None if it existed.

    Raises:
        Unable: there is no room for it, or ``write`` raised this error, now or in an earlier run with the same
            versions.
    """
    store = Store(cache_folder())
    seconds: float | None = None

    def make(path: Path) -> None:
        nonlocal seconds
        settings.progress(f"preparing {name} for onnxruntime, once")
        began = perf_counter()
        write(path)
        seconds = perf_counter() - began

    def stored() -> Path:
        if (found := store.find(key)) is not None:
            return found
        if (why := store.refusal(key)) is not None:
            raise Unable(why)
        try:
            return store.put(key, make)
        except Unable as unable:
            if unable.lasting:
                store.refuse(key, str(unable))
            raise

    try:
        with store.alone(key, lambda: settings.progress(f"waiting for {name}, which another process prepares")):
            return stored(), seconds
    except OSError as error:
        settings.notice(f"{name}: its graph cannot be kept in {store.folder} ({error.strerror or error})")
    try:
        return temporary_store().put(key, make), seconds
    except OSError as error:
        raise Unable(f"there is no room for its graph in {gettempdir()} either ({error.strerror or error})") from error


def _write(
    model: "PreTrainedModel", places: int, quantize: str | None, path: Path, trees: bool, weights: "Weights | None"
) -> None:
    """Export a model to a file and its weights to another one, with tables of the angles of ``places`` positions,
    unless 0.
    """
    require_exporter()
    from specctl.models.onnx.blocks import BITS, NotFinite
    from specctl.models.onnx.export import CannotExport, exported
    from specctl.models.onnx.rewriting import fuse, position_table, round_alike
    from specctl.models.onnx.rewriting import quantize as round_weights
    from specctl.models.onnx.sequences import attend_by_sequence, tell_signals
    from specctl.models.onnx.weights import save

    try:
        graph = exported(model, weights, trees=trees)
    except CannotExport as why:
        raise Unable(str(why)) from why
    fuse(graph, lambda value: position_table(graph, value, places) if places else None)
    try:
        rounded = None if quantize is None else round_weights(graph, BITS.get(quantize))
        if rounded == 0 and quantize != PACKED:  # a file may have floats only
            raise Unable(f"none of its products has weights that {quantize} rounds")
    except NotFinite as why:
        raise Unable(str(why)) from why
    attend_by_sequence(graph.graph)
    if next(model.parameters()).device.type == "cpu":
        round_alike(graph)
        tell_signals(graph.graph)
    save(graph, path, "weights.bin")


LONG_RUN = 2_000
"""Exporting a small model takes the time of some hundred to a thousand tokens, and pays from this many on."""


def may_be_faster(model: "PreTrainedModel", where: Where) -> bool:
    """Whether to try onnxruntime without a request: it is installed, and can run the model on the CPU.

    Args:
        model: loaded, or its skeleton.
        where: where its weights are or will be.
    """
    return packages_there() and where.device.type == "cpu" and obstacle(model, where) is None


def rounded_bytes(model: "PreTrainedModel", form: str) -> int:
    """The approximate size of a model's graph with rounded weights, on disk and in memory.

    Args:
        model: may be its skeleton.
        form: how the graph's weights are rounded.
    """
    from torch import nn

    from specctl.models.onnx.blocks import BITS, OUTPUT_BITS, rounded_nbytes

    vocabulary = model.get_input_embeddings(), model.get_output_embeddings()  # type: ignore[no-untyped-call]
    found = {id(weight): 4 * weight.numel() for weight in model.parameters()}
    for layer in model.modules():
        if layer in vocabulary or isinstance(layer, nn.Linear):
            bits = OUTPUT_BITS if layer in vocabulary else BITS[form]
            found[id(layer.weight)] = rounded_nbytes(layer.weight.shape, bits)  # type: ignore[arg-type]
    return sum(found.values())


def no_room(weights: int, folder: Path) -> str | None:
    """Why there is no room to make a loaded model's graph, as the end of a sentence; None if there is room.

    Args:
        weights: their size in bytes.
        folder: where the graph is to be stored.
    """
    import psutil  # type: ignore[import-untyped]

    making, free = int(MAKING * weights), psutil.virtual_memory().available
    if making > free:
        takes = f"making its graph for onnxruntime takes {gib(making)} of memory besides its weights"
        return f"{takes}, and {gib(free)} is free"
    there = next(place for place in (folder, *folder.parents) if place.exists())
    if weights > (free := shutil.disk_usage(there).free):
        return f"its graph for onnxruntime takes {gib(weights)} in {there}, and {gib(free)} is free"
    return None


def automatic_runner(
    model: "PreTrainedModel",
    vocabulary: int,
    name: str,
    settings: EngineSettings,
    files: Callable[[], str | None] = lambda: None,
) -> Slot | None:
    """Open a model's graph if onnxruntime is installed, can run it, and is faster than torch's eager passes.

    A graph is made only for a long run, and only where memory and disk have room for it; otherwise a notice gives the
    reason. A stored graph is used in short runs too. The time of a small round with either engine is measured once for
    each machine and number of threads, and stored with the graph.

    Args:
        model: in eval mode.
        vocabulary: the pair's shared vocabulary.
        name: the model's name for messages.
        settings: the length of the run, and the callbacks for notices.
        files: returns the hash of the model's files for `key_of`; this may read all of them.

    Returns:
        None where torch should run the model.
    """
    from specctl.models.running.eager import EagerPasses

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
        return None  # slower, or unable (without times): no notice is needed
    if not long and store.find(key) is None:
        return None
    new = not (store.folder / key).exists() and store.refusal(key) is None
    if new and (why := no_room(where.weights, store.folder)) is not None:
        settings.notice(f"{name} runs on torch: {why}")
        return None
    eager = 0.0
    if known is None:  # one after the other, since each engine holds the weights
        eager = milliseconds(Slot(EagerPasses(model, vocabulary)), vocabulary)
        page_out(model.parameters())
    runner = build_onnx_runner(model, vocabulary, name, settings, key=key, files=known_files)
    if known is None:
        known = {} if runner is None else {EAGER: eager, ONNX: milliseconds(runner, vocabulary)}
        times.note(known, threads)
    return runner if runner is not None and known[ONNX] < known[EAGER] else None


def milliseconds(runner: Slot, vocabulary: int) -> float:
    """The time of a small round; the runner's cache is empty afterwards."""
    play = small_round([runner], vocabulary)
    (seconds,) = timed(lambda _: play(), [None]).values()
    runner.rollback(0)
    return round(median(seconds) * 1e3, 4)
