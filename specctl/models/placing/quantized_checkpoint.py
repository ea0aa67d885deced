"""Whether this machine can read a checkpoint whose weights are quantised already."""

from typing import Any

from specctl.errors import ModelError
from specctl.models.files.checkpoint import Checkpoint
from specctl.models.files.hushing import hushed
from specctl.models.placing.placement import Placement
from specctl.models.placing.quantization import quantised_with

PACKAGES = {
    "aqlm": "aqlm[gpu,cpu]",
    "auto-round": "auto-round",
    "awq": "gptqmodel",
    "bitsandbytes": "bitsandbytes",
    "compressed-tensors": "compressed-tensors",
    "eetq": "kernels",
    "gptq": "gptqmodel optimum",
    "hqq": "hqq",
    "quanto": "optimum-quanto",
    "torchao": "torchao",
}
"""What to install for a method; transformers' own message may name one of several packages."""


def require_readable(checkpoint: Checkpoint, placement: Placement) -> None:
    """Raise a ModelError if a checkpoint is quantised in a way that transformers cannot read here.

    Args:
        checkpoint: one with any weights, quantised or not.
        placement: where the model will go, since some methods need a GPU.

    Raises:
        ModelError: the method is unknown, its package is missing, or it does not run on the placement's devices.
    """
    described = quantised_with(checkpoint.settings())
    if described is None:
        return
    from transformers.quantizers.auto import AutoHfQuantizer

    method = _method(described)
    where = checkpoint.folder / "config.json"
    with hushed():
        try:
            known = AutoHfQuantizer.supports_quant_method(described)  # type: ignore[no-untyped-call]
        except (TypeError, ValueError):
            known = False
        if not known:
            raise ModelError(
                f"{checkpoint} is quantised with {method!r}, a method that transformers does not know.",
                f"Update transformers, or correct quant_method in {where}.",
            )
        try:
            quantizer = AutoHfQuantizer.from_config(dict(described), pre_quantized=True)
            quantizer.validate_environment(device_map=_device_map(placement), weights_only=True)
        except ImportError as error:
            hint = f"Run `pip install {PACKAGES[method]}`." if method in PACKAGES else "Install what it names."
            raise ModelError(f"{checkpoint} is quantised with {method}: {_sentence(error)}.", hint) from error
        except Exception as error:
            raise ModelError(
                f"{checkpoint} is quantised with {method}, which cannot run here: {_sentence(error)}.",
                f"Use a device that {method} supports, or a checkpoint that is not quantised; quantization_config in "
                f"{where} may also be damaged.",
            ) from error


def _method(described: dict[str, Any]) -> str:
    method = described.get("quant_method")
    if method is None and (described.get("load_in_8bit") or described.get("load_in_4bit")):
        return "bitsandbytes"
    return str(method)


def _device_map(placement: Placement) -> dict[str, Any]:
    """A map that names every device of the placement: a strategy's own map is only made from the loaded model."""
    if isinstance(placement.device_map, dict):
        return placement.device_map
    names = placement.devices
    return {"": names[0]} if len(names) == 1 else {str(index): name for index, name in enumerate(names)}


def _sentence(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__
