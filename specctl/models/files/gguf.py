"""GGUF files: their tensors in the file, and their configuration and tokenizer as transformers' files."""

import atexit
import hashlib
import json
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specctl.errors import ModelError, pip_install
from specctl.models.files.cache import cache_home
from specctl.models.files.gguf_header import Tensor, read_header

if TYPE_CHECKING:
    import numpy as np

CONVERT = "Else use the checkpoint that the file was made from."
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Settings of Llama 3.1 to 3.3 besides their factor; a GGUF file has only the resulting frequency divisors."""
MAKERS = ("specctl-llm", "transformers", "tokenizers", "gguf")
"""Packages that decide what `small_files` has."""


def is_gguf(file: Path) -> bool:
    """Whether a file is GGUF by its name or by its first bytes."""
    if file.suffix.lower() == ".gguf":
        return True
    try:
        with file.open("rb") as opened:
            return opened.read(4) == b"GGUF"
    except OSError:
        return False


class GgufFile:
    """A GGUF file, mapped into memory, for transformers, which reads it with the package gguf.

    Args:
        path: of a whole model in one file.

    Raises:
        ModelError: the file is damaged, another one, or one of several; or the package is missing.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if find_spec("gguf") is None:
            raise ModelError(
                "Reading GGUF files needs the package gguf, which is not installed.", f"Run `{pip_install('gguf')}`."
            )
        self.header = read_header(path)
        self.architecture = self.header.architecture
        parts = max(len(self.header.files), self.value("split.count") or 1)
        if parts > 1:
            raise ModelError(
                f"{path} is one of {parts} files.", "Join them with llama.cpp's `llama-gguf-split --merge FIRST ALL`."
            )

    @contextmanager
    def read(self) -> Iterator[None]:
        """Turn the many exceptions that damaged files and unknown architectures raise into one ModelError."""
        try:
            yield
        except ModelError:
            raise
        except Exception as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise ModelError(
                f"{self.path} cannot be read: {reason}", f"Download it again if it may be damaged. {CONVERT}"
            ) from error

    def value(self, key: str) -> Any:
        """A file's metadata under a key; None if absent."""
        return self.header.values.get(key)

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors by their names in the file."""
        return {tensor.name: tensor for tensor in self.header.tensors}

    def rows(self, tensor: Tensor) -> "np.ndarray[Any, Any]":
        """A tensor's rows: numbers of float32 or float16, the inputs last, else blocks as bytes."""
        import numpy as np

        data = np.memmap(self.path, mode="r", offset=tensor.offset, shape=tensor.size)
        kind = {"F32": "<f4", "F16": "<f2"}.get(tensor.type, "u1")
        return data.view(np.dtype(kind)).reshape(*tensor.shape[:0:-1], -1)

    def config(self) -> Any:
        """The transformers configuration, with the scaling of rotary positions, which transformers ignores."""
        from transformers import AutoConfig

        with self.read():
            config = AutoConfig.from_pretrained(self.path.parent, gguf_file=self.path.name)
            decoder = config.get_text_config(decoder=True)
            if (rotation := self._rotation(decoder)) is not None:
                decoder.rope_parameters = {**decoder.rope_parameters, **rotation}
        return config

    def tokenizer(self) -> Any:
        """The transformers tokenizer, with the file's chat template."""
        from transformers import AutoTokenizer

        with self.read():
            return AutoTokenizer.from_pretrained(self.path.parent, gguf_file=self.path.name)

    def _rotation(self, config: Any) -> dict[str, Any] | None:
        """A file's ``rope_parameters`` that transformers ignores; None if there are none.

        A file has them as tensors (Llama 3, Phi 3) or as ``rope.scaling`` keys. Unknown ones raise ModelError.
        """
        arch = self.architecture
        original = self.value(f"{arch}.rope.scaling.original_context_length")
        long, short, divisors = (
            None if (factors := self.tensors.get(f"rope_{which}.weight")) is None else self.rows(factors)
            for which in ("factors_long", "factors_short", "freqs")
        )
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
        if divisors is not None:
            return _llama3(divisors, float(config.rope_parameters["rope_theta"]))
        kind = self.value(f"{arch}.rope.scaling.type")
        if kind in (None, "none") or config.rope_parameters.get("rope_type") == kind:
            return None
        factor = self.value(f"{arch}.rope.scaling.factor")
        if kind not in ("linear", "yarn") or factor is None:
            raise ModelError(f"The GGUF file has rope.scaling of the unknown type {kind!r}.", CONVERT)
        found = {"rope_type": kind, "factor": float(factor)}
        return found if original is None else {**found, "original_max_position_embeddings": int(original)}


def unpacking(file: Path, role: str) -> str:
    """A hint with this installation's command to unpack a GGUF file."""
    folder = file.name.removesuffix(file.suffix)
    command = [sys.executable, "-m", "specctl.models.files.unpack_gguf", str(file), folder]
    return (
        f"Unpack the file into float32 weights of up to 8 times its size: `{shlex.join(command)}`, and set "
        f"model = {folder!r} in [{role}]."
    )


def small_files(path: Path) -> Path:
    """A folder with the configuration, generation settings and tokenizer of a GGUF file, as transformers writes them.

    Made when it is first asked for, and again after a change of the file or of a package that reads it. It is kept in
    `cache_home`; where that cannot be written to, in a folder that this process removes.

    Raises:
        ModelError: see `GgufFile`.
    """
    state = path.stat()
    source = [str(path.resolve()), state.st_size, state.st_mtime_ns, *map(_version, MAKERS)]
    folder = cache_home() / "gguf" / hashlib.sha256(json.dumps(source).encode()).hexdigest()[:32]
    if (folder / "config.json").is_file():
        return folder
    file = GgufFile(path)
    try:
        return write_folder(folder, lambda made: describe(file, made, packed=True))
    except OSError:
        pass
    made = Path(tempfile.mkdtemp(prefix="specctl-gguf-"))
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return write_folder(made / folder.name, lambda made: describe(file, made, packed=True))


def describe(file: GgufFile, folder: Path, *, packed: bool = False) -> None:
    """Write what `small_files` has into a folder; ``packed`` says that the weights stay in the file."""
    from transformers import GenerationConfig

    config, tokenizer = file.config(), file.tokenizer()
    config.dtype = "float32"
    if packed:
        config.quantization_config = {"quant_method": "gguf"}
    config.save_pretrained(folder)
    ends = {
        "bos_token_id": config.bos_token_id,
        "pad_token_id": config.pad_token_id,
        "eos_token_id": file.header.end_ids,
    }
    known = {name: found for name, found in ends.items() if found not in (None, [])}
    GenerationConfig(**known).save_pretrained(folder)  # type: ignore[no-untyped-call]
    tokenizer.save_pretrained(folder)


def write_folder(folder: Path, write: Callable[[Path], None]) -> Path:
    """Make a folder that appears whole or not at all; returns it. One that appears meanwhile stays.

    Raises:
        OSError: there is no room for it.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
    try:
        write(made)
        os.umask(mask := os.umask(0))
        os.chmod(made, 0o777 & ~mask)
        try:
            made.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return folder


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


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
