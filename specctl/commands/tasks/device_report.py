"""What ``specctl doctor --devices`` tells: cards, memory, engines, the least times of passes, what drafts can bring."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specctl.doctor.bandwidth import Bandwidth
    from specctl.doctor.diagnosis import Diagnosis
    from specctl.doctor.expectations import Expectation
    from specctl.doctor.memory_needs import Room
    from specctl.doctor.outlook import Outlook
    from specctl.models.placing.cards import Graphics
    from specctl.profile import Profile

Section = tuple[str, dict[str, str]]
"""A title and rows."""


@dataclass(frozen=True, slots=True)
class Devices:
    """All that is told of a profile's models on a machine's devices; the last four are empty for models with problems.

    Attributes:
        graphics: the cards, and what torch makes of them; None for another machine than this one.
        bandwidths: by device.
        models: the target first.
        rooms: by device, what the models take of its memory.
        outlook: what drafts can bring; None for models with problems.
    """

    graphics: "Graphics | None"
    bandwidths: "Mapping[str, Bandwidth | None]"
    models: "Sequence[Expectation]"
    rooms: "Sequence[Room]"
    outlook: "Outlook | None"

    @property
    def document(self) -> dict[str, Any]:
        """The same as plain values."""
        found = asdict(self)
        if self.graphics is not None:
            found["graphics"]["obstacles"] = self.graphics.obstacles
        return found


def examine_devices(profile: "Profile", report: "Diagnosis", graphics: "Graphics | None") -> Devices:
    """What a profile's models will take of the devices of their diagnosis, and how fast these can be.

    Devices that torch can use are measured, which takes a fraction of a second each.

    Args:
        profile: as it was diagnosed.
        report: its diagnosis.
        graphics: the machine's cards; None for another machine than this one.
    """
    from specctl.doctor.bandwidth import bandwidth
    from specctl.doctor.expectations import expectations
    from specctl.doctor.memory_needs import rooms
    from specctl.doctor.outlook import outlook
    from specctl.models.placing.memory import DESCRIBED

    if not report.placed:
        return Devices(graphics, {}, (), (), None)
    models = expectations(profile, report)
    taken = rooms(models, report.devices)
    usable = 0 if graphics is None else graphics.usable
    # Of another machine, the CPU too unless it is this one's.
    here = {"cpu"} if report.here or report.devices[-1].label != DESCRIBED else set()
    here |= {f"cuda:{index}" for index in range(usable)}
    held = {room.device: room.weights for room in taken}
    bandwidths = {
        device.name: bandwidth(device, held[device.name], here=device.name in here)
        for device in report.devices
        if device.name in held
    }
    return Devices(graphics, bandwidths, models, taken, outlook(models, bandwidths))


def sections(found: Devices) -> Iterator[Section]:
    """What is shown, in order: the cards, each device, each model, and what drafts can bring."""
    from specctl.printable import gib

    if found.graphics is not None:
        yield "NVIDIA cards", dict(_cards(found.graphics))
    for room in found.rooms:
        speed = found.bandwidths[room.device]
        yield (
            f"{room.device}, once the models run",
            {
                "reads": "unknown" if speed is None else str(speed),
                "free": gib(room.free),
                "weights": gib(room.weights),
                f"caches of {room.context:,} tokens": gib(room.caches),
                "working room": gib(room.working),
                "left": gib(room.left) if room.left >= 0 else f"{gib(-room.left)} too little",
                **({"room for": f"{room.tokens:,} tokens"} if room.left < 0 and room.tokens is not None else {}),
            },
        )
    for model in found.models:
        yield model.key, dict(_model(model, found))
    if found.outlook is not None:
        yield "what drafts can bring", dict(_gains(found))


def _cards(graphics: "Graphics") -> Iterator[tuple[str, str]]:
    from specctl.printable import gib

    built = "without CUDA" if graphics.built_for is None else f"for CUDA {graphics.built_for}"
    oldest = graphics.oldest_driver
    needs = f", which needs driver {oldest} or newer" if oldest is not None else ""
    yield "torch", f"{graphics.torch_version}, built {built}{needs}"
    yield "driver", graphics.driver or "none found"
    if not graphics.cards:
        yield "cards", "none that nvidia-smi lists; models run on the other devices below"
    for number, card in enumerate(graphics.cards):
        parts = [card.name]
        if card.memory is not None:
            parts.append(gib(card.memory))
        if card.capability is not None:
            parts.append(f"compute capability {card.capability}")
        yield f"card {number}", ", ".join(parts)
    for number, obstacle in enumerate(graphics.obstacles, start=1):
        yield f"problem {number}", obstacle


def _model(model: "Expectation", found: Devices) -> Iterator[tuple[str, str]]:
    from specctl.printable import gib

    yield "engine", f"{model.engine} ({model.why})"
    if found.outlook is None or not model.reads:
        return
    yield "a pass reads", gib(model.reads[0])
    times = [f"{milliseconds(found.outlook.step_ms[model.key])} for a token"]
    if model.key == "target":
        times.append(f"{milliseconds(found.outlook.verify_ms)} for 6")
    yield "takes at least", ", ".join(times)


def _gains(found: Devices) -> Iterator[tuple[str, str]]:
    outlook = found.outlook
    assert outlook is not None
    if len(found.models) < 2:
        yield "can pay", "there is no draft, or its files are not here yet"
        return
    if outlook.cost_ratio is None:
        yield "can pay", "unknown, for a pass has no least time"
        return
    what = "a draft" if found.models[1].blocks else "a draft step"
    yield "cost by bytes", f"{what} takes {outlook.cost_ratio:.2f} of a target pass at least"
    yield "can pay", f"if {_from(outlook.pays_from)}, where reading memory takes the time"
    if outlook.pays_from_full != outlook.pays_from:
        yield (
            "can pay at the end",
            f"of a context of {found.models[1].context:,} tokens if {_from(outlook.pays_from_full)}",
        )
    if outlook.layer_ratio is not None:
        yield "cost by layers", f"{outlook.layer_ratio:.2f} of a target pass"
        launched = "where starting kernels takes the time, as in eager passes on a GPU"
        yield "can pay then", f"if {_from(outlook.pays_from_launched)}, {launched}"
    for gain in outlook.gains:
        fast = f"{gain.speedup:.2f} times as fast with {gain.draft_length} tokens a draft"
        yield f"at most, {gain.acceptance_rate:.0%} accepted", fast if gain.draft_length else "no gain"
    if any("cpu" in model.devices for model in found.models):
        yield "on a CPU", "passes over several tokens take longer than reading does; doctor --run times them"


def _from(rate: float | None) -> str:
    return "all were accepted and more" if rate is None else f"more than about {rate:.0%} of the tokens are accepted"


def milliseconds(value: float | None) -> str:
    """A time in words; unknown for None."""
    if value is None:
        return "unknown"
    return f"{value:.2g} ms" if value < 10 else f"{value:,.0f} ms"
