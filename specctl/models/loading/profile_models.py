"""The models and draft heads of a profile, found and checked before the first of them is loaded."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specctl.errors import AbsentError, ModelError
from specctl.models.files.checkpoint import Checkpoint, locate
from specctl.models.head_files.draft_head import DraftHeadCheckpoint, draft_head, head_in_target
from specctl.models.loading.contents import States, model_hash, model_states
from specctl.models.loading.model import LoadedModel, load_inspected
from specctl.models.placing.absent import absence
from specctl.models.placing.memory import DeviceMemory
from specctl.models.placing.placement import STRATEGIES
from specctl.models.placing.quantization import Quantization, rounding
from specctl.models.placing.requirements import inspected
from specctl.profile.schema import IN_TARGET, DraftTable, Engine, ModelTable

if TYPE_CHECKING:
    from specctl.models.loading.head_loading import LoadedHead


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

    def load_head(self, verifier: LoadedModel | None) -> "LoadedHead":
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


def find_all(
    tables: Sequence[tuple[str, ModelTable]],
    above: Sequence[int | None],
    devices: Sequence[DeviceMemory],
    engine: Engine,
) -> list[Found]:
    """Find all models of a profile.

    Args:
        tables: key and table of each, in loading order, the target last.
        above, devices, engine: as in `load_found` and `Found.of`.

    Raises:
        AbsentError: some are not on this machine; it tells of all of them.
        ModelError: as of `Found.of`.
    """
    verifiers = [tables[-1] if upper is None else tables[-2 - upper] for upper in above]
    try:
        return [
            Found.of(role, table, verifier, devices, engine)
            for (role, table), verifier in zip(tables, [*verifiers[::-1], None], strict=True)
        ]
    except AbsentError as error:
        told = absence(tables, (device.name for device in devices))
        raise (told if told.message else error) from error  # empty where the hub came back meanwhile


def load_found(
    found: Sequence[Found], above: Sequence[int | None], progress: Callable[[str], None]
) -> "list[LoadedModel | LoadedHead]":
    """Load all of them, the models first and in their order, then the draft heads.

    Args:
        found: in loading order, the target last.
        above: for each draft, from the first, the index of the draft whose states it may read; None for the target.
        progress: called with the name of each before it is loaded.

    Returns:
        The target, then the drafts from the first on.
    """
    if any(one.table.splits for one in found):
        from specctl.models.loading.model_shards import split
        from specctl.models.sharding.leader import lead

        shards = split(one.table for one in found)
        assert shards is not None, "a table is split"
        progress(f"{shards} processes for shards")
        lead(shards, anew=True)
    models: list[LoadedModel | None] = []
    for one in found:
        if one.head is None:
            progress(one.table.model)
        models.insert(0, one.load())
    networks: list[LoadedModel | LoadedHead] = []
    for one, model, upper in zip(found[::-1], models, [None, *above], strict=True):
        if model is None:
            progress(one.table.model)
        networks.append(model or one.load_head(models[0 if upper is None else upper + 1]))
    return networks
