"""Quantisation on loading: the schemes of each ``quantize`` value, their devices and sizes."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specctl.errors import ModelError, pip_install
from specctl.models.files.checkpoint import ITEM_BYTES, Checkpoint
from specctl.models.onnx.store import PACKED, Unable
from specctl.models.placing.engine_table import engine_named
from specctl.models.placing.torch_gguf import stays_packed
from specctl.profile.schema import Engine, ModelTable

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class Scheme:
    """The storage of a linear layer's weight on one kind of device."""

    package: str  # the package that transformers needs for it
    bits: int  # of one weight
    # makes the transformers configuration from the dtype, the group size and the excluded modules
    config: Callable[[str, int, list[str]], Any]
    row_bytes: int = 0  # additional bytes for each output row, such as its scale
    # group sizes of weights in a row that share a scale and zero point in the compute dtype; empty for one group per
    # row
    groups: tuple[int, ...] = ()
    block_bytes: int = 0  # additional bytes for each 64 weights
    multiple: tuple[int, int] = (1, 1)  # rows and columns are padded to multiples of these
    rows_of: int = 1  # layers whose number of rows is not a multiple of this stay unquantised
    dtypes: tuple[str, ...] = ()  # supported compute dtypes; empty for all
    usual_dtype: str | None = None  # the dtype that ``auto`` means; None for the device's usual one

    def takes(self, shape: tuple[int, int], group: int) -> bool:
        """Whether a weight of ``(rows, columns)`` can be stored this way."""
        return shape[0] % self.rows_of == 0 and shape[1] % group == 0

    def stored_bytes(self, shape: tuple[int, int], group: int, dtype: str) -> int:
        """Bytes of a weight of ``(rows, columns)`` with its scales."""
        rows, columns = (-(-size // multiple) * multiple for size, multiple in zip(shape, self.multiple, strict=True))
        beside = rows * self.row_bytes + rows * columns // 64 * self.block_bytes
        if self.groups:
            beside += rows * columns // group * 2 * ITEM_BYTES[dtype]
        return rows * columns * self.bits // 8 + beside


@dataclass(frozen=True, slots=True)
class Quantization:
    """The quantisation of one model on loading."""

    name: str  # the value of ``quantize``
    scheme: Scheme  # how each weight is stored
    group: int  # the number of weights that share a scale, for a scheme with groups; else 1
    shapes: tuple[tuple[int, int], ...]  # ``(rows, columns)`` of every weight that is quantised
    plain: tuple[str, ...]  # names of the linear layers that are not quantised

    @property
    def weights(self) -> int:
        """The number of quantised weights in the model."""
        return sum(rows * columns for rows, columns in self.shapes)

    def stored_bytes(self, dtype: str) -> int:
        """Bytes of the quantised weights with their scales."""
        return sum(self.scheme.stored_bytes(shape, self.group, dtype) for shape in self.shapes)

    def config(self, dtype: str) -> Any:
        """The configuration that transformers loads the model with."""
        return self.scheme.config(dtype, self.group, list(self.plain))


def rounding(table: ModelTable, engine: Engine) -> str | None:
    """The ``quantize`` value if the engine itself quantises, so that the model is loaded unquantised."""
    return table.quantize if table.quantize in engine_named(engine).forms else None


def form_of(checkpoint: Checkpoint, table: ModelTable, engine: Engine, kind: str) -> str | None:
    """How the weights are rounded in a model's graph; None where the engine does not round them.

    Args:
        checkpoint: the model's files.
        table: its profile table.
        engine: the one that is to run it.
        kind: of its device, such as ``cpu``.

    Returns:
        ``quantize`` where the engine itself rounds, and `PACKED` where it takes over the blocks of the model's files.

    Raises:
        ModelError: see `require_whole`.
    """
    if table.quantize is not None:
        require_whole(checkpoint, table.quantize)
    if checkpoint.weights is not None:
        return None if stays_packed(checkpoint, engine, kind) else PACKED
    how = checkpoint.quantization()
    if how is None or engine != "onnx" or kind != "cpu" or table.dtype not in ("auto", "float32"):
        return rounding(table, engine)
    from specctl.models.onnx.checkpoint_weights import format_of

    try:
        format_of(how)
    except Unable:
        return None
    return None if table.trust_remote_code or checkpoint.adapter is not None else PACKED


def require_whole(checkpoint: Checkpoint, name: str) -> None:
    """Raise a ModelError if a checkpoint that ``quantize = name`` is set for is quantised already."""
    if checkpoint.quantization() is not None:
        raise ModelError(
            f'{checkpoint} is quantised already, and its profile table says quantize = "{name}".',
            f"Remove quantize from [{checkpoint.role}], or name the checkpoint that this one was made from.",
        )


def plan(checkpoint: Checkpoint, model: "PreTrainedModel", name: str, kind: str, dtype: str) -> Quantization:
    """Plan a model's quantisation on a kind of device.

    Args:
        checkpoint: names the model.
        model: its `skeleton`.
        name: the value of ``quantize``.
        kind: such as ``cpu`` or ``cuda``.
        dtype: of the profile, perhaps ``auto``.

    Raises:
        ModelError: it has no layers to quantise, the device or the dtype cannot do it, or a package is missing.
    """
    scheme = SCHEMES[name].get(kind)
    if scheme is None:
        here = [f'"{other}"' for other, schemes in SCHEMES.items() if kind in schemes]
        raise ModelError(
            f'{checkpoint}: quantize = "{name}" runs on {" and ".join(SCHEMES[name])} only, and the model goes to '
            f"{kind}.",
            f"On {kind}, choose {', '.join(here)}." if here else "Choose another device, or leave out quantize.",
        )
    _require_package(checkpoint, name, scheme.package)
    if dtype != "auto" and scheme.dtypes and dtype not in scheme.dtypes:
        raise ModelError(
            f'{checkpoint}: quantize = "{name}" on {kind} computes in {", ".join(scheme.dtypes)}, not in {dtype}.',
            f'Set dtype = "{scheme.dtypes[0]}" in [{checkpoint.role}].',
        )
    layers = dict(_linear_layers(model))
    sizes = {name: (layer.out_features, layer.in_features) for name, layer in layers.items()}
    group = max(scheme.groups or (1,), key=lambda group: sum(_taken(sizes, scheme, group).values()))
    taken = _taken(sizes, scheme, group)
    if not taken:
        raise ModelError(
            f'{checkpoint} has no layers that quantize = "{name}" applies to.',
            "Only the weights of nn.Linear layers can be quantised, and this model has none of a size that fits; "
            "models such as GPT-2 keep theirs in layers of another kind. Leave out quantize.",
        )
    plain = (*_output_layers(model), *(name for name in sizes if name not in taken))
    return Quantization(name, scheme, group, tuple(sizes[name] for name in taken), plain)


def _taken(sizes: dict[str, tuple[int, int]], scheme: Scheme, group: int) -> dict[str, int]:
    """The layers that can be quantised with this group size, and their numbers of weights."""
    return {name: shape[0] * shape[1] for name, shape in sizes.items() if scheme.takes(shape, group)}


def _linear_layers(model: "PreTrainedModel") -> "Iterator[tuple[str, nn.Linear]]":
    """The linear layers that transformers quantises: all but the output layer and those it keeps in float32."""
    from torch import nn

    kept = [*_output_layers(model), *(model._keep_in_fp32_modules or ())]
    for name, module in model.named_modules():
        parts = name.split(".")
        if isinstance(module, nn.Linear) and not any(name == part or part in parts for part in kept):
            yield name, module


def _output_layers(model: "PreTrainedModel") -> list[str]:
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    return [name for name, module in model.named_modules() if module is head]


def _require_package(checkpoint: Checkpoint, name: str, package: str) -> None:
    from transformers.utils.import_utils import is_bitsandbytes_available, is_torchao_available

    if not {"torchao": is_torchao_available, "bitsandbytes": is_bitsandbytes_available}[package]():
        raise ModelError(
            f'{checkpoint}: quantize = "{name}" needs {package}, which is missing or too old.',
            f"Run `{pip_install(package)}`.",
        )


def _torchao(make: Callable[[int], Any]) -> Callable[[str, int, list[str]], Any]:
    def config(_: str, group: int, plain: list[str]) -> Any:
        from transformers import TorchAoConfig

        try:
            return TorchAoConfig(make(group), modules_to_not_convert=plain)
        except (ImportError, TypeError) as error:
            raise ModelError(
                f"The installed torchao is of an unknown version: {error}.", f"Run `{pip_install('torchao')}`."
            ) from error

    return config


# torchao's inductor settings stay off: they would apply to the whole process, including unquantised models.
def _int8(_: int) -> Any:
    from torchao.quantization import Int8WeightOnlyConfig

    return Int8WeightOnlyConfig(set_inductor_config=False)


def _fp8(_: int) -> Any:
    from torchao.quantization import Float8WeightOnlyConfig

    return Float8WeightOnlyConfig(set_inductor_config=False)


def _int4_cpu(group: int) -> Any:
    # torchao's other int4 for CPUs stores each weight in a byte.
    from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig

    return PrototypeInt4WeightOnlyConfig(group_size=group, set_inductor_config=False)


def _int4_cuda(group: int) -> Any:
    # The only packing with a kernel in torch; others need further packages.
    from torchao.quantization import Int4WeightOnlyConfig

    return Int4WeightOnlyConfig(group_size=group, int4_packing_format="tile_packed_to_4d", set_inductor_config=False)


def _bitsandbytes(kind: str) -> Callable[[str, int, list[str]], Any]:
    def config(dtype: str, _: int, plain: list[str]) -> Any:
        import torch
        from transformers import BitsAndBytesConfig

        return BitsAndBytesConfig(  # type: ignore[no-untyped-call]
            load_in_4bit=True,
            bnb_4bit_quant_type=kind,
            bnb_4bit_compute_dtype=getattr(torch, dtype),
            llm_int8_skip_modules=plain,
        )

    return config


_GROUPS = (128, 64, 32)
_INT8 = Scheme("torchao", 8, _torchao(_int8), row_bytes=5)  # a float32 scale and a zero
_FP8 = Scheme("torchao", 8, _torchao(_fp8), row_bytes=4)
_INT4_CPU = Scheme("torchao", 4, _torchao(_int4_cpu), groups=_GROUPS, rows_of=16, usual_dtype="bfloat16")
_INT4_CUDA = Scheme(
    "torchao",
    4,
    _torchao(_int4_cuda),
    groups=_GROUPS,
    multiple=(8, 1024),
    dtypes=("bfloat16",),
    usual_dtype="bfloat16",
)
_NF4 = Scheme("bitsandbytes", 4, _bitsandbytes("nf4"), block_bytes=4)
_FP4 = Scheme("bitsandbytes", 4, _bitsandbytes("fp4"), block_bytes=4)

# bitsandbytes' 8 bits are excluded: rounding of a token depends on the other tokens in its pass, so drafting would
# change the text.
SCHEMES: dict[str, dict[str, Scheme]] = {
    "int8": {"cpu": _INT8, "cuda": _INT8},
    "int4": {"cpu": _INT4_CPU, "cuda": _INT4_CUDA},
    "fp8": {"cpu": _FP8, "cuda": _FP8},
    "nf4": {"cuda": _NF4},
    "fp4": {"cuda": _FP4},
}
"""The schemes of each ``quantize`` value, by supported kind of device."""
