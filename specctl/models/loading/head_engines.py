"""The runner for a draft head and an engine setting."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from specctl.models.draft_heads.block import BlockHead
from specctl.models.draft_heads.block_runner import BlockRunner, GraphBlockRunner
from specctl.models.draft_heads.chain import ChainHead
from specctl.models.draft_heads.chain_runner import GraphHeadRunner, HeadRunner
from specctl.models.loading.parallel_runner import ParallelRunner
from specctl.models.passes.weights import weight_bytes
from specctl.models.placing.engine_table import ENGINES, chosen_for_head
from specctl.models.running.engines import Choice, EngineSettings, Where, compiler_for
from specctl.models.running.slot import Slot

RUNNERS: dict[type, tuple[Callable[..., Slot], Callable[..., Slot]]] = {
    ChainHead: (HeadRunner, GraphHeadRunner),
    BlockHead: (BlockRunner, GraphBlockRunner),
}
"""By family: the runner over fixed buffers, and the one that captures its passes."""


def build_head_runner(
    head: ChainHead | BlockHead,
    vocabulary: int,
    name: str,
    settings: EngineSettings,
    verifier: Slot | None = None,
) -> Slot:
    """The fastest runner that the settings allow.

    Args:
        head: in eval mode, on its device.
        vocabulary: the pair's shared vocabulary.
        name: the head's, in messages.
        settings: which engine, and whether to compile.
        verifier: the runner of the model whose states it reads, without others around it.
    """
    device = next(head.parameters()).device
    its = None if verifier is None else ENGINES.get(verifier.engine.partition(",")[0])
    where = Where((str(device),), weight_bytes(head))
    choice: Choice | None = chosen_for_head(settings.engine, where, settings, its, blocks=head.longest is not None)
    while choice is not None:
        for line in choice.said:
            settings.notice(f"{name} {line}")
        runner = _by_engine(choice, head, vocabulary, name, settings, verifier)
        if runner is not None and isinstance(head, ChainHead) and head.mask_token is not None:
            assert head.longest is not None
            return ParallelRunner(runner, head.mask_token, head.longest)
        if runner is not None:
            return runner
        choice = choice.otherwise
    raise AssertionError("the last engine runs any head")


def _by_engine(
    choice: Choice,
    head: ChainHead | BlockHead,
    vocabulary: int,
    name: str,
    settings: EngineSettings,
    verifier: Slot | None,
) -> Slot | None:
    """A head's runner by an engine; None where that has found that it cannot or should not run the head."""
    plain, captured = next(runners for family, runners in RUNNERS.items() if isinstance(head, family))
    if choice.engine.tried:
        from specctl.models.onnx_heads.engine import build_onnx_head

        threads = (verifier.threads if verifier is not None else None) or 1
        return build_onnx_head(head, vocabulary, name, settings, lambda: plain(head, vocabulary), threads)
    compiler = compiler_for(name, replace(settings, compile=choice.compiles))
    if choice.engine.captures:
        from specctl.models.passes.cuda_capture import CudaCapture

        said: dict[str, Any] = {"name": name, "notice": settings.notice, "progress": settings.progress}
        device = next(head.parameters()).device
        return captured(head, vocabulary, CudaCapture(device), compiler=compiler, **said)
    return plain(head, vocabulary, compiler=compiler)
