"""Whether onnxruntime can run a draft head, and how."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from specctl.errors import out_of_memory
from specctl.models.draft_heads.block import BlockHead
from specctl.models.draft_heads.chain import ChainHead
from specctl.models.onnx.engine import (
    LONG_RUN,
    LONGEST,
    graph_path,
    require_exporter,
)
from specctl.models.onnx.store import Store, Unable, cache_folder, first_line, key_of_head
from specctl.models.onnx_heads.runners import (
    CONFIDENCE,
    FUSE,
    PASS,
    REMEMBER,
    ROW,
    HeadGraphs,
    OnnxBlockPasses,
    OnnxChainPasses,
)
from specctl.models.passes.weights import weight_bytes
from specctl.models.running.engines import EngineSettings
from specctl.models.running.one_function import ROUNDING, apart
from specctl.models.running.slot import Slot
from specctl.models.running.threads import ONE_THREAD

if TYPE_CHECKING:
    import numpy as np
    import onnx_ir as ir


def build_onnx_head(
    head: ChainHead | BlockHead,
    vocabulary: int,
    name: str,
    settings: EngineSettings,
    reference: Callable[[], Slot],
    threads: int,
) -> Slot | None:
    """Open a draft head's graphs, made and stored first if they are missing.

    Unless the user asked for onnxruntime, they are made only for a long run, like those of models.

    Args:
        head: in eval mode, on its device.
        vocabulary: the pair's shared vocabulary.
        name: the head's name for messages.
        settings: the length of the run, and the callbacks for notices.
        reference: returns a slot of the head's torch network, for the comparison.
        threads: of its passes; a small head always gets one.

    Returns:
        None where torch has to run the head, after a notice with the reason.

    Raises:
        ModelError: a package that exports networks for onnxruntime is not installed.
    """

    def write(path: Path) -> None:
        _write(head, path.parent)
        _require_equal(head, path.parent, reference(), vocabulary)

    weight = next(head.parameters())
    threads = 1 if weight_bytes(head) <= ONE_THREAD else threads
    try:
        if weight.device.type != "cpu" or weight.dtype != torch.float32:
            dtype = str(weight.dtype).removeprefix("torch.")
            raise Unable(
                f"onnxruntime runs draft heads in float32 on a CPU, and it is in {dtype} on {weight.device.type}"
            )
        key = key_of_head(head, head.borrowed)
        wanted = settings.engine == "onnx" or settings.expected_tokens >= LONG_RUN
        if not wanted and Store(cache_folder()).find(key) is None:
            return None
        path, seconds = graph_path(key, name, settings, write)
        return _opened(head, HeadGraphs(path.parent, threads, seconds), vocabulary)
    except Unable as why:
        settings.notice(f"{name} runs on torch: {why}")
        return None


def _opened(head: ChainHead | BlockHead, graphs: HeadGraphs, vocabulary: int) -> Slot:
    if isinstance(head, BlockHead):
        return Slot(OnnxBlockPasses(head, graphs, vocabulary))
    return Slot(OnnxChainPasses(head, graphs, vocabulary))


def _write(head: ChainHead | BlockHead, folder: Path) -> None:
    """Export a head's graphs to files, each with its weights in another file next to it."""
    require_exporter()
    from specctl.models.onnx.export import CannotExport
    from specctl.models.onnx.rewriting import fuse, position_table
    from specctl.models.onnx.weights import save

    places = head.context + (head.block_size if isinstance(head, BlockHead) else 0)

    def table(graph: "ir.Model", value: "ir.Value") -> "np.ndarray | None":
        return position_table(graph, value, places) if head.context <= LONGEST else None

    try:
        for file, made in graphs_of(head).items():
            fuse(made, partial(table, made), placed=isinstance(head, BlockHead))
            save(made, folder / file, f"{Path(file).stem}.bin")
    except CannotExport as why:
        raise Unable(str(why)) from why
    except OSError:
        raise
    except Exception as error:  # whatever fails in its modules, torch can still run them
        what = f"it cannot be exported ({type(error).__name__}: {first_line(error)})"
        raise Unable(what, lasting=not out_of_memory(error)) from error


def graphs_of(head: ChainHead | BlockHead) -> "dict[str, ir.Model]":
    """The graphs that a head needs, by file name, from torch's exporter.

    Raises:
        CannotExport: its attention cannot be exported.
    """
    from specctl.models.onnx.export import CannotExport

    if head.no_graphs is not None:
        raise CannotExport(head.no_graphs)
    if isinstance(head, ChainHead):
        from specctl.models.onnx_heads.export import chain_pass, fusing

        state = torch.zeros(1, head.state_size)
        states = dict.fromkeys(head.layers, state)
        fuses = {} if head.fuse(states) is state else {FUSE: fusing(head)}
        return {PASS: chain_pass(head), **fuses}
    from specctl.models.onnx_heads.export import block_confidence, block_pass, block_row, remembering

    found = {PASS: block_pass(head), REMEMBER: remembering(head)}
    if head.config.markov is not None:
        found[ROW] = block_row(head)
    if head.config.confidence:
        found[CONFIDENCE] = block_confidence(head)
    return found


def _require_equal(head: ChainHead | BlockHead, folder: Path, reference: Slot, vocabulary: int) -> None:
    """Raise `Unable` unless a head's graphs compute the same as its network."""
    from specctl.models.onnx.check import require_close

    try:
        found = difference(_opened(head, HeadGraphs(folder, 1), vocabulary), reference, vocabulary)
    except Exception as error:  # whatever onnxruntime raises, torch can still run the head
        why = f"onnxruntime cannot run its graphs ({first_line(error)})"
        raise Unable(why, lasting=not out_of_memory(error)) from error
    require_close(found, ROUNDING[torch.float32])


ROUNDS = ((24, 3, 1), (4, 5, 2), (1, 2, 0), (7, 3, 6), (2, 4, 1))
"""Places whose states are observed, tokens drafted after them, and how many of the places are then taken back."""
COMPARED = sum(places + steps for places, steps, _ in ROUNDS)


def difference(runner: Slot, reference: Slot, vocabulary: int) -> float:
    """The largest difference between the results of two runners of a draft head, as `apart` measures it.

    Both observe the same states and read the same tokens, some before their states are known, with rollbacks in
    between. Afterwards both are empty.

    Args:
        runner, reference: of the same head, empty.
        vocabulary: V, ids are drawn from below it.
    """
    draws = torch.Generator().manual_seed(16)
    text: list[int] = torch.randint(0, vocabulary, (COMPARED,), generator=draws).tolist()
    known, worst = 0, 0.0
    for places, steps, back in ROUNDS:
        states = {layer: torch.randn(places, runner.state_size, generator=draws) for layer in runner.layers}
        for each in (runner, reference):
            each.observe_states(known, states)
        known += places
        worst = max(worst, _apart(runner, reference, text[runner.length : known + 1]))
        for place in range(known + 1, known + min(steps, runner.longest or steps)):
            worst = max(worst, _apart(runner, reference, text[place : place + 1]))
        known -= back
        for each in (runner, reference):
            each.rollback(known)
    for each in (runner, reference):
        each.rollback(0)
    return worst


def _apart(runner: Slot, reference: Slot, tokens: list[int]) -> float:
    """The difference of the logits, states and predictions after the last of some tokens."""
    mine, theirs = (each.extend(tokens, keep=1, hidden=True) for each in (runner, reference))
    assert mine.hidden is not None
    assert theirs.hidden is not None
    found = [apart(mine.logits, theirs.logits), apart(mine.hidden, theirs.hidden)]
    if runner.foresee is not None and reference.foresee is not None:
        token = torch.tensor(tokens[-1])
        found.append(abs(float(runner.foresee(token)) - float(reference.foresee(token))))
    return max(found)
