"""What machine this is, and how fast its first card reads its memory."""

import torch

from specctl.doctor.outlook import MOST, measured, published
from specctl.models.loading.model import load_model
from specctl.models.placing.memory import device_memory, graphics
from specctl.printable import gib
from specctl.profile.schema import ModelTable
from specctl.versions import versions
from tools.gpu_report.record import Recorder
from tools.gpu_report.stage import Stage

SHARE = 0.75
"""Of what is published, a copy reaches at least this much on a card that nobody else uses."""


def examine(to: Recorder, stage: Stage) -> None:
    """Tell versions and devices, check that torch can use the cards, and measure the bandwidth."""
    found, cudnn = graphics(), torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    for name, value in {**versions(), "driver": found.driver, "cuDNN": cudnn}.items():
        to.row("Versions", name=name, version=None if value is None else str(value))
    for device in device_memory():
        to.row(
            "Devices", device=device.name, **{"is": device.label, "memory": gib(device.total), "free": gib(device.free)}
        )
    for obstacle in found.obstacles:
        to.check("torch can use the cards", False, obstacle)
    to.fact("devices", found.usable)
    if not stage.rehearsal:
        to.check("torch sees a CUDA device", found.usable > 0, f"{found.usable} devices")
        if not found.usable:
            return
    _attention(to, stage)
    speed = measured(stage.device, MOST)
    to.fact("bandwidth", speed)
    label = next((device.label for device in device_memory() if device.name == stage.device), "")
    known = published(label)
    to.row(
        "Memory bandwidth",
        device=stage.device,
        **{"measured GB/s": speed / 1e9, "published GB/s": None if known is None else known.bytes_per_second / 1e9},
    )
    if known is not None:
        reached = speed / known.bytes_per_second
        stage.judge(to, f"a copy reaches {SHARE:.0%} of the published bandwidth", reached >= SHARE, f"{reached:.0%}")


def _attention(to: Recorder, stage: Stage) -> None:
    """In which order torch tries its kernels, and whether specctl keeps it from cuDNN's."""
    order = getattr(torch._C, "_get_sdp_priority_order", None)
    if order is not None:
        names = torch.nn.attention.SDPBackend.__members__.items()
        by_number = {int(value): name.lower() for name, value in names}  # type: ignore[call-overload]
        to.note(f"torch tries attention kernels in the order {', '.join(by_number.get(n, str(n)) for n in order())}")
    load_model(ModelTable(model="embedded:draft", device=stage.device), role="draft")
    allowed = torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
    to.fact("cudnn", allowed)
    stage.judge(to, "a loaded model keeps torch from cuDNN's attention", not allowed, "it plans for every new length")
