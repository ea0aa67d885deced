"""Keeping the warnings and progress bars of transformers and the hub off the terminal."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


def hush_imports() -> None:
    """Suppress the warnings of torchao and bitsandbytes, which transformers imports where they are installed: they warn
    of what users cannot change. Before torch is imported."""
    for name in ("torchao", "torch.utils._pytree", "bitsandbytes"):
        logging.getLogger(name).setLevel(logging.ERROR)


@contextmanager
def hushed(verbose: bool = False) -> Iterator[None]:
    """Suppress transformers' progress bars and warnings inside the block, unless ``verbose``."""
    if verbose:
        yield
        return
    from transformers.utils import logging as transformers_logging

    verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity(logging.CRITICAL)
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]


@contextmanager
def hushed_hub() -> Iterator[None]:
    """Suppress the hub client's warnings and progress bars inside the block."""
    from huggingface_hub.utils import logging as hub_logging
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    verbosity, bars = hub_logging.get_verbosity(), not are_progress_bars_disabled()
    hub_logging.set_verbosity(logging.ERROR)
    disable_progress_bars()
    try:
        yield
    finally:
        hub_logging.set_verbosity(verbosity)
        if bars:
            enable_progress_bars()
