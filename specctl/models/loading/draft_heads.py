"""The runner for a draft head and an engine setting."""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from specctl.errors import ModelError
from specctl.models.draft_heads.block import BlockHead
from specctl.models.draft_heads.block_runner import BlockPasses, GraphBlockPasses
from specctl.models.draft_heads.chain import ChainHead
from specctl.models.draft_heads.chain_runner import ChainPasses, GraphChainPasses
from specctl.models.draft_heads.checkpoint import DraftHeadCheckpoint
from specctl.models.files.checkpoint import ITEM_BYTES
from specctl.models.passes.weights import Where, weight_bytes
from specctl.models.placing.engine_table import ENGINES, chosen_for_head
from specctl.models.placing.memory import Estimate, device_memory
from specctl.models.placing.placement import place
from specctl.models.running.engines import Choice, EngineSettings, compiler_for
from specctl.models.running.passes import Passes
from specctl.models.running.slot import Slot
from specctl.models.running.transforms import ParallelPasses
from specctl.profile.schema import ModelTable

if TYPE_CHECKING:
    from specctl.models.loading.model import LoadedModel

PASSES: dict[type, tuple[Callable[..., Passes], Callable[..., Passes]]] = {
    ChainHead: (ChainPasses, GraphChainPasses),
    BlockHead: (BlockPasses, GraphBlockPasses),
}
"""By family: the runner over fixed buffers, and the captured one."""


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
        verifier: its verifier's runner, without wrappers.
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
            return Slot(ParallelPasses(runner, head.mask_token, head.longest))
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
    """A head's runner on an engine; None if the engine cannot or should not run the head."""
    plain, captured = next(passes for family, passes in PASSES.items() if isinstance(head, family))
    if choice.engine.tried:
        from specctl.models.onnx_heads.engine import build_onnx_head

        threads = (verifier.threads if verifier is not None else None) or 1
        return build_onnx_head(head, vocabulary, name, settings, lambda: Slot(plain(head, vocabulary)), threads)
    compiler = compiler_for(name, replace(settings, compile=choice.compiles))
    if choice.engine.captures:
        from specctl.models.passes.cuda_capture import CudaCapture

        said: dict[str, Any] = {"name": name, "notice": settings.notice, "progress": settings.progress}
        device = next(head.parameters()).device
        return Slot(captured(head, vocabulary, CudaCapture(device), compiler=compiler, **said))
    return Slot(plain(head, vocabulary, compiler=compiler))


def needed(head: ChainHead | BlockHead) -> Estimate:
    """The memory needs of a draft head."""
    parameters = sum(weight.numel() for weight in head.parameters())
    dtype = str(next(head.parameters()).dtype).removeprefix("torch.")
    size = parameters * ITEM_BYTES[dtype]
    return Estimate(parameters, size, dtype, quantised=False, cached_values=head.cached_values)


def load_draft_head(found: DraftHeadCheckpoint, table: ModelTable, verifier: "LoadedModel") -> ChainHead | BlockHead:
    """Load a draft head next to its verifier: the network in eval mode, on its device.

    With device and dtype ``auto`` in its table they are those of the verifier's output layer. Raises ModelError if the
    head is damaged, of an unknown layout or for another model, or its device does not exist.
    """
    head = found.network(verifier.model)
    if table.device != "auto":
        place(table, needed(head), device_memory(), found.checkpoint.role)
    output = verifier.model.get_output_embeddings()  # type: ignore[no-untyped-call]
    own = verifier.device if output.weight.is_meta else output.weight.device
    device = own if table.device == "auto" else torch.device(table.device)  # type: ignore[arg-type]
    dtype = verifier.dtype if table.dtype == "auto" else getattr(torch, table.dtype)
    try:
        head = head.to(device, dtype).eval()
    except (RuntimeError, torch.OutOfMemoryError) as error:
        raise ModelError(
            f"{found} does not fit on {device} ({str(error).splitlines()[0]}).",
            f"Set device in [{found.checkpoint.role}] to another one.",
        ) from error
    head.requires_grad_(False)
    return head
