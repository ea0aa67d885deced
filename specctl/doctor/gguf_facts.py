"""A GGUF file before it is loaded: what its header says, and how it runs here."""

from collections.abc import Sequence
from dataclasses import dataclass

from specctl.errors import ModelError
from specctl.models.files.checkpoint import Checkpoint
from specctl.models.files.gguf_header import Header
from specctl.models.llama.library import package, require_llama
from specctl.models.placing.memory import DeviceMemory, Estimate
from specctl.models.placing.placement import Placement, place
from specctl.profile.schema import Engine, ModelTable

CACHE = "float16"  # A dtype as wide as the cached numbers of llama.cpp here
ENDS = ("eos", "eot", "eom")


@dataclass(frozen=True, slots=True)
class GgufFacts:
    """What a GGUF file says of itself, and what runs it."""

    files: int  # the number of files that the model is in
    pass_bytes: int  # bytes of weights that a pass over one token reads
    engine: str  # ``llama.cpp``, or what runs it without that
    library: str | None  # the distribution with llama.cpp, and its version; None without one
    install: str | None  # why there is none, and what to run; None where there is one


def runs_on_llama(checkpoint: Checkpoint, engine: Engine) -> bool:
    """Whether llama.cpp is to run a model. It need not be installed if the profile names it."""
    if checkpoint.weights is None or engine in ("eager", "static", "graph", "onnx"):
        return False
    return engine != "auto" or package() is not None


def gguf_facts(header: Header, *, on_llama: bool) -> GgufFacts:
    """The facts of a file; ``on_llama`` as `runs_on_llama` says."""
    engine, library, install = "llama.cpp" if on_llama else "onnxruntime or torch", None, None
    try:
        found = require_llama()
        library = f"{found.name} {found.version}"
    except ModelError as error:
        install = f"{error.message} {error.hint}"
    return GgufFacts(len(header.files), header.read_bytes(1), engine, library, install)


def gguf_ends(header: Header) -> list[int]:
    """The ids that end a text by the file's metadata; llama.cpp knows more by their spelling."""
    ids = (header.values.get(f"tokenizer.ggml.{kind}_token_id") for kind in ENDS)
    return sorted({found for found in ids if isinstance(found, int)})


def gguf_estimate(header: Header) -> Estimate:
    """The memory that a file needs on llama.cpp; all layers cache all tokens."""
    size = sum(header.sizes.values())
    return Estimate(header.parameters, size, CACHE, quantised=True, cached_values=header.cached_values)


def gguf_placement(table: ModelTable, need: Estimate, devices: Sequence[DeviceMemory], role: str) -> Placement:
    """Where llama.cpp puts a file's weights: on accelerators of its own build, else on the CPU.

    Raises:
        ModelError: it does not fit, or llama.cpp's build has no such device.
    """
    from specctl.models.llama.library import library
    from specctl.models.llama.model import cards_for

    cards = cards_for(library(), table.device, need.stored_bytes) if isinstance(table.device, str) else []
    if not cards:
        return place(table.model_copy(update={"device": "cpu"}), need, devices, role)
    each = need.stored_bytes // len(cards)
    return Placement("auto", None, CACHE, {card.name: each for card in cards})
