"""The models and draft heads of a profile, found and checked before the first of them is loaded."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from specctl.errors import AbsentError, ModelError
from specctl.models.draft_heads.checkpoint import DraftHeadCheckpoint, draft_head, head_in_target
from specctl.models.files.checkpoint import Checkpoint, locate
from specctl.models.loading.contents import States, model_hash, model_states
from specctl.models.loading.model import LoadedModel, load_inspected, loading_order
from specctl.models.placing.absent import absence
from specctl.models.placing.memory import DeviceMemory
from specctl.models.placing.placement import STRATEGIES
from specctl.models.placing.quantization import Quantization, rounding
from specctl.models.placing.requirements import inspected
from specctl.models.translation import TokenMap
from specctl.profile.schema import IN_TARGET, DraftTable, Engine, ModelTable

if TYPE_CHECKING:
    from specctl.models.loading.head_loading import LoadedHead

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Found:
    """A model or draft head of a profile before it is loaded.

    Attributes:
        checkpoint: its files.
        table: its profile table.
        quantization: how a model is quantised while it is loaded.
        rounding: how onnxruntime quantises a model that is loaded whole; None where it does not.
        head: the draft head that it is; None for a model.
        states: its files as they were found; None for a draft head, and for weights that are fetched later.
    """

    checkpoint: Checkpoint
    table: ModelTable
    quantization: Quantization | None
    rounding: str | None
    head: DraftHeadCheckpoint | None
    states: States | None = None

    @classmethod
    def of(
        cls,
        role: str,
        table: ModelTable,
        verifier: tuple[str, ModelTable] | None,
        devices: Sequence[DeviceMemory],
        engine: Engine,
    ) -> "Found":
        """Find one and check all that can be told without its weights.

        Args:
            role: its key in the profile.
            table: its table.
            verifier: key and table of the model that it drafts for; None for the target.
            devices: those of the machine.
            engine: the one that is to run it.
        """
        head = None
        if isinstance(table, DraftTable) and verifier is not None and (head := find_head(role, table, verifier)):
            require_head_settings(head, table)
            return cls(head.checkpoint, table, None, None, head)
        checkpoint = locate(table, role)
        how = inspected(checkpoint, table, devices, engine)
        return cls(checkpoint, table, how, rounding(table, engine), None, model_states(checkpoint))

    @property
    def files(self) -> str | None:
        """The `model_hash` of its files; None if one of them was written since it was found."""
        if self.states is not None and self.states != model_states(self.checkpoint):
            return None
        return model_hash(self.checkpoint, self.table.trust_remote_code)

    def load(self) -> LoadedModel | None:
        """The model; None for a draft head, which is loaded after its verifier."""
        return load_inspected(self.checkpoint, self.table, self.quantization) if self.head is None else None

    def load_predictor(self, verifier: LoadedModel | None) -> "LoadedHead":
        """The draft head, beside the model whose states it reads."""
        assert self.head is not None
        if verifier is not None and verifier.sharding is not None:
            raise ModelError(
                f"{self.head} cannot read a model that is in shards: it shares its embeddings.",
                'Set placement = "spread" for that model, or draft with a model.',
            )
        if verifier is None:
            raise ModelError(
                f"{self.head} cannot draft for another draft head.", "A draft head reads the states of a whole model."
            )
        # Imported here because most pairs have no draft head, and need none of the networks.
        from specctl.models.loading.head_loading import load_draft_head

        return load_draft_head(self.head, self.table, verifier)


def require_head_settings(found: DraftHeadCheckpoint, table: DraftTable) -> None:
    """Raise a ModelError if a table has settings that make no sense for a draft head."""
    if table.draft is not None:
        raise ModelError(
            f"{found} cannot verify the tokens of a faster draft: it reads a block token after token, so that this "
            "would gain nothing.",
            f"Remove [{found.checkpoint.role}.draft], or put the draft head there and a model in its place here.",
        )
    if table.quantize is not None:
        raise ModelError(
            f"{found} cannot be quantised.", f"Remove quantize from [{found.checkpoint.role}]; the head is small."
        )
    if table.adapter is not None:
        raise ModelError(f"{found} takes no adapter.", f"Remove adapter from [{found.checkpoint.role}].")
    if isinstance(table.device, dict) or table.device in STRATEGIES or table.shards is not None:
        raise ModelError(
            f"{found} goes to a single device.",
            f'Set device in [{found.checkpoint.role}] to one, such as "cuda:0", or leave it out: it then goes where '
            "its verifier's output layer is.",
        )


def find_head(role: str, table: DraftTable, verifier: tuple[str, ModelTable]) -> DraftHeadCheckpoint | None:
    """The draft head that a draft table names; None if it names a model.

    Args:
        role: the table's key in the profile.
        table: the draft's.
        verifier: key and table of the model above it, whose own files hold the head if its name is `IN_TARGET`.
    """
    if not table.has_files:
        return None
    if table.model == IN_TARGET:
        key, upper = verifier
        return head_in_target(locate(upper, key), role)
    return draft_head(locate(table, role))


@dataclass(frozen=True, slots=True)
class Level:
    """A target or draft of a pair on its way into memory.

    Attributes:
        role: its key in the profile.
        table: its profile table.
        heads: names of the acceptance heads to load for it.
        found: its files; None before they are looked for, for a draft without files, and for a model in memory.
        network: the model or draft head; None before it is loaded, and for a draft without files.
        tokens: what it shares with a target that has another tokenizer; None where that is one.
    """

    role: str
    table: ModelTable
    heads: Sequence[str] = ()
    found: Found | None = None
    network: "LoadedModel | LoadedHead | None" = None
    tokens: TokenMap | None = None

    @property
    def model(self) -> LoadedModel | None:
        """The model; None for a draft head, and for a draft without files."""
        return self.network if isinstance(self.network, LoadedModel) else None


def reader_of(levels: Sequence[T], upper: int | None) -> T:
    """Of something for each level, from the target down, that of the level which ``Pair.above`` numbers so."""
    return levels[0 if upper is None else upper + 1]


def find_all(
    levels: Sequence[Level], above: Sequence[int | None], devices: Sequence[DeviceMemory], engine: Engine
) -> list[Level]:
    """Find the files of all levels that have some and are not in memory.

    Args:
        levels: from the target down.
        above: as in `Pair`.
        devices, engine: as in `Found.of`.

    Raises:
        AbsentError: some are not on this machine; it tells of all of them.
        ModelError: as of `Found.of`.
    """
    found = list(levels)
    wanted = [place for place, one in enumerate(levels) if one.table.has_files and one.network is None]
    try:
        for place in loading_order(wanted):
            one, verifier = levels[place], reader_of(levels, above[place - 1]) if place else None
            upper = None if verifier is None else (verifier.role, verifier.table)
            found[place] = replace(one, found=Found.of(one.role, one.table, upper, devices, engine))
    except AbsentError as error:
        tables = [(levels[place].role, levels[place].table) for place in loading_order(wanted)]
        told = absence(tables, (device.name for device in devices))
        raise (told if told.message else error) from error  # empty where the hub came back meanwhile
    return found


def load_found(levels: Sequence[Level], above: Sequence[int | None], progress: Callable[[str], None]) -> list[Level]:
    """Load all that was found: the models in their order, then the draft heads.

    Args:
        levels: from the target down, with their files.
        above: as in `Pair`: whose states a draft may read.
        progress: called with the name of each before it is loaded.
    """
    loaded = list(levels)
    files = {place: one.found for place, one in enumerate(levels) if one.found is not None}
    if any(one.table.splits for one in files.values()):
        from specctl.models.loading.model_shards import split
        from specctl.models.sharding import lead

        shards = split(one.table for one in files.values())
        assert shards is not None, "a table is split"
        progress(f"{shards} processes for shards")
        lead(shards, anew=True)
    for place in loading_order(place for place, one in files.items() if one.head is None):
        progress(levels[place].table.model)
        loaded[place] = replace(levels[place], network=files[place].load())
    for place, one in files.items():
        if one.head is not None:
            progress(levels[place].table.model)
            network = one.load_predictor(reader_of(loaded, above[place - 1]).model)
            loaded[place] = replace(levels[place], network=network)
    return loaded
