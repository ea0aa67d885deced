"""Speculative decoding with draft models that know when to stop."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specctl.api.calibration import Calibrated, calibrate
    from specctl.api.decoder import Decoder, load
    from specctl.api.hub import hub_folder
    from specctl.api.speculative import Speculative, speculative
    from specctl.policies import POLICIES

__version__ = "1.0.0"

_HOMES = {
    "POLICIES": "specctl.policies",
    "Calibrated": "specctl.api.calibration",
    "Decoder": "specctl.api.decoder",
    "Speculative": "specctl.api.speculative",
    "calibrate": "specctl.api.calibration",
    "hub_folder": "specctl.api.hub",
    "load": "specctl.api.decoder",
    "speculative": "specctl.api.speculative",
}
"""Where the names of the Python API are defined. They import torch, so they are imported when they are used."""

__all__ = [
    "POLICIES",
    "Calibrated",
    "Decoder",
    "Speculative",
    "__version__",
    "calibrate",
    "hub_folder",
    "load",
    "speculative",
]


def __getattr__(name: str) -> Any:
    if (home := _HOMES.get(name)) is None:
        raise AttributeError(f"module 'specctl' has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(home), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
