"""``python -m specctl.models.files.unpack_gguf FILE FOLDER``: a GGUF file as a checkpoint that specctl runs.

transformers reads the file and saves its weights in float32. This module adds the scaling of rotary positions, which
transformers ignores: a GGUF file has it as tensors (Llama 3, Phi 3) or as ``rope.scaling`` keys.
"""

import argparse
import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specctl.errors import ModelError, SpecctlError, UsageError, pip_install

if TYPE_CHECKING:
    import numpy as np

CONVERT = "Else use the checkpoint that the file was made from."
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Settings of Llama 3.1 to 3.3 besides their factor; a GGUF file has only the resulting frequency divisors."""


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
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise ModelError(
            "Reading GGUF files needs the package gguf, which is not installed.", f"Run `{pip_install('gguf')}`."
        ) from error
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    try:
        reader = GGUFReader(file)
        parts, arch = _value(reader, "split.count") or 1, str(_value(reader, "general.architecture"))
    except Exception as error:
        raise _unreadable(file, error) from error
    if parts > 1:
        raise ModelError(
            f"{file} is one of {parts} files.", "Join them with llama.cpp's `llama-gguf-split --merge FIRST ALL`."
        )
    try:
        model = AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype="float32", quantization_config=GgufConfig(dequantize=True)
        )
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    except Exception as error:
        raise _unreadable(file, error) from error
    config = model.config.get_text_config(decoder=True)
    if (rotation := _rotation(reader, arch, config)) is not None:
        config.rope_parameters = {**config.rope_parameters, **rotation}
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
    try:
        model.save_pretrained(made)
        tokenizer.save_pretrained(made)
        os.umask(mask := os.umask(0))
        os.chmod(made, 0o777 & ~mask)
        made.rename(folder)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _unreadable(file: Path, error: Exception) -> ModelError:
    """The ModelError for the many exceptions that damaged files and unknown architectures raise."""
    reason = " ".join(str(error).split()) or type(error).__name__
    return ModelError(f"{file} cannot be read: {reason}", f"Download it again if it may be damaged. {CONVERT}")


def _rotation(reader: Any, arch: str, config: Any) -> dict[str, Any] | None:
    """A file's ``rope_parameters`` that transformers ignores; None if there are none. Unknown ones raise ModelError."""
    tensors = {tensor.name: tensor.data for tensor in reader.tensors}
    original = _value(reader, f"{arch}.rope.scaling.original_context_length")
    long, short = (tensors.get(f"rope_factors_{which}.weight") for which in ("long", "short"))
    if long is not None and short is not None:
        if original is None:
            raise ModelError(f"The GGUF file has no {arch}.rope.scaling.original_context_length.", CONVERT)
        return {
            "rope_type": "longrope",
            "long_factor": long.tolist(),
            "short_factor": short.tolist(),
            "original_max_position_embeddings": int(original),
            "factor": config.max_position_embeddings / int(original),
        }
    if (divisors := tensors.get("rope_freqs.weight")) is not None:
        return _llama3(divisors, float(config.rope_parameters["rope_theta"]))
    kind = _value(reader, f"{arch}.rope.scaling.type")
    if kind in (None, "none") or config.rope_parameters.get("rope_type") == kind:
        return None
    factor = _value(reader, f"{arch}.rope.scaling.factor")
    if kind not in ("linear", "yarn") or factor is None:
        raise ModelError(f"The GGUF file has rope.scaling of the unknown type {kind!r}.", CONVERT)
    found = {"rope_type": kind, "factor": float(factor)}
    return found if original is None else {**found, "original_max_position_embeddings": int(original)}


def _llama3(divisors: "np.ndarray[Any, Any]", theta: float) -> dict[str, Any]:
    """Llama 3's parameters of a file's divisors of frequencies ``(head_dim / 2,)``, checked against them."""
    import numpy as np
    import torch
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    found = {"rope_type": "llama3", "factor": float(divisors.max()), **LLAMA3}
    size = 2 * len(divisors)
    config = LlamaConfig(
        head_dim=size,
        max_position_embeddings=131072,
        rope_parameters={"rope_theta": theta, **found},
    )
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = theta ** (-np.arange(0, size, 2) / size)
    if not np.allclose(plain / scaled.numpy(), divisors, rtol=1e-3):
        raise ModelError("The GGUF file scales rotary frequencies differently from Llama 3.", CONVERT)
    return found


def _value(reader: Any, key: str) -> Any:
    """A file's metadata under a key; None if absent."""
    field = reader.get_field(key)
    return None if field is None else field.contents()


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
