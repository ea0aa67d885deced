"""Choosing devices and a dtype for a model, and checking that it fits."""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from specctl.errors import ModelError
from specctl.models.placing.memory import DeviceMemory, Estimate
from specctl.printable import gib
from specctl.profile.schema import ModelTable

STRATEGIES = ("balanced", "balanced_low_0", "sequential")
ROOM_FOR_WORK = 0.1
"""Share of a GPU's free memory kept for the KV cache and activations when weights are spread or placed by ``auto``."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where and how a model is loaded.

    Attributes:
        device_map: a device such as ``cuda:0`` or ``cpu``, an accelerate strategy, or a map from module to device.
        max_memory: for a strategy, the bytes each device may take; None otherwise.
        dtype: the dtype of the weights, never ``auto``.
        shares: bytes of weights expected on each device, by device name.
        sharded: how the model is split over processes, each of which has a device of its own; None for one process.
        shards: over how many processes.
    """

    device_map: str | dict[str, int | str]
    max_memory: dict[int | str, int] | None
    dtype: str
    shares: dict[str, int]
    sharded: Literal["tensor", "pipeline"] | None = None
    shards: int = 1

    @property
    def devices(self) -> list[str]:
        return list(self.shares)


def place(table: ModelTable, need: Estimate, devices: Sequence[DeviceMemory], role: str) -> Placement:
    """Choose devices and a dtype for a model on a machine with these devices.

    ``auto`` is the first GPU, or the CPU if there is no GPU. A target that would leave too little memory for the KV
    cache on the first GPU is spread over all GPUs.

    Raises:
        ModelError: a device does not exist, or the weights do not fit.
    """
    free = {device.name: device.free for device in devices}
    gpus = [name for name in free if name.startswith("cuda")]
    device = table.device
    if table.shards is not None:  # over processes: see shard_plan.py
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
    """The first GPUs and the CPU; of a machine without GPUs the CPU alone."""
    gpus = [name for name in free if name.startswith("cuda")]
    if gpus and len(gpus) < cards:
        raise ModelError(f"[{role}] shards = {cards} needs as many GPUs; this machine has {len(gpus)}.", "Set fewer.")
    return {name: free[name] for name in (*gpus[:cards], "cpu")}


def named_devices(table: ModelTable) -> set[str] | None:
    """The devices that a table names, by their full names; None where they are chosen on the machine."""
    if isinstance(table.device, dict):
        return {_device_name(str(value)) for value in table.device.values()}
    if table.device == "auto" or table.device in STRATEGIES:
        return None
    return {table.device if table.device == "cpu" or ":" in table.device else f"{table.device}:0"}


def kind_of_device(table: ModelTable, devices: Sequence[DeviceMemory]) -> str:
    """The kind of the devices that a model will go to, such as ``cuda``; of several kinds, the one that computes."""
    gpus = [device.name for device in devices if device.name.startswith("cuda")]
    if isinstance(table.device, dict):
        names = [_device_name(str(value)) for value in table.device.values()]
    elif table.device == "auto" or table.device in STRATEGIES:
        names = [_device_name(key) for key in table.max_memory or ()] or gpus
    else:
        names = [table.device]
    return next((name.partition(":")[0] for name in names if name not in ("cpu", "disk")), "cpu")


def after(devices: Sequence[DeviceMemory], placement: Placement) -> list[DeviceMemory]:
    """The devices after a model has been loaded with this placement."""
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
    keys: dict[int | str, int] = {_accelerate_key(name): limit for name, limit in limits.items()}
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
    """Expected bytes by device, GPUs before the CPU: in proportion to the limits, or (sequential) filled one by one."""
    shares: dict[str, int] = {}
    gpus = sum(limit for name, limit in limits.items() if name != "cpu")
    for name, limit in limits.items():
        evenly = strategy != "sequential" and name != "cpu"
        shares[name] = min(limit, size * limit // gpus) if evenly else min(limit, size - sum(shares.values()))
    return shares


def dtype_on(table: ModelTable, need: Estimate, device: str) -> str:
    """The dtype of a model's weights on a device, or a kind of device; of those that are not quantised."""
    if table.dtype != "auto":
        return table.dtype
    if need.quantization is not None and need.quantization.scheme.usual_dtype is not None:
        return need.quantization.scheme.usual_dtype
    return "float32" if device == "cpu" and not need.quantised else need.stored_dtype


def _device_name(key: str) -> str:
    return f"cuda:{key}" if key.isdecimal() else key


def _accelerate_key(name: str) -> int | str:
    return int(name.removeprefix("cuda:")) if name.startswith("cuda:") else name


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
