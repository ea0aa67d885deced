"""Names in a profile that can be checked without looking at files outside of the package."""

from pathlib import Path

from specctl.errors import ProfileError
from specctl.plugins import DRAFTER, DRAFTERS

NAMES = ("target", "mid", "draft", "eagle3", "dspark")
HEADS = ("draft-head", "eagle3-head", "disco-head")
_FOLDER = Path(__file__).parents[1] / "models" / "embedded"


def model_path(name: str) -> Path:
    """The directory of an embedded model's checkpoint.

    Raises:
        ProfileError: there is no such model.
    """
    if name not in NAMES:
        raise ProfileError(f"there is no embedded model '{name}' (known: {', '.join(NAMES)})")
    return _FOLDER / name


def predictor_path(name: str) -> Path:
    """The directory of an acceptance head that was trained on an embedded draft.

    Raises:
        ProfileError: there is no such head.
    """
    if name not in HEADS:
        raise ProfileError(f"there is no embedded head '{name}' (known: {', '.join(HEADS)})")
    return _FOLDER / name


EMBEDDED = "embedded:"
_STRATEGIES = ("auto", "balanced", "balanced_low_0", "sequential")
_DEVICES = ("cpu", "cuda", "mps", "xpu", "npu", "hpu", "mlu")


def known_device(device: str) -> str:
    """A device or a strategy of accelerate; raises ValueError for anything else."""
    kind, _, index = device.partition(":")
    if device in _STRATEGIES or (kind in _DEVICES and (device == kind or index.isdecimal())):
        return device
    raise ValueError(f"must be {', '.join(_STRATEGIES)}, or a device such as {', '.join(_DEVICES)} or cuda:1")


def known_model(model: str) -> str:
    """A model's name; raises ValueError for an unknown one of those that the program or its plug-ins name."""
    if model.startswith(EMBEDDED):
        try:
            model_path(model.removeprefix(EMBEDDED))
        except ProfileError as error:
            raise ValueError(f"is unknown: {error.message}") from error
    if model.startswith(DRAFTER):
        name = model.removeprefix(DRAFTER).partition(":")[0]
        if name not in DRAFTERS:
            known = f"no drafter is registered by this name (known: {', '.join(DRAFTERS) or 'none'})"
            raise ValueError(f"is unknown: {DRAFTERS.broken.get(name, known)}")
    return model


def known_head(head: str) -> str:
    """An acceptance head's name; raises ValueError for an unknown one of those that ship with the program."""
    if head.startswith(EMBEDDED):
        try:
            predictor_path(head.removeprefix(EMBEDDED))
        except ProfileError as error:
            raise ValueError(f"is unknown: {error.message}") from error
    return head
