"""What the models of a profile take of each device's memory once they run."""

from collections.abc import Sequence
from dataclasses import dataclass

from specctl.doctor.expectations import Expectation
from specctl.models.placing.memory import CUDA_CONTEXT, DeviceMemory


@dataclass(frozen=True, slots=True)
class Room:
    """One device's memory, in bytes.

    Attributes:
        device: its name.
        free: before anything is loaded.
        weights: of all models.
        context: how many tokens the caches are counted for; that of a draft with a shorter context, for as many.
        caches: of all models, for that length, with the room that they keep for more.
        working: what passes need beside both.
        tokens: for how many tokens there is room; None where nothing grows with them.
    """

    device: str
    free: int
    weights: int
    context: int
    caches: int
    working: int
    tokens: int | None

    @property
    def left(self) -> int:
        """Bytes left; less than 0 where there are too few."""
        return self.free - self.weights - self.caches - self.working


def rooms(models: Sequence[Expectation], devices: Sequence[DeviceMemory]) -> list[Room]:
    """The devices on which weights lie; a cache is spread over devices as its model's weights are."""
    found = []
    for device in devices:
        here = [model for model in models if model.devices.get(device.name)]
        if not here:
            continue
        weights = sum(model.devices[device.name] for model in here)
        cache = [model.cache * model.spare * model.devices[device.name] / model.weights for model in here]  # of a token
        each, caches = sum(cache), sum(size * model.context for size, model in zip(cache, here, strict=True))
        context = max(model.context for model in here)
        working = sum(model.working for model in here) + CUDA_CONTEXT * device.name.startswith("cuda")
        tokens = max(0, int((device.free - weights - working) / each)) if each else None
        found.append(Room(device.name, device.free, weights, context, round(caches), working, tokens))
    return found
