"""A model's memory needs, and each device's memory, in bytes."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING

from specctl.errors import ModelError, UsageError
from specctl.models.files.checkpoint import ITEM_BYTES, SAFETENSORS_NAMES, Checkpoint, WeightHeaders
from specctl.models.files.library_calls import explained
from specctl.models.files.skeleton import left_out, load_config, skeleton
from specctl.models.passes.inference import draws
from specctl.models.placing.engine_table import engine_named
from specctl.models.placing.model_config import ModelConfig
from specctl.profile.schema import Engine
from specctl.versions import torch_builds

if TYPE_CHECKING:
    import torch

    from specctl.models.placing.quantization import Quantization

DEVICES = Path("/dev")
DRIVERS = {
    "cuda": ("nvidia*", "nvhost*", "nvmap", "dxg"),
    "hip": ("kfd", "dxg"),
    "xpu": ("dri/render*", "dxg"),
}
"""Device files by kind of accelerator; ``dxg`` serves all kinds under WSL."""


def accelerator() -> "torch.device | None":
    """The accelerator that torch finds; on Linux torch is not imported if it could find none."""
    if "torch" not in sys.modules and sys.platform == "linux" and not may_be_there():
        return None
    import torch

    return torch.accelerator.current_accelerator(check_available=True)


def may_be_there(devices: Path = DEVICES) -> bool:
    """Whether this Linux has a driver for an accelerator of this torch build, or an external torch backend.

    ``devices`` is the folder of device files.
    """
    if entry_points(group="torch.backends"):
        return True
    kinds = [kind for kind, built in torch_builds().items() if built is not None]
    return any(any(devices.glob(name)) for kind in kinds for name in DRIVERS[kind])


DESCRIBED = "as --memory describes it"  # The label of a device of another machine
_DEVICE = re.compile(r"cpu|cuda:(0|[1-9]\d?)")


@dataclass(frozen=True, slots=True)
class Estimate:
    """Memory that a checkpoint needs, estimated before its weights are loaded."""

    parameters: int  # number of weights; for multimodal models, of the text model
    stored_bytes: int  # size of the weight files
    stored_dtype: str  # the configuration's dtype, else that of most weights, such as ``bfloat16``
    quantised: bool  # whether the files hold packed weights, whose size does not depend on the dtype
    cached_values: int  # numbers in the KV cache per token over all layers; sliding windows are ignored
    # quantisation on loading, if any
    quantization: "Quantization | None" = None
    not_loaded: int = 0  # bytes in the files outside a quantised multimodal model's text model
    # why the weight headers could not be read, so that sizes come from the configuration; None if they were read
    unread: ModelError | None = None

    def weight_bytes(self, dtype: str) -> int:
        """Bytes of the loaded weights; unquantised ones are in ``dtype``."""
        if self.quantised:
            return self.stored_bytes - self.not_loaded
        if self.quantization is None:
            return self.parameters * ITEM_BYTES[dtype]
        plain = self.parameters - self.quantization.weights
        return plain * ITEM_BYTES[dtype] + self.quantization.stored_bytes(dtype)

    def cache_bytes(self, dtype: str, tokens: int) -> int:
        """Bytes of the KV cache for a number of tokens."""
        return self.cached_values * ITEM_BYTES[dtype] * tokens


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """One device: its torch name, a label for display, and its total and free memory in bytes."""

    name: str
    label: str
    total: int
    free: int


def device_memory(asked: Collection[str] | None = None) -> list[DeviceMemory]:
    """The accelerators (GPUs) in order, then the CPU.

    ``asked`` are the names of relevant devices, None for all. Querying a GPU's memory opens a context, which takes a
    few hundred MiB and 0.3 s.
    """
    import psutil  # type: ignore[import-untyped]

    ram = psutil.virtual_memory()
    processor = DeviceMemory("cpu", f"{psutil.cpu_count()} CPU threads", ram.total, ram.available)
    first = accelerator()
    if first is None:
        return [processor]
    import torch

    kind = first.type
    devices = []
    for index in range(torch.accelerator.device_count()):
        if asked is not None and f"{kind}:{index}" not in asked:
            continue
        # Apple's GPU uses main memory and reports none of its own.
        free, total = (ram.available, ram.total) if kind == "mps" else torch.accelerator.get_memory_info(index)
        named = getattr(getattr(torch, kind, None), "get_device_name", None)
        label = f"{kind} device" if named is None else named(index)
        if not draws(torch.device(kind, index)):
            label += "; tokens are drawn on the host"
        devices.append(DeviceMemory(f"{kind}:{index}", label, total, free))
    return [*devices, processor]


def described(texts: Sequence[str]) -> list[DeviceMemory]:
    """The devices of another machine, GPUs first; its CPU is assumed to be this machine's unless described.

    ``texts`` are like ``cuda:0=24GiB``. Raises UsageError if a text has another form, a device is named twice, or a GPU
    number is skipped.
    """
    from accelerate.utils import convert_file_size_to_int  # type: ignore[import-untyped]

    sizes: dict[str, int] = {}
    for text in texts:
        name, _, size = (part.strip() for part in text.partition("="))
        if not _DEVICE.fullmatch(name):
            raise UsageError(f"--memory {text}: {name!r} is not a device", "write it as cuda:0=24GiB, or cpu=64GiB")
        try:
            count = int(convert_file_size_to_int(size))
        except (ValueError, OverflowError):
            count = 0
        if count <= 0:
            raise UsageError(f"--memory {text}: {size!r} is not a size", "write it as cuda:0=24GiB")
        if name in sizes:
            raise UsageError(f"--memory {text}: {name} is described twice", "describe each device once")
        sizes[name] = count
    cards = sorted((name for name in sizes if name != "cpu"), key=lambda name: int(name.partition(":")[2]))
    if missing := next((f"cuda:{number}" for number, name in enumerate(cards) if name != f"cuda:{number}"), None):
        raise UsageError(f"--memory describes {cards[-1]} and not {missing}", "number the GPUs from cuda:0")
    found = [DeviceMemory(name, DESCRIBED, sizes[name], sizes[name]) for name in cards]
    if "cpu" in sizes:
        return [*found, DeviceMemory("cpu", DESCRIBED, sizes["cpu"], sizes["cpu"])]
    return [*found, *(one for one in device_memory(()) if one.name == "cpu")]


def estimate(
    checkpoint: Checkpoint, trust_remote_code: bool = False, quantization: "Quantization | None" = None
) -> Estimate:
    """Estimate a checkpoint from its weight headers, or from its configuration where the headers cannot be read.

    Args:
        checkpoint: the model's files.
        trust_remote_code: whether code from its repository may run.
        quantization: how its weights are quantised while they are loaded.

    Raises:
        ModelError: local files are damaged or not safetensors, the configuration cannot be loaded, or it describes a
            model much larger than the files.
    """
    config = ModelConfig.read(checkpoint, trust_remote_code)
    headers, unread = None, None
    try:
        headers = checkpoint.headers()
    except ModelError as error:
        if checkpoint.source != "hub" and checkpoint.has_weights():
            raise
        unread = error
    parameters = sum(headers.counts.values()) if headers else 0
    with explained(checkpoint.role, checkpoint.name, by_config=True):
        cached = config.cached_values
    dtype, not_loaded = _meant_dtype(config.dtype, headers), 0
    if config.quantised or headers is None or config.wraps:
        whole = load_config(checkpoint, trust_remote_code) if config.whole is None else config.whole
        model = skeleton(checkpoint, trust_remote_code, whole)
        parameters = sum(weight.numel() for weight in model.parameters())
        if config.quantised and config.wraps:
            not_loaded = left_out(whole) * ITEM_BYTES[dtype]  # encoders of pictures are not quantised
        elif headers is not None and not config.quantised and parameters > 2 * (held := sum(headers.counts.values())):
            # With tied weights stored once, at most half is missing.
            raise ModelError(
                f"{checkpoint}: the checkpoint does not match its config.json, whose text model has {parameters:,} "
                f"weights; the files hold {held:,}.",
                f"Copy or download {checkpoint.folder / 'config.json'} again; its text_config may be missing.",
            )
    return Estimate(
        parameters=parameters,
        stored_bytes=headers.stored_bytes if headers else parameters * ITEM_BYTES[dtype],
        stored_dtype=dtype,
        quantised=config.quantised and headers is not None,
        cached_values=cached,
        quantization=quantization,
        not_loaded=not_loaded,
        unread=unread,
    )


def _meant_dtype(dtype: str | None, headers: WeightHeaders | None) -> str:
    if dtype in ITEM_BYTES:
        return dtype
    counts = headers.counts if headers else {}
    known = {SAFETENSORS_NAMES[name]: count for name, count in counts.items() if name in SAFETENSORS_NAMES}
    return max(known, key=known.__getitem__, default="float32")


CUDA_CONTEXT = 512 * 1024**2
"""Bytes of a process on a CUDA device for its context and kernels: 300 to 500 MiB, by device and versions."""
WORKSPACES = 64 * 1024**2
"""Bytes per model for cuBLAS workspaces of its streams (32 MiB each on Hopper, 8 on others)."""


def working_bytes(need: Estimate, dtype: str, tokens: int, engine: Engine, *, on_cuda: bool, first: bool) -> int:
    """Bytes that a model needs for a text besides its weights.

    Args:
        need: the model's estimate.
        dtype: of its cache.
        tokens: in the cache.
        engine: the profile's; ``auto`` is counted as eager.
        on_cuda: whether it is on a CUDA device; elsewhere only the cache is counted.
        first: whether it is the process's first model there, which also needs the CUDA context.
    """
    cache = need.cache_bytes(dtype, tokens)
    if not on_cuda:
        return cache
    # While buffers grow, one layer's exist twice, which is negligible.
    chosen = engine_named(engine)
    return int(cache * chosen.spare) + WORKSPACES + CUDA_CONTEXT * first + chosen.kept


SECONDS = 5  # Time limit for nvidia-smi
WSL = "/usr/lib/wsl/lib"  # Where Windows puts nvidia-smi, which is not on every PATH
OLDEST_DRIVER = {11: 450, 12: 525, 13: 580}
"""The oldest branch of the driver on Linux that runs programs built with a major version of CUDA (NVIDIA, CUDA Toolkit
Release Notes, minor version compatibility)."""
_FIELDS = "name,driver_version,memory.total,compute_cap"


@dataclass(frozen=True, slots=True)
class Card:
    """One card. Its memory in bytes and compute capability (such as ``8.9``) are None if the driver does not report
    them.
    """

    name: str
    memory: int | None
    capability: str | None


@dataclass(frozen=True, slots=True)
class Graphics:
    """The cards of a machine, and whether torch can use them."""

    driver: str | None  # its version, such as ``580.82.07``; None without one
    cards: tuple[Card, ...]  # in the driver's order
    torch_version: str  # torch's
    built_for: str | None  # the version of CUDA that torch was built for; None for a build without CUDA
    architectures: tuple[str, ...] = ()  # architectures with kernels in torch, such as ``sm_90``; empty if unknown
    usable: int = 0  # the number of devices that torch sees
    hidden: str | None = None  # CUDA_VISIBLE_DEVICES; None if it is not set

    @property
    def oldest_driver(self) -> int | None:
        """The oldest driver branch for this build of torch; None without CUDA or if unknown."""
        return None if self.built_for is None else OLDEST_DRIVER.get(int(self.built_for.partition(".")[0]))

    @property
    def obstacles(self) -> list[str]:
        """Sentences on why torch cannot use some cards; empty if it can use all, or without cards."""
        if not self.cards:
            return []
        if self.built_for is None:
            return [
                f"torch {self.torch_version} was built without CUDA, so that everything runs on the CPU: install a "
                "build with CUDA (https://pytorch.org/get-started/locally)."
            ]
        if not self.usable and self.hidden in ("", "-1"):
            return [f"CUDA_VISIBLE_DEVICES = {self.hidden!r} hides every card."]
        oldest, driver = self.oldest_driver, int((self.driver or "0").partition(".")[0])
        if not self.usable:
            needs = f", which needs a driver of version {oldest} or newer" if oldest and driver < oldest else ""
            built = f"it was built for CUDA {self.built_for}{needs}"
            return [f"torch {self.torch_version} sees none of the cards; {built}, and the driver is {self.driver}."]
        without = {card.name: card.capability for card in self.cards if not self._has_kernels(card)}
        return [
            f"torch {self.torch_version} has no kernels for {name} (compute capability {capability}); it has them for "
            f"{', '.join(self.architectures)}."
            for name, capability in without.items()
        ]

    def _has_kernels(self, card: Card) -> bool:
        """Whether torch has native code for the card's generation, or PTX that the driver compiles."""
        if card.capability is None or not self.architectures:
            return True
        major, minor = map(int, card.capability.split("."))
        for name in self.architectures:
            kind, _, number = name.partition("_")
            digits = re.match(r"\d+", number)
            if digits is None:
                continue
            of = int(digits[0][:-1]), int(digits[0][-1])
            if (kind == "sm" and of[0] == major and of[1] <= minor) or (kind == "compute" and of <= (major, minor)):
                return True
        return False


def graphics() -> Graphics:
    """The cards of this machine."""
    import torch

    driver, cards = parsed(nvidia_smi(_FIELDS))
    usable = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return Graphics(
        driver=driver,
        cards=cards,
        torch_version=torch.__version__,
        built_for=torch.version.cuda,
        architectures=tuple(torch.cuda.get_arch_list()) if usable else (),
        usable=usable,
        hidden=os.environ.get("CUDA_VISIBLE_DEVICES"),
    )


def parsed(answer: str) -> tuple[str | None, tuple[Card, ...]]:
    """The driver's version and its cards.

    ``answer`` is nvidia-smi's, a line with name, driver version, memory in MiB and compute capability for each card;
    lines of another form are left out.
    """
    driver, cards = None, []
    for line in answer.splitlines():
        parts = [part.strip() for part in line.rsplit(",", 3)]
        if len(parts) == 4 and re.fullmatch(r"\d+(\.\d+)+", parts[1]):
            driver = parts[1]
            memory = int(parts[2]) << 20 if parts[2].isdecimal() else None
            capability = parts[3] if re.fullmatch(r"\d+\.\d+", parts[3]) else None
            cards.append(Card(parts[0], memory, capability))
    return driver, tuple(cards)


def nvidia_smi(fields: str) -> str:
    """nvidia-smi's output, one line per card; empty without a working driver.

    ``fields`` are those of ``nvidia-smi --query-gpu``.
    """
    program = shutil.which("nvidia-smi", path=os.environ.get("PATH", "") + os.pathsep + WSL)
    if program is None:
        return ""
    command = [program, f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    return asked.stdout if asked.returncode == 0 else ""
