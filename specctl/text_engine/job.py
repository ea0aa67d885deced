"""What every replica does, and how it says that it cannot."""

import os
import pickle
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from specctl.errors import ModelError, SpecctlError, reason
from specctl.models.files.library_calls import hush_imports
from specctl.text_engine.engine import Answer, TextEngine

if TYPE_CHECKING:
    from specctl.text_engine.model_sources import Sources


@dataclass(frozen=True, slots=True)
class Job:
    """What every replica does.

    Attributes:
        maker: ``package.module:function``, imported in the replica alone, so that who hands out the work need not
            import torch. It is called once with the setup and the replica's ``number``, loads what answers need, and
            gives the function that answers.
        setup: its keyword arguments; they are pickled.
        passing: names of those that differ from command to command and make no other replica.
        sources: the command's models, which are to be the replica's; None for a job without any.
        restarts: whether a replica that fails over a question ends, so that another one is started, instead of the
            error ending the command.
    """

    maker: str
    setup: Mapping[str, Any]
    passing: frozenset[str] = frozenset()
    sources: "Sources | None" = None
    restarts: bool = False

    def begin(self, number: int) -> Answer | TextEngine:
        """Load what answers need; ``number`` is the replica's, from 0, since one is enough to tell what all would.

        Returns:
            A function that answers one question after the other; or an engine of the replica's own, which answers
            several at once, perhaps in parts.

        Raises:
            ModelError: the models are not those of the command, or were written while they were loaded.
        """
        hush_imports()
        before = [] if self.sources is None else self.sources.enter()
        module, _, function = self.maker.partition(":")
        answer: Answer | TextEngine = getattr(import_module(module), function)(number=number, **self.setup)
        if self.state() != before:
            raise ModelError("Files of the models were written while a replica loaded them.", "Run the command again.")
        return answer

    def state(self) -> list[Any]:
        """`Sources.state` of its models, from the replica's own folder."""
        return [] if self.sources is None else self.sources.state()


class ReplicaError(SpecctlError):
    """Replicas cannot be used, or cannot be used any more."""


def portable(error: Exception) -> Exception:
    """An exception that can be sent to another process: itself, or where it does not pickle, its name and message.

    With ``SPECCTL_DEBUG`` it carries the traceback as a note.
    """
    if os.environ.get("SPECCTL_DEBUG", "0") not in {"", "0"}:
        error.add_note("".join(traceback.format_exception(error)).rstrip())
    try:
        if type(pickle.loads(pickle.dumps(error))) is type(error):
            return error
    except Exception:  # whatever its own code raises
        pass
    return ReplicaError(f"{type(error).__name__}: {reason(error)}")
