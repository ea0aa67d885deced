"""The runner for a draft head and an engine setting."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from specctl.models.draft_heads.block import BlockHead
from specctl.models.draft_heads.block_runner import BlockRunner, GraphBlockRunner
from specctl.models.draft_heads.chain import ChainHead
from specctl.models.draft_heads.head_runner import GraphHeadRunner, HeadRunner
from specctl.models.passes.weights import weight_bytes
from specctl.models.placing.engine_table import chosen_for_head
from specctl.models.running.engines import EngineSettings, Where, compiler_for
from specctl.models.running.runner import Runner

RUNNERS: dict[type, tuple[Callable[..., Runner], Callable[..., Runner]]] = {
    ChainHead: (HeadRunner, GraphHeadRunner),
    BlockHead: (BlockRunner, GraphBlockRunner),
}
"""By family: the runner over fixed buffers, and the one that captures its passes."""


def build_head_runner(head: ChainHead | BlockHead, vocabulary: int, name: str, settings: EngineSettings) -> Runner:
    """The fastest runner that the settings allow; a head always runs over fixed buffers.

    Args:
        head: in eval mode, on its device.
        vocabulary: the pair's shared vocabulary.
        name: the head's, in messages.
        settings: which engine, and whether to compile.
    """
    plain, captured = next(runners for family, runners in RUNNERS.items() if isinstance(head, family))
    device = next(head.parameters()).device
    choice = chosen_for_head(settings.engine, Where((str(device),), weight_bytes(head)), settings)
    for line in choice.said:
        settings.notice(f"{name} {line}")
    compiler = compiler_for(name, replace(settings, compile=choice.compiles))
    if choice.engine.captures:
        from specctl.models.passes.cuda_capture import CudaCapture

        said: dict[str, Any] = {"name": name, "notice": settings.notice, "progress": settings.progress}
        return captured(head, vocabulary, CudaCapture(device), compiler=compiler, **said)
    return plain(head, vocabulary, compiler=compiler)
