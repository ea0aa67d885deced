"""The process of a served pair, with a pretended llama.cpp that ends it as the real one may."""

import os
import signal
from typing import Any

import pytest

from specctl.commands import loading
from specctl.models.llama import library as real
from specctl.text_engine.engine import TextEngine
from tests.support.pretended_llama import PretendedLlama

ABORTS, KILLED = 300, 301
"""Tokens at which llama.cpp aborts, and at which the system ends the process."""
AT_LOAD = "PRETENDED_LLAMA_AT_LOAD"
"""The variable that says how the process ends while it opens a file: ``aborts`` or ``killed``."""


class Mortal(PretendedLlama):
    """Ends its process at some tokens, once the models are loaded."""

    loaded = False

    def _llama_model_load_from_file(self, path: bytes, parameters: Any) -> int | None:
        _end(os.environ.get(AT_LOAD))
        return super()._llama_model_load_from_file(path, parameters)

    def _llama_decode(self, handle: int, batch: Any) -> int:
        code = super()._llama_decode(handle, batch)
        read = {token for _, _, token, _ in self.calls[-1][1]}
        if self.loaded:
            _end("aborts" if ABORTS in read else "killed" if KILLED in read else None)
        return code


def _end(how: str | None) -> None:
    if how == "aborts":
        real._aborted(b"GGML_ASSERT(n_tokens > 0) failed")
    elif how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)


def served(**setup: Any) -> TextEngine:
    """Stands for `loading.served_replica`."""

    library = Mortal()
    library.install(pytest.MonkeyPatch())
    found = loading.served_replica(**setup)
    library.loaded = True
    return found
