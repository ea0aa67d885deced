"""GGUF files on torch: what transformers computes with on a CUDA device without unpacking it."""

from typing import TYPE_CHECKING, Any

from specctl.errors import ModelError, pip_install
from specctl.models.files.checkpoint import Checkpoint
from specctl.models.files.gguf_header import parts_of, read_header
from specctl.models.onnx.store import version_of
from specctl.profile.schema import Engine

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PACKAGE = "kernels"
KERNEL = "ggml-org/ggml-quantization"  # The repository of the hub with the kernel that transformers uses
FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
"""Types that have no blocks."""


def stays_packed(checkpoint: Checkpoint, engine: Engine, kind: str) -> bool:
    """Whether torch is to run a GGUF file with its blocks as they stand.

    transformers 5.24 does so for the architectures qwen35, qwen35moe and lfm2, in a single file.

    Args:
        checkpoint: the model's files.
        engine: the one that is to run it.
        kind: of its device, such as ``cuda``.

    Raises:
        ModelError: the file cannot be read.
    """
    file = checkpoint.weights
    if file is None or kind != "cuda" or engine in ("onnx", "llama") or len(parts_of(file)) > 1:
        return False
    try:
        from transformers.integrations.gguf.utils import is_gguf_arch_supported
    except ImportError:  # a version without it
        return False
    header = read_header(file)
    return bool(is_gguf_arch_supported(header.architecture)) and not header.sizes.keys() <= FLOATS


def kernels_wanted() -> str:
    """The versions of the package kernels that transformers takes, such as ``kernels>=0.18.2,<0.19``."""
    from transformers.dependency_versions_table import deps

    return deps.get(PACKAGE, PACKAGE)


def kernels_there() -> str | None:
    """The installed version of the package kernels; None without one."""
    return version_of(PACKAGE)


def kernels_fit() -> bool:
    """Whether the package kernels is installed in a version that transformers takes."""
    from transformers.utils.import_utils import is_kernels_available

    return bool(is_kernels_available())


def require_kernels(checkpoint: Checkpoint) -> None:
    """Raise a ModelError if the package kernels is missing in the version that transformers takes.

    transformers would unpack the whole model instead.
    """
    if not kernels_fit():
        wanted, found = kernels_wanted(), kernels_there()
        there = "it is not installed" if found is None else f"{found} is installed"
        raise ModelError(
            f"{checkpoint} is a GGUF file, and torch computes with its blocks through {wanted}; {there}.",
            f"Run `{pip_install(wanted)}`. If there is no such version, install a transformers that takes another one, "
            "or a llama.cpp with CUDA.",
        )


def packed_file(checkpoint: Checkpoint, config: Any) -> dict[str, Any]:
    """The arguments of ``from_pretrained`` that load a GGUF file with its blocks.

    Args:
        checkpoint: the model's files.
        config: its transformers configuration, which is changed.

    Raises:
        ModelError: transformers cannot have the kernel for its blocks, which it fetches from the hub, and would unpack
            the whole model.
    """
    from transformers.integrations.gguf.kernels import get_gguf_kernel

    if not get_gguf_kernel():
        raise ModelError(
            f"{checkpoint}: transformers has no kernel for its blocks here, and would unpack the whole model.",
            f"It fetches {KERNEL} from the hub for this device and torch; run `hf download {KERNEL}` to see why not.",
        )
    del config.quantization_config  # the one in ``small_files``; transformers makes its own
    return {"config": config, "gguf_file": str(checkpoint.weights)}


def require_packed(checkpoint: Checkpoint, model: "PreTrainedModel") -> None:
    """Raise a ModelError if transformers unpacked a file while it loaded the model; set its generation settings.

    transformers does not read those of a GGUF file.
    """
    if getattr(model, "quantization_method", None) is None:
        raise ModelError(
            f"{checkpoint}: transformers unpacked it, which takes several times the memory.",
            "Run it with llama.cpp, or name the checkpoint that the file was made from.",
        )
    from transformers import GenerationConfig

    model.generation_config = GenerationConfig.from_pretrained(checkpoint.folder)
