"""The folder through which transformers' ``generate`` uses specctl: ``custom_generate=FOLDER``."""

from pathlib import Path


def hub_folder() -> Path:
    """The folder with ``custom_generate/``, to be named in ``custom_generate=`` or copied into a hub repository."""
    return Path(__file__).parent
