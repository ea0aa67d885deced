"""Speculative decoding with draft models that know when to stop."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specctl.api.speculative import Speculative, speculative

__version__ = "0.1.0"

_HOMES = {
    "Speculative": "specctl.api.speculative",
    "speculative": "specctl.api.speculative",
}
"""Where the names of the Python API are defined: importing them imports torch, so it happens when they are used."""

__all__ = ["Speculative", "__version__", "speculative"]


def __getattr__(name: str) -> Any:
    if (home := _HOMES.get(name)) is None:
        raise AttributeError(f"module 'specctl' has no attribute {name!r}")
    found = getattr(import_module(home), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
