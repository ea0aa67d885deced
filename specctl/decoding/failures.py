"""What fails while one text is written, as an error of that text."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from specctl.errors import RecordError, reason
from specctl.processes.interrupts import interrupt


@contextmanager
def failures_of_a_text() -> Iterator[None]:
    """Raise a RecordError for what the models' code raises over one text, so that other texts go on.

    What would fail for every text stays as it is: a device that can run nothing any more, and an interrupt that native
    code turned into an error of its own.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise RecordError("out_of_memory", f"not enough device memory for this text: {error}") from error
    except (RuntimeError, IndexError) as error:
        if isinstance(error, torch.AcceleratorError) or interrupt.became(error):
            raise
        what = f"{type(error).__name__}: {reason(error)}"
        raise RecordError("failed_pass", f"a pass failed over this text: {what}") from error
