"""A GGUF file before it is loaded: what its header says, and how it runs here."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specctl.errors import ModelError
from specctl.models.files.gguf_header import Header
from specctl.models.llama.library import require_llama
from specctl.models.placing.memory import DeviceMemory, Estimate
from specctl.models.placing.placement import Placement, place
from specctl.models.placing.torch_gguf import kernels_there, kernels_wanted
from specctl.profile.schema import ModelTable

if TYPE_CHECKING:
    from specctl.models.llama.rounding import Rounding

CACHE = "float16"  # A dtype as wide as the cached numbers of llama.cpp here


@dataclass(frozen=True, slots=True)
class GgufFacts:
    """What a GGUF file says of itself, and what runs it."""

    files: int  # the number of files that the model is in
    pass_bytes: int  # bytes of weights that a pass over one token reads
    engine: str  # what runs it: ``llama.cpp``, ``onnxruntime``, or torch and the package that it needs
    library: str | None  # the distribution with llama.cpp, and its version; None without one
    passes: str | None  # how the passes of a target on llama.cpp round, in words
    install: str | None  # why there is none, and what to run; None where there is one


def gguf_facts(header: Header, *, on_llama: bool, on_torch: bool) -> GgufFacts:
    """The facts of a file.

    Args:
        header: of the file.
        on_llama, on_torch: what runs it, as `runs_on_llama` and `stays_packed` say.
    """
    engine, library, install = "llama.cpp" if on_llama else "onnxruntime", None, None
    if on_torch:
        engine = f"torch, with kernels {kernels_there() or 'missing'}; transformers takes {kernels_wanted()}"
    try:
        found = require_llama()
        library = f"{found.name} {found.version}"
    except ModelError as error:
        install = f"{error.message} {error.hint}"
    return GgufFacts(len(header.files), header.read_bytes(1), engine, library, None, install)


def passes_text(known: bool, rounding: "Rounding | None") -> str:
    """How the passes of a target round, in words; for the arguments see `kept_rounding`."""
    from specctl.models.llama.library import F16

    if not known:
        return "compared when it is first loaded"
    if rounding is None:
        return "differ in the last bits by their width"
    parts = ["equal at all widths, bit for bit", f"cache in {'float16' if rounding.cache == F16 else 'bfloat16'}"]
    parts += [f"up to {rounding.most} tokens each"]
    parts += [f"at least {rounding.least} tokens each"] if rounding.least > 1 else []
    parts += [] if rounding.repack else ["weights in the file's order"]
    return "; ".join(parts)


def gguf_estimate(header: Header) -> Estimate:
    """The memory that a file needs on llama.cpp; all layers cache all tokens."""
    size = sum(header.sizes.values())
    return Estimate(header.parameters, size, CACHE, quantised=True, cached_values=header.cached_values)


def gguf_placement(
    table: ModelTable, need: Estimate, devices: Sequence[DeviceMemory], role: str, *, here: bool
) -> Placement:
    """Where llama.cpp puts a file's weights: on accelerators of its own build, else on the CPU.

    Args:
        table, need: of the model.
        devices: of the machine.
        role: of the model.
        here: whether it is this machine; another one is taken to have a build for its devices.

    Raises:
        ModelError: it does not fit, or llama.cpp's build has no such device.
    """
    from specctl.models.llama.library import library
    from specctl.models.llama.model import cards_for

    if not here:
        return place(table, need, devices, role)
    cards = cards_for(library(), table.device, need.stored_bytes) if isinstance(table.device, str) else []
    if not cards:
        return place(table.model_copy(update={"device": "cpu"}), need, devices, role)
    each = need.stored_bytes // len(cards)
    return Placement("auto", None, CACHE, {card.name: each for card in cards})
