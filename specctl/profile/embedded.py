"""The small model family that ships with the package, so that every command works offline."""

from pathlib import Path

from specctl.errors import ProfileError

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
