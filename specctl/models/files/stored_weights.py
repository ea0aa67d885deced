"""The weight files of a checkpoint that are here, and a hash of what files hold."""

import hashlib
from collections.abc import Iterable
from pathlib import Path

from specctl.models.files.checkpoint import Checkpoint

PICKLED = "pytorch_model.bin"
"""Weights of a draft head as torch pickles them."""
_WHOLE = 64 << 20
"""Largest size in bytes of a file that is hashed completely; hashing a 70B model would take minutes."""
_SAMPLES, _SAMPLE = 256, 256 << 10


def files_hash(files: Iterable[Path], *, whole: bool = False) -> str:
    """SHA-256 of files' contents, in the given order.

    For a file of more than 64 MiB only its size and 256 blocks of 256 KiB, spread evenly from start to end, are hashed.
    This is enough, because training changes weights everywhere.

    Args:
        files: to read.
        whole: read large ones to the end too, for who must not overlook a single weight that somebody changed.

    Raises:
        OSError: a file cannot be read.
    """
    digest = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        digest.update(size.to_bytes(8, "little"))
        with path.open("rb") as file:
            if size <= _WHOLE:
                digest.update(file.read())
                continue
            if whole:
                while chunk := file.read(_WHOLE):
                    digest.update(chunk)
                continue
            for block in range(_SAMPLES):
                file.seek((size - _SAMPLE) * block // (_SAMPLES - 1))
                digest.update(file.read(_SAMPLE))
    return digest.hexdigest()


def stored_weights(checkpoint: Checkpoint) -> list[Path]:
    """The weight files of a model or draft head that are here; those of a draft head may be pickled."""
    pickled = checkpoint.folder / PICKLED
    return [pickled] if pickled.exists() and not checkpoint.has_weights() else checkpoint.weight_files()


def weights_hash(checkpoint: Checkpoint) -> str:
    """`files_hash` of the weights of a model or draft head that are here, and of the adapter that changes them."""
    return files_hash([*stored_weights(checkpoint), *(checkpoint.adapter.files if checkpoint.adapter else ())])
