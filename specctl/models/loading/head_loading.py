"""From a draft head's files to a network in memory, beside the model whose states it reads."""

from typing import TYPE_CHECKING

import torch

from specctl.errors import ModelError
from specctl.models.draft_heads.block import BlockHead
from specctl.models.draft_heads.chain import ChainHead
from specctl.models.draft_heads.checkpoint import DraftHeadCheckpoint
from specctl.models.files.checkpoint import ITEM_BYTES
from specctl.models.placing.memory import Estimate, device_memory
from specctl.models.placing.placement import place
from specctl.profile.schema import ModelTable

if TYPE_CHECKING:
    from specctl.models.loading.model import LoadedModel


def needed(head: ChainHead | BlockHead) -> Estimate:
    """The memory that a draft head needs."""
    parameters = sum(weight.numel() for weight in head.parameters())
    dtype = str(next(head.parameters()).dtype).removeprefix("torch.")
    size = parameters * ITEM_BYTES[dtype]
    return Estimate(parameters, size, dtype, quantised=False, cached_values=head.cached_values)


def load_draft_head(found: DraftHeadCheckpoint, table: ModelTable, verifier: "LoadedModel") -> ChainHead | BlockHead:
    """Load a draft head next to its verifier: the network in eval mode, on its device.

    Args:
        found: its files.
        table: its profile table; with device and dtype ``auto`` they are those of the verifier's output layer.
        verifier: the loaded model whose states it reads.

    Raises:
        ModelError: the head is damaged, of a layout that specctl does not know, or made for another model, or its
            device does not exist.
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
