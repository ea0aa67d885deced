"""``python -m specctl.models.files.unpack_gguf FILE FOLDER``: a GGUF file as a checkpoint that specctl runs.

transformers reads the file and saves its weights in float32.
"""

import argparse
import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path

from specctl.errors import SpecctlError, UsageError
from specctl.models.files.gguf import GgufFile, describe, write_folder


def unpack(file: Path, folder: Path) -> None:
    """Write a GGUF file's model to a folder: float32 weights, configuration and tokenizer.

    Args:
        file: a whole model in one file.
        folder: must not exist; appears whole or not at all.

    Raises:
        UsageError: the folder exists, or the file does not.
        ModelError: the file is damaged, one of several, of an architecture that transformers does not read, or rotates
            positions in an unknown way; or the package gguf is missing.
    """
    if folder.exists():
        raise UsageError(f"{folder} exists already.", "Name a folder that does not exist.")
    if not file.is_file():
        raise UsageError(f"There is no file {file}.", "Paths are relative to the current directory.")
    opened = GgufFile(file)
    from transformers import AutoModelForCausalLM, GgufConfig

    with opened.read():
        model = AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype="float32", quantization_config=GgufConfig(dequantize=True)
        )

    def write(made: Path) -> None:
        model.save_pretrained(made)
        describe(opened, made)  # replaces what transformers makes of the file's configuration

    write_folder(folder, write)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m specctl.models.files.unpack_gguf",
        description="Write a GGUF file's model to a folder, as float32 safetensors with configuration and tokenizer.",
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("folder", type=Path)
    asked = parser.parse_args(arguments)
    try:
        unpack(asked.file, asked.folder)
    except SpecctlError as error:
        print(f"error: {error.message}\n  {error.hint}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    print(asked.folder)
    return 0


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        sys.exit(main())
