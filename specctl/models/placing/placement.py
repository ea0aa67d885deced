"""A model's placement, for loading and doctor: prior checks, devices, dtype and shards."""

import difflib
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from specctl.errors import ModelError
from specctl.models.files.checkpoint import ITEM_BYTES, Checkpoint
from specctl.models.files.gguf import unpacking
from specctl.models.files.library_calls import hushed
from specctl.models.files.skeleton import is_wrapper, require_modules, skeleton
from specctl.models.passes.layer_sizes import key_value_heads, layer_configs, query_heads
from specctl.models.placing.memory import DeviceMemory, Estimate, device_memory, estimate
from specctl.models.placing.model_config import generation_config, is_plain, require_runnable
from specctl.models.placing.quantization import Quantization, plan, require_whole, rounding
from specctl.models.placing.torch_gguf import require_kernels, stays_packed
from specctl.printable import gib
from specctl.profile.schema import Engine, ModelTable

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Kind = Literal["tensor", "pipeline"]
STRATEGIES = ("balanced", "balanced_low_0", "sequential")
ROOM_FOR_WORK = 0.1
"""Share of a GPU's free memory reserved for the KV cache and activations if weights are spread or placed by ``auto``.
"""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where and how a model is loaded."""

    # a device such as ``cuda:0`` or ``cpu``, an accelerate strategy, or a map from module to device
    device_map: str | dict[str, int | str]
    max_memory: dict[int | str, int] | None  # for a strategy, each device's byte limit; else None
    dtype: str  # of the weights, never ``auto``
    shares: dict[str, int]  # bytes of weights expected on each device, by device name
    sharded: Kind | None = None  # how the model is split over processes with one device each; None for one process
    shards: int = 1  # the number of processes

    @property
    def devices(self) -> list[str]:
        return list(self.shares)


def inspected(
    checkpoint: Checkpoint, table: ModelTable, devices: Sequence[DeviceMemory], engine: Engine = "auto"
) -> Quantization | None:
    """Check everything visible in a model's configuration; returns its quantisation on loading, or None.

    Args:
        checkpoint: the model's files; its weights are not needed.
        table: its profile table.
        devices: those of the machine.
        engine: the one that is to run it; see `quantization.rounding`.

    Raises:
        ModelError: specctl cannot run its architecture, its configuration or generation settings are damaged, it has
            no such modules as the device table or its adapter names, or it cannot be quantised as wanted.
    """
    if checkpoint.weights is not None:
        _require_unpacked(checkpoint, checkpoint.weights, table, engine, kind_of_device(table, devices))
    plain = is_plain(checkpoint.settings())
    if not plain:
        require_runnable(checkpoint, table.trust_remote_code)
    generation_config(checkpoint)
    if plain and not isinstance(table.device, dict) and checkpoint.adapter is None and table.quantize is None:
        return None
    model = skeleton(checkpoint, table.trust_remote_code)
    if isinstance(table.device, dict):
        require_modules(model, table.device, checkpoint.role)
    if checkpoint.adapter is not None:
        checkpoint.adapter.require_fit(model)
    if table.quantize is None:
        return None
    require_whole(checkpoint, table.quantize)
    if rounding(table, engine) is not None:
        return None
    return plan(checkpoint, model, table.quantize, kind_of_device(table, devices), table.dtype)


def _require_unpacked(checkpoint: Checkpoint, file: Path, table: ModelTable, engine: Engine, kind: str) -> None:
    """Raise a ModelError if a table asks for what cannot be done with a model whose weights stay in a GGUF file.

    ``kind`` is that of its device.
    """
    role, why, instead = checkpoint.role, None, ""
    packed = stays_packed(checkpoint, engine, kind)
    if checkpoint.adapter is not None:
        why = "an adapter cannot be merged into its rounded weights"
    elif packed:
        if table.splits:
            why = "its blocks are not split over processes"
    elif engine not in ("auto", "onnx", "llama"):
        why, instead = f'engine = "{engine}" cannot run it', 'Set engine = "llama", or: '
    elif table.dtype not in ("auto", "float32"):
        why = f"it computes in float32, not in {table.dtype}"
    elif table.device not in ("auto", "cpu") or table.shards is not None or table.max_memory is not None:
        why = "it runs on a CPU only"
    if why is not None:
        raise ModelError(f"{checkpoint} is a GGUF file: {why}.", f"{instead}{unpacking(file, role)}")
    if packed:
        require_kernels(checkpoint)


def weighed(
    checkpoint: Checkpoint, table: ModelTable, devices: Sequence[DeviceMemory], engine: Engine = "auto"
) -> Estimate:
    """The memory that a model needs as its table asks for it; raises like `inspected`."""
    return estimate(checkpoint, table.trust_remote_code, inspected(checkpoint, table, devices, engine))


def placed_here(checkpoint: Checkpoint, table: ModelTable, need: Estimate) -> Placement:
    """`placed` on this machine; only the GPUs available to the model are queried for memory.

    Raises:
        ModelError: see `placed`; the hint lists all devices.
    """
    if (names := named_devices(table)) is not None:
        with suppress(ModelError):
            return placed(checkpoint, table, need, device_memory(names))
    return placed(checkpoint, table, need, device_memory())


def placed(
    checkpoint: Checkpoint, table: ModelTable, need: Estimate, devices: Sequence[DeviceMemory], *, here: bool = True
) -> Placement:
    """Where the model goes.

    Args:
        checkpoint, table, need: of the model.
        devices: of the machine.
        here: whether this is the current machine, which must then be able to read quantised weights.

    Raises:
        ModelError: it does not fit, or its quantised weights cannot be read on this machine.
    """
    if table.splits:
        placement = sharded_placement(checkpoint, table, need, devices)
    else:
        placement = place(table, need, devices, checkpoint.role)
    if here:
        require_readable(checkpoint, placement)
    return placement


def place(table: ModelTable, need: Estimate, devices: Sequence[DeviceMemory], role: str) -> Placement:
    """Choose devices and a dtype for a model on a machine with these devices.

    ``auto`` is the first GPU, or the CPU if there is no GPU. A target is spread over all GPUs if the first GPU would
    have too little memory for the KV cache.

    Raises ModelError where a device does not exist, and where the weights do not fit.
    """
    free = {device.name: device.free for device in devices}
    gpus = [name for name in free if name.startswith("cuda")]
    device = table.device
    if table.shards is not None:
        return _spread(table, "balanced", need, _first(table.shards, free, role), role)
    if isinstance(device, dict):
        return _mapped(table, device, need, free, role)
    if device == "auto":
        alone = gpus[0] if gpus else "cpu"
        size = need.weight_bytes(dtype_on(table, need, alone))
        crowded = role == "target" and len(gpus) > 1 and size > free[alone] * (1 - ROOM_FOR_WORK)
        if not (crowded or table.max_memory):
            return _single(table, alone, need, free, role)
        device = "balanced"
    if device in STRATEGIES:
        return _spread(table, device, need, free, role)
    name = device if device == "cpu" or ":" in device else f"{device}:0"
    if name not in free:
        raise _unknown_device(device, free, role)
    if table.max_memory:
        raise ModelError(f"[{role}] max_memory has no effect on the single device {device!r}.", "Remove one of them.")
    return _single(table, name, need, free, role)


def _first(cards: int, free: Mapping[str, int], role: str) -> dict[str, int]:
    """The first GPUs and the CPU; the CPU alone on a machine without GPUs."""
    gpus = [name for name in free if name.startswith("cuda")]
    if gpus and len(gpus) < cards:
        raise ModelError(f"[{role}] shards = {cards} needs as many GPUs; this machine has {len(gpus)}.", "Set fewer.")
    return {name: free[name] for name in (*gpus[:cards], "cpu")}


def named_devices(table: ModelTable) -> set[str] | None:
    """The devices that a table names, by full names; None if they depend on the machine."""
    if isinstance(table.device, dict):
        return {_device_name(str(value)) for value in table.device.values()}
    if table.device == "auto" or table.device in STRATEGIES:
        return None
    return {table.device if table.device == "cpu" or ":" in table.device else f"{table.device}:0"}


def kind_of_device(table: ModelTable, devices: Sequence[DeviceMemory]) -> str:
    """The kind of a model's devices, such as ``cuda``; of several kinds, the one that computes."""
    gpus = [device.name for device in devices if device.name.startswith("cuda")]
    if isinstance(table.device, dict):
        names = [_device_name(str(value)) for value in table.device.values()]
    elif table.device == "auto" or table.device in STRATEGIES:
        names = [_device_name(key) for key in table.max_memory or ()] or gpus
    else:
        names = [table.device]
    return next((name.partition(":")[0] for name in names if name not in ("cpu", "disk")), "cpu")


def after(devices: Sequence[DeviceMemory], placement: Placement) -> list[DeviceMemory]:
    """The devices' free memory after a model has been loaded with this placement."""
    return [replace(device, free=device.free - placement.shares.get(device.name, 0)) for device in devices]


def _single(table: ModelTable, name: str, need: Estimate, free: Mapping[str, int], role: str) -> Placement:
    dtype = dtype_on(table, need, name)
    size = need.weight_bytes(dtype)
    if size > free[name]:
        raise _too_big(table, need, dtype, {name: free[name]}, free, role)
    return Placement(name, None, dtype, {name: size})


def _spread(table: ModelTable, strategy: str, need: Estimate, free: Mapping[str, int], role: str) -> Placement:
    gpus = [name for name in free if name.startswith("cuda")]
    if not gpus and not table.max_memory:
        return _single(table, "cpu", need, free, role)
    if table.max_memory:
        limits = {_device_name(key): _bytes(value, role) for key, value in table.max_memory.items()}
        if unknown := [name for name in limits if name not in free]:
            raise _unknown_device(unknown[0], free, role)
    else:
        limits = {name: int(free[name] * (1 - ROOM_FOR_WORK)) for name in gpus}
    dtype = dtype_on(table, need, next(iter(limits)))
    size = need.weight_bytes(dtype)
    if size > sum(limits.values()):
        raise _too_big(table, need, dtype, limits, free, role)
    keys: dict[int | str, int] = {  # accelerate numbers GPUs
        int(name.removeprefix("cuda:")) if name.startswith("cuda:") else name: limit for name, limit in limits.items()
    }
    return Placement(strategy, keys, dtype, _shares(size, limits, strategy))


def _mapped(
    table: ModelTable, device_map: dict[str, int | str], need: Estimate, free: Mapping[str, int], role: str
) -> Placement:
    names = dict.fromkeys(_device_name(str(value)) for value in device_map.values())
    if unknown := [name for name in names if name not in free and name != "disk"]:
        raise _unknown_device(unknown[0], free, role)
    room = {name: free[name] for name in names if name in free}
    dtype = dtype_on(table, need, next(iter(room), "cpu"))
    size = need.weight_bytes(dtype)
    if "disk" not in names and size > sum(room.values()):
        raise _too_big(table, need, dtype, room, free, role)
    return Placement(device_map, None, dtype, _shares(size, room, "balanced"))


def _shares(size: int, limits: Mapping[str, int], strategy: str) -> dict[str, int]:
    """Expected bytes by device, GPUs before the CPU: proportional to the limits, or (sequential) filled in order."""
    shares: dict[str, int] = {}
    gpus = sum(limit for name, limit in limits.items() if name != "cpu")
    for name, limit in limits.items():
        evenly = strategy != "sequential" and name != "cpu"
        shares[name] = min(limit, size * limit // gpus) if evenly else min(limit, size - sum(shares.values()))
    return shares


def dtype_on(table: ModelTable, need: Estimate, device: str) -> str:
    """The dtype of a model's unquantised weights on a device or kind of device."""
    if table.dtype != "auto":
        return table.dtype
    if need.quantization is not None and need.quantization.scheme.usual_dtype is not None:
        return need.quantization.scheme.usual_dtype
    return "float32" if device == "cpu" and not need.quantised else need.stored_dtype


def _device_name(key: str) -> str:
    return f"cuda:{key}" if key.isdecimal() else key


def _bytes(size: str, role: str) -> int:
    from accelerate.utils import convert_file_size_to_int  # type: ignore[import-untyped]

    try:
        return int(convert_file_size_to_int(size))
    except ValueError as error:
        raise ModelError(f"[{role}] max_memory: {size!r} is not a size.", 'Write it as "20GiB".') from error


def _unknown_device(name: str, free: Mapping[str, int], role: str) -> ModelError:
    valid = ["auto", *STRATEGIES, *free]
    near = difflib.get_close_matches(name, valid, n=1)
    hint = f"Did you mean {near[0]!r}? " if near else ""
    return ModelError(f"[{role}] device {name!r} is not on this machine.", f"{hint}Valid are: {', '.join(valid)}.")


def _too_big(
    table: ModelTable, need: Estimate, dtype: str, room: Mapping[str, int], free: Mapping[str, int], role: str
) -> ModelError:
    size = need.weight_bytes(dtype)
    where = ", ".join(f"{name} {gib(max(amount, 0))}" for name, amount in room.items())
    ways = []
    smaller = need.weight_bytes("bfloat16")
    if dtype == "float32" and smaller <= sum(room.values()):
        ways.append(f'set dtype = "bfloat16" in [{role}] ({gib(smaller)})')
    roomier = [name for name, amount in free.items() if name not in room and amount >= size]
    if roomier:
        ways.append(f'set device = "{roomier[0]}" ({gib(free[roomier[0]])} free)')
    gpus = [name for name in free if name.startswith("cuda")]
    if len(gpus) > len(room) and sum(free[name] for name in gpus) >= size:
        ways.append('set device = "balanced" to spread it over all GPUs')
    if need.quantised or table.quantize is not None:
        ways.append("choose a smaller checkpoint")
    else:
        ways.append(f'set quantize = "int4" in [{role}]; or choose a smaller or quantised checkpoint')
    form = dtype if need.quantization is None else f"{need.quantization.name} and {dtype}"
    return ModelError(
        f"The {role} model {table.model!r} needs {gib(size)} for its weights in {form}; free: {where}.",
        f"To fix it: {'; or '.join(ways)}.",
    )


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
"""Packages for a quantisation method; transformers' message may name only one of several."""


def require_readable(checkpoint: Checkpoint, placement: Placement) -> None:
    """Raise a ModelError if a checkpoint is quantised in a way that transformers cannot read here.

    Reasons: an unknown method, a missing package, unsupported devices, or weights that are not whole blocks.
    """
    described = checkpoint.quantization()
    if described is None or checkpoint.weights is not None:
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
    if method == "fp8" and getattr(quantizer.quantization_config, "dequantize", False):
        _require_whole_blocks(checkpoint, quantizer.quantization_config.weight_block_size)


def _require_whole_blocks(checkpoint: Checkpoint, block: Sequence[int] | None) -> None:
    """Raise a ModelError if FP8 weights do not consist of whole blocks.

    On a device without FP8 kernels, transformers (5.24) unpacks the weights and infers the block size as side length /
    number of scales. With 128 x 128 blocks, a side of 192 would be read in blocks of 96: wrong numbers without an
    error. The scales of a weight are in a tensor of the name + ``_scale_inv``. ``block`` is None if each weight has a
    single scale.
    """
    shapes = checkpoint.headers().shapes
    for name, shape in shapes.items():
        scales = shapes.get(f"{name}_scale_inv", ())
        if len(shape) < 2 or len(scales) < 2:
            continue
        sides = list(zip(shape[-2:], scales[-2:], block or shape[-2:], strict=True))
        configured = all(count == -(-size // step) for size, count, step in sides)
        if any(size % count or (configured and count > 1 and size % step) for size, count, step in sides):
            wanted = " x ".join(str(step) for _, _, step in sides)
            raise ModelError(
                f"{checkpoint}: {name} has {shape[-2]} x {shape[-1]} weights, which is not a whole number of FP8 "
                f"blocks of {wanted}.",
                "transformers unpacks whole blocks only where there is no GPU with FP8 kernels. Use a GPU of compute "
                "capability 8.9 or newer, or the checkpoint that this one was made from.",
            )


def _method(described: dict[str, Any]) -> str:
    method = described.get("quant_method")
    if method is None and (described.get("load_in_8bit") or described.get("load_in_4bit")):
        return "bitsandbytes"
    return str(method)


def _device_map(placement: Placement) -> dict[str, Any]:
    """A map with every device of the placement; a strategy's own map exists only once the model is loaded."""
    if isinstance(placement.device_map, dict):
        return placement.device_map
    names = placement.devices
    return {"": names[0]} if len(names) == 1 else {str(index): name for index, name in enumerate(names)}


def _sentence(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__


WHY: dict[Kind, str] = {
    "tensor": "all cards read their shares of a layer at the same time, the fastest",
    "pipeline": "the cards read their layers in turn; for heads that do not divide",
}
WHOLE = re.compile("replicated|all_reduce|mla_kv_a_proj|sequence_parallel")
"""Tensor parallel styles whose weights are replicated on every rank."""


def weights_by_rank(model: "PreTrainedModel", kind: Kind, shards: int, role: str) -> tuple[int, ...]:
    """The number of weights that each rank holds of a split model.

    Args:
        model: a `skeleton`.
        kind: ``tensor`` or ``pipeline``.
        shards: the number of ranks.
        role: the model's key in the profile, for messages.

    Raises:
        ModelError: it cannot be split in this way.
    """
    from specctl.models.passes.cache import cache_argument
    from specctl.models.passes.recurrent_state import keeps_states

    if keeps_states(model.config) or cache_argument(type(model)) in ("", "cache_params"):
        raise _refused(role, "has layers with a state of their own", 'placement = "spread"')
    if kind == "pipeline":
        return _staged(model, shards, role)
    config = model.config.get_text_config(decoder=True)
    if not _plan(model):
        raise _refused(role, "has no tensor parallel plan in transformers", 'placement = "spread"')
    if config.model_type not in SPLIT:
        raise _refused(
            role, f"is of the family {config.model_type}, whose plan specctl has not tested", 'placement = "spread"'
        )
    _require_heads(config, shards, role)
    split, whole = _split(model)
    return (split // shards + whole,) * shards


def sharded_placement(
    checkpoint: Checkpoint, table: ModelTable, need: Estimate, devices: Sequence[DeviceMemory]
) -> Placement:
    """The placement of a model's shards: one on each of the first cards, or all on the CPU without cards.

    Raises ModelError if the model cannot be split in this way, or a card lacks memory for its share.
    """
    role, shards = checkpoint.role, table.shards
    assert shards is not None, "others are placed by `place`"
    if need.quantised or table.quantize is not None:
        raise _refused(role, "is quantised, and quantised weights are not split", 'placement = "spread"')
    cards = [device for device in devices if device.name != "cpu"]
    if table.device == "cpu" and cards:
        raise ModelError(
            f"[{role}] device = 'cpu' has no effect with shards: they go to the {len(cards)} accelerators here.",
            "Remove it, or hide the accelerators (CUDA_VISIBLE_DEVICES='').",
        )
    if cards and len(cards) < shards:
        raise ModelError(
            f"[{role}] shards = {shards} needs as many accelerators; this machine has {len(cards)}.",
            f"Set shards = {len(cards)}, or leave it out." if len(cards) > 1 else "Leave shards out.",
        )
    kind: Kind = "pipeline" if table.placement == "pipeline" else "tensor"
    counts = weights_by_rank(skeleton(checkpoint, table.trust_remote_code), kind, shards, role)
    dtype = dtype_on(table, need, cards[0].name if cards else "cpu")
    sizes = [count * ITEM_BYTES[dtype] for count in counts]
    shares = dict(zip((card.name for card in cards), sizes, strict=False)) or {"cpu": sum(sizes)}
    for device in devices:
        if shares.get(device.name, 0) > device.free:
            raise ModelError(
                f"The {role} model {table.model!r} needs {gib(shares[device.name])} on {device.name} for its share of "
                f"the weights in {dtype}; free: {gib(device.free)}.",
                "Set more shards, free memory on the card, or choose a smaller checkpoint.",
            )
    return Placement({}, None, dtype, shares, sharded=kind, shards=shards)


def placement_advice(
    checkpoint: Checkpoint, table: ModelTable, need: Estimate, devices: Sequence[DeviceMemory], tokens: int
) -> list[str]:
    """One line per way to split a model: whether it fits, and its advantage.

    ``tokens`` is the required length of the KV cache; for the others see `sharded_placement`.
    """
    shards = table.shards
    assert shards is not None, "the model is to be split"
    cards = [device for device in devices if device.name != "cpu"][:shards]
    dtype = dtype_on(table, need, cards[0].name if cards else "cpu")
    cache = need.cache_bytes(dtype, tokens) // shards
    model = skeleton(checkpoint, table.trust_remote_code)
    free = min((card.free for card in cards), default=devices[-1].free // shards)

    def line(kind: str, most: int, why: str) -> str:
        fits = "fits" if most + cache <= free else "does not fit"
        needed = f"{gib(most)} of weights and {gib(cache)} of cache for {tokens} tokens on a card, {gib(free)} free"
        return f"{checkpoint} over {shards}, {kind}: {fits} ({needed}); {why}."

    lines = []
    for kind, why in WHY.items():
        try:
            counts = weights_by_rank(model, kind, shards, checkpoint.role)
        except ModelError as error:
            lines.append(f"{checkpoint} over {shards}, {kind}: no. {error.message}")
        else:
            lines.append(line(kind, max(counts) * ITEM_BYTES[dtype], why))
    most = int(need.weight_bytes(dtype) / (1 - ROOM_FOR_WORK)) // shards
    return [*lines, line("spread", most, "any model, one process, and the cards read their layers in turn")]


def _plan(model: "PreTrainedModel") -> dict[str, str]:
    """The styles of modules under tensor parallelism, with ``*`` for layer numbers."""
    found: Any = model.tp_plan
    return dict(found or {})


def _split(model: "PreTrainedModel") -> tuple[int, int]:
    """The number of weights split evenly between ranks, and the number replicated on every rank."""
    plan, split, whole = _plan(model), 0, 0
    for name, weight in model.named_parameters():
        generic = re.sub(r"\d+", "*", name)
        style = plan.get(generic) or plan.get(generic.rpartition(".")[0])
        if style is None or WHOLE.search(style) or (style.startswith("rowwise") and name.endswith(".bias")):
            whole += weight.numel()
        else:
            split += weight.numel()
    return split, whole


def _require_heads(config: Any, shards: int, role: str) -> None:
    """Raise a ModelError where attention heads or key-value heads do not divide evenly."""
    heads, groups = ({count(layer) for layer in layer_configs(config)} for count in (query_heads, key_value_heads))
    if all(count % shards == 0 for count in heads | groups):
        return
    possible = [str(n) for n in range(2, min(groups) + 1) if all(count % n == 0 for count in heads | groups)]
    what = f"shards = {' or '.join(possible)}, or " if possible else ""
    spelled = [" or ".join(map(str, sorted(counts))) for counts in (heads, groups)]
    raise ModelError(
        f"[{role}] its {spelled[0]} attention heads and {spelled[1]} key-value heads do not divide by {shards}.",
        f'Set {what}placement = "pipeline" or "spread".',
    )


def _staged(model: "PreTrainedModel", shards: int, role: str) -> tuple[int, ...]:
    """The number of weights in each pipeline stage."""
    from specctl.models.passes.masks import mask_obstacle

    config = model.config.get_text_config(decoder=True)
    if config.model_type not in STAGED:
        raise _refused(
            role,
            f"is of the family {config.model_type}, whose pipelines specctl has not tested",
            'placement = "tensor" or "spread"',
        )
    if is_wrapper(model.config):  # transformers splits at names that are one level deeper in a wrapper's decoder
        raise _refused(
            role, "is made for more than text, and its pipelines do not load", 'placement = "tensor" or "spread"'
        )
    if why := mask_obstacle(model):
        raise ModelError(f"[{role}] cannot be a pipeline: {why}.", f'Set placement = "tensor" or "spread" in [{role}].')
    layers = int(config.num_hidden_layers)
    if layers < shards:
        raise _refused(role, f"has only {layers} layers", f"shards = {layers}")
    stages = [0] * shards
    each = layers // shards
    for name, weight in model.named_parameters():
        number = re.search(r"\.layers\.(\d+)\.", name)
        if number:
            stages[min(int(number[1]) // each, shards - 1)] += weight.numel()
        elif "embed" in name:
            stages[0] += weight.numel()
            stages[-1] += weight.numel() if config.tie_word_embeddings else 0
        else:
            stages[-1] += weight.numel()
    return tuple(stages)


def _refused(role: str, why: str, instead: str) -> ModelError:
    return ModelError(f"[{role}] cannot be in shards: it {why}.", f"Set {instead} in [{role}].")


SPLIT = frozenset(
    """
    afmoe apertus arcee aria_text axk1 axk2 beam cohere cohere2 cohere2_moe cwm deepseek_v2 deepseek_v3 deepseek_v32
    diffllama dots1 ernie4_5 ernie4_5_moe exaone4 exaone_moe flex_olmo flint gemma gemma2 gemma3_text gemma3n_text
    gemma4_text glm glm4 glm4_moe glm4_moe_lite glm_moe_dsa gpt_neox gpt_oss granite granite_swa granitemoe
    granitemoe_swa granitemoeshared helium hunyuan_v1_dense hunyuan_v1_moe hy_v3 hy_v4 hyperclovax internlm3 iquestcoder
    jais2 kolibri1 laguna llama llama4_text longcat_flash mellum mimo_v2_flash minicpm3 minimax_m2 minimax_m3_vl_text
    ministral ministral3 mistral mixtral nanochat nemotron olmo olmo2 olmo3 olmoe phi phi3 phimoe qwen2 qwen2_moe qwen3
    qwen3_moe seed_oss smollm3 solar_open starcoder2 vaultgemma youtu
    """.split()  # noqa: SIM905 - a line for each would be 90 lines
)
"""Families for tensor parallelism. Excluded: hrm_text, whose logits differ, and doge, which fails."""

STAGED = frozenset(
    "cohere deepseek_v3 gemma glm4 granite llama olmo2 qwen2 qwen3 qwen3_moe seed_oss smollm3".split()  # noqa: SIM905
)
"""Families for pipelines. transformers splits a model at Llama's module names: GPT-NeoX's stages would each apply the
final norm.
"""
