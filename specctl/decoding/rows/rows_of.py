"""Which of the two forms of rows some numbers get: the only place that asks where they are."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from specctl.decoding.rows.certain_rows import CertainRows
from specctl.decoding.rows.draft_verdict import Verdict
from specctl.decoding.rows.draws import DrawGenerator
from specctl.decoding.rows.host_rows import HostRows
from specctl.decoding.rows.rows import Rows, array
from specctl.models.passes.forward import Forward, Numbers, joined_numbers
from specctl.models.passes.host_device import draws
from specctl.models.passes.token_reader import Foresee
from specctl.profile.schema import Verification

if TYPE_CHECKING:
    import torch

    from specctl.decoding.rows.reading import Reader


def rows_of(forward: Forward) -> Rows:
    """The logits of a pass, of all V ids."""
    rows = forward.rows
    if forward.certain is not None:
        return CertainRows(array(rows), rows_over(forward.columns))
    return HostRows(rows) if isinstance(rows, np.ndarray) else rows_over(rows)


def columns_of(forward: Forward) -> Rows:
    """The logits of a draft's pass, of the N ids that it can write."""
    if forward.certain is not None:
        return rows_of(forward)
    columns = forward.columns
    return HostRows(columns, signals=forward.signals) if isinstance(columns, np.ndarray) else rows_over(columns)


def rows_over(numbers: Numbers) -> Rows:
    """Rows of numbers ``(R, V)``: by numpy where they are numpy's, in the processor's own memory, or on a device that
    cannot draw; else by torch."""
    if isinstance(numbers, np.ndarray):
        return HostRows(numbers)
    if on_host(numbers):
        return HostRows(array(numbers), numbers.device)
    from specctl.decoding.rows.device_rows import DeviceRows

    return DeviceRows(numbers)


def read_within(
    reader: "Reader",
    logits: "torch.Tensor",
    uniform: "torch.Tensor | None",
    hidden: "torch.Tensor | None",
    previous: "torch.Tensor | None",
    foresee: Foresee | None,
) -> "tuple[torch.Tensor, torch.Tensor | None]":
    """`Rows.read` within a pass: tensors in, tensors out, so that it can be compiled or captured."""
    if not on_host(logits):
        from specctl.decoding.rows.device_rows import read_on_device

        return read_on_device(reader, logits, uniform, hidden, previous, foresee)
    import torch

    number = None if uniform is None else float(uniform)
    numbers, law = HostRows(array(logits)[None], logits.device).read(reader, number, hidden, previous, foresee)
    return torch.tensor(numbers, dtype=torch.float64), None if law is None else torch.from_numpy(law)


def on_host(tensor: "torch.Tensor") -> bool:
    """Whether numpy reads a tensor: what is compiled, and what is on a device that can draw, is left to torch."""
    if not tensor.is_cpu and draws(tensor.device):
        return False
    from torch.compiler import is_compiling

    return not is_compiling()


def stacked(rows: Sequence[Numbers]) -> Numbers:  # K times (V,) -> (K, V)
    """Laws one below the other: numpy's if all of them are."""
    return joined_numbers([row[None] for row in rows])


def verify(
    tokens: "Sequence[int] | torch.Tensor",
    draft_probs: Numbers,
    target_probs: Numbers,
    generator: DrawGenerator | None,
    verification: Verification = "token",
) -> Verdict:
    """`Rows.verify` of laws ``(K + 1, V)`` or ``(K, V)``."""
    return rows_over(target_probs).verify(tokens, draft_probs, generator, verification)


def numbers_on(device: "torch.device", numbers: "Sequence[float] | torch.Tensor") -> "torch.Tensor":
    """Numbers, float64 if they are of the host and the device has it, on a device, without waiting for it."""
    import torch

    from specctl.models.passes.synchronisation import sent

    dtype = torch.float64 if draws(device) else torch.float32
    return numbers if isinstance(numbers, torch.Tensor) else sent(numbers, device, dtype)
