"""The target and drafts of a pair on their way into memory: found and checked first, weights last."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, TypeVar

from specctl.errors import AbsentError, ModelError
from specctl.models.draft_heads.checkpoint import DraftHeadCheckpoint, draft_head, head_in_target
from specctl.models.files.checkpoint import Checkpoint, locate
from specctl.models.files.tokenizer import BareTokenizer, Tokenizer, known_ids
from specctl.models.loading.contents import States, model_hash, model_states
from specctl.models.loading.model import LoadedModel, load_inspected, load_tokenizer, loading_order
from specctl.models.loading.stored_model import StoredModel, may_be_stored
from specctl.models.loading.vocabularies import draft_vocabulary, token_map
from specctl.models.onnx.store import Store, Times, cache_folder, packages_there
from specctl.models.passes.draft_vocabulary import DraftVocabulary
from specctl.models.placing.absent import absence
from specctl.models.placing.memory import DeviceMemory
from specctl.models.placing.placement import STRATEGIES, inspected
from specctl.models.placing.quantization import Quantization, rounding
from specctl.models.running.engines import EngineSettings
from specctl.models.running.threads import decided
from specctl.models.translation import TokenMap
from specctl.profile.schema import IN_TARGET, DraftTable, Engine, ModelTable, Profile

if TYPE_CHECKING:
    from specctl.models.draft_heads.block import BlockHead
    from specctl.models.draft_heads.chain import ChainHead

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PairMember:
    """The target or a draft of a pair.

    Attributes:
        role: its key in the profile.
        table: its profile table.
        predictors: names of the acceptance heads to load for it.
        checkpoint: its files; None before they are found, for a draft without files, and for a model in memory.
        head: the draft head in its files; None for a model.
        quantization: how transformers quantises the model while it is loaded.
        rounding: how onnxruntime quantises a model that is loaded whole; None where it does not.
        states: its files as they were found; None for a draft head, and for weights that are fetched later.
        network: the model or draft head; None before it is loaded, and for a draft without files.
        tokens: what it shares with a target that has another tokenizer; None where they have the same one.
    """

    role: str
    table: ModelTable
    predictors: Sequence[str] = ()
    checkpoint: Checkpoint | None = None
    head: DraftHeadCheckpoint | None = None
    quantization: Quantization | None = None
    rounding: str | None = None
    states: States | None = None
    network: "LoadedModel | StoredModel | ChainHead | BlockHead | None" = None
    tokens: TokenMap | None = None

    def located(self, verifier: "PairMember | None") -> "PairMember":
        """It with its files; ``verifier`` is the member that it drafts for, None for the target.

        Raises:
            ModelError: there are no such files.
        """
        if isinstance(self.table, DraftTable) and verifier is not None:
            head = find_head(self.role, self.table, (verifier.role, verifier.table))
            if head is not None:
                return replace(self, checkpoint=head.checkpoint, head=head)
        return replace(self, checkpoint=locate(self.table, self.role))

    def inspected(self, devices: Sequence[DeviceMemory], engine: Engine) -> "PairMember":
        """It after all checks that need no weights; its files are located.

        Args:
            devices: those of the machine.
            engine: the one that is to run it.

        Raises:
            ModelError: it cannot run here.
        """
        assert self.checkpoint is not None, "its files are located first"
        if self.head is not None:
            require_head_settings(self.head, self.table)
            return self
        return replace(
            self,
            quantization=inspected(self.checkpoint, self.table, devices, engine),
            rounding=rounding(self.table, engine),
            states=model_states(self.checkpoint),
        )

    @property
    def model(self) -> "LoadedModel | StoredModel | None":
        """The model; None for a draft head, and for a draft without files."""
        return self.network if isinstance(self.network, LoadedModel | StoredModel) else None

    @property
    def torch_model(self) -> LoadedModel | None:
        """The model as torch has it; None where there is none."""
        return self.network if isinstance(self.network, LoadedModel) else None

    @property
    def name(self) -> str:
        """Its name in messages."""
        if self.model is not None:
            return self.model.name
        return self.table.model if self.checkpoint is None else self.checkpoint.name

    @property
    def hidden_size(self) -> int:
        """Width of the hidden states that acceptance heads read."""
        if isinstance(self.network, LoadedModel):
            return int(self.network.config.hidden_size)
        if self.network is None or isinstance(self.network, StoredModel):
            raise AssertionError("it has no states")
        return self.network.width

    @property
    def files_hash(self) -> str | None:
        """The `model_hash` of its files; None for a model in memory, and if a file was written since it was found."""
        checkpoint = self.checkpoint
        if checkpoint is None or (self.states is not None and self.states != model_states(checkpoint)):
            return None
        return model_hash(checkpoint, self.table.trust_remote_code)

    def tokenizer(self) -> Tokenizer:
        """Its tokenizer; that of a stored model without transformers, where that adds nothing.

        Raises:
            ModelError: the checkpoint has no tokenizer, or it cannot be read.
        """
        spelling = self.network.facts.spelling if isinstance(self.network, StoredModel) else None
        if spelling is None:
            return load_tokenizer(self.table, role=self.role)
        return BareTokenizer(spelling, lambda: load_tokenizer(self.table, role=self.role))

    def translated(self, target: Tokenizer, own: Tokenizer, whole: int, *, verifies: bool) -> "PairMember":
        """It with what it shares with a target that has another tokenizer.

        Args:
            target, whole: as in `token_map`.
            own: its tokenizer.
            verifies: whether another draft drafts for it.

        Raises:
            ModelError, ProfileError: see `token_map`.
        """
        assert self.model is not None, "a draft head has no tokenizer"
        needs_law = verifies or bool(self.predictors)
        tokens = token_map(self.table, target, own, whole, self.model.vocabulary, needs_law=needs_law)
        return replace(self, tokens=tokens)

    def spells_like(self, other: "PairMember") -> bool:
        """Whether the stored facts of both say that they have one tokenizer."""
        stored = [one.network.facts.spelling for one in (self, other) if isinstance(one.network, StoredModel)]
        return len(stored) == 2 and stored[0] is not None and stored[0] == stored[1]

    def load(self, verifier: LoadedModel | None = None) -> "PairMember":
        """It in memory, with the model that a draft head reads beside it in ``verifier``."""
        assert self.checkpoint is not None, "its files are found first"
        if self.head is None:
            return replace(self, network=load_inspected(self.checkpoint, self.table, self.quantization))
        if verifier is None:
            raise ModelError(
                f"{self.head} cannot draft for another draft head.", "A draft head reads the states of a whole model."
            )
        if verifier.sharding is not None:
            raise ModelError(
                f"{self.head} cannot read a model that is in shards: it shares its embeddings.",
                'Set placement = "spread" for that model, or draft with a model.',
            )
        # Imported here because most pairs have no draft head, and need none of the networks.
        from specctl.models.loading.draft_heads import load_draft_head

        return replace(self, network=load_draft_head(self.head, self.table, verifier))


def require_head_settings(found: DraftHeadCheckpoint, table: ModelTable) -> None:
    """Raise a ModelError if a table has settings that make no sense for a draft head."""
    if isinstance(table, DraftTable) and table.draft is not None:
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

    ``role`` is the table's key in the profile. ``verifier`` are key and table of the model above it, whose files hold
    the head if its name is `IN_TARGET`.
    """
    if not table.has_files:
        return None
    if table.model == IN_TARGET:
        key, upper = verifier
        return head_in_target(locate(upper, key), role)
    return draft_head(locate(table, role))


def reader_of(members: Sequence[T], upper: int | None) -> T:
    """From a list with an entry for each member, target first, the entry that ``upper`` of ``Pair.above`` means."""
    return members[0 if upper is None else upper + 1]


def find_all(
    members: Sequence[PairMember], above: Sequence[int | None], devices: Sequence[DeviceMemory], engine: Engine
) -> list[PairMember]:
    """Find the files of all members that have some and are not in memory.

    Args:
        members: from the target down.
        above: as in `Pair`.
        devices, engine: as in `PairMember.inspected`.

    Raises:
        AbsentError: some are not on this machine; the message names all of them.
        ModelError: see `PairMember.located` and `PairMember.inspected`.
    """
    found = list(members)
    wanted = [place for place, one in enumerate(members) if one.table.has_files and one.network is None]
    try:
        for place in loading_order(wanted):
            verifier = reader_of(members, above[place - 1]) if place else None
            found[place] = members[place].located(verifier).inspected(devices, engine)
    except AbsentError as error:
        tables = [(members[place].role, members[place].table) for place in loading_order(wanted)]
        absent = absence(tables, (device.name for device in devices))
        raise (absent if absent.message else error) from error  # empty where the hub came back meanwhile
    return found


def load_found(
    members: Sequence[PairMember], above: Sequence[int | None], progress: Callable[[str], None]
) -> list[PairMember]:
    """Load all members that have files: the models in their order, then the draft heads.

    ``above`` says whose states a draft may read, as in `Pair`; ``progress`` is called with each name before it is
    loaded.
    """
    loaded = list(members)
    wanted = [place for place, one in enumerate(members) if one.checkpoint is not None]
    if any(members[place].table.splits for place in wanted):
        from specctl.models.sharding import lead

        shards = split(members[place].table for place in wanted)
        assert shards is not None, "a table is split"
        progress(f"{shards} processes for shards")
        lead(shards, anew=True)
    for place in loading_order(place for place in wanted if members[place].head is None):
        progress(members[place].table.model)
        loaded[place] = members[place].load()
    for place in (place for place in wanted if members[place].head is not None):
        progress(members[place].table.model)
        loaded[place] = members[place].load(reader_of(loaded, above[place - 1]).torch_model)
    return loaded


def split(tables: Iterable[ModelTable]) -> int | None:
    """Over how many processes models are split, None where none is; raises ModelError for two different numbers."""
    numbers = {table.shards for table in tables if table.shards is not None and table.splits}
    if len(numbers) > 1:
        raise ModelError(
            f"Models are in {' and '.join(map(str, sorted(numbers)))} shards; all that are split over processes need "
            "the same number.",
            'Set the same shards, or placement = "spread" for one of them.',
        )
    return next(iter(numbers), None)


def find_stored(members: Sequence[PairMember], profile: Profile, settings: EngineSettings) -> list[PairMember] | None:
    """The members with the stored graphs of their models, which stand for the models; members are listed from the
    target down.

    None where a model has no graph yet, where the stored facts about a model do not cover all that is asked, and where
    there is too little memory. Raises ModelError if there is no such model.
    """
    wanted = [place for place, one in enumerate(members) if one.table.has_files]
    if (
        settings.check
        or any(one.predictors for one in members)
        or not all(may_be_stored(members[place].table) for place in wanted)
        or not _onnx_may_run([members[place].table for place in wanted], settings)
    ):
        return None
    known = decided(profile.threads)
    stored = list(members)
    for place in wanted:
        one = members[place]
        checkpoint = locate(one.table, one.role)
        found = StoredModel.find(checkpoint, one.table, settings.trees, _draft_ids(one, stored[0]))
        if found is None:
            return None
        if settings.engine == "auto":  # whose choice the times of both engines decide
            times = Times(Store(cache_folder()).times(found.key))
            if not times.onnx_is_faster(None if known is None else known.number):
                return None
        stored[place] = replace(one, checkpoint=checkpoint, network=found)
    return stored if _facts_suffice([one.network for one in stored], profile) else None


def _onnx_may_run(tables: Sequence[ModelTable], settings: EngineSettings) -> bool:
    """Whether onnxruntime is asked for and installed, or could be what ``auto`` chooses."""
    if settings.engine == "onnx":
        return find_spec("onnxruntime") is not None
    if settings.engine != "auto" or settings.compile is True or any(table.quantize is not None for table in tables):
        return False
    return packages_there() and cache_folder().exists()


def _draft_ids(draft: PairMember, target: PairMember) -> DraftVocabulary | None:
    """The ids that a draft can write; None for all."""
    if not isinstance(draft.table, DraftTable) or draft.table.tokens is None or target.model is None:
        return None
    tokenizer = target.tokenizer()
    whole = known_ids(tokenizer, target.model.vocabulary)
    return draft_vocabulary(draft.table, tokenizer, whole, eos_of(target.model, tokenizer))


def _facts_suffice(networks: Sequence[object], profile: Profile) -> bool:
    """Whether the stored facts about models cover all that is asked of them, and memory is enough for their weights."""
    import psutil  # type: ignore[import-untyped]

    facts = [network.facts for network in networks if isinstance(network, StoredModel)]
    target = facts[0]
    if (
        target.checked
        or (profile.generation_config and target.repetition_penalty is None)
        or (profile.deterministic and not target.everything)
    ):
        return False
    return bool(sum(each.weight_bytes for each in facts) <= psutil.virtual_memory().available)


def eos_of(model: LoadedModel | StoredModel, tokenizer: Tokenizer) -> frozenset[int]:
    """Every id that ends a sequence: those of a model's generation settings and its tokenizer's."""
    return model.eos_ids | ({tokenizer.eos_token_id} if isinstance(tokenizer.eos_token_id, int) else set())


def require_own_tokenizers(members: Sequence[PairMember], above: Sequence[int | None]) -> None:
    """Raise a ModelError if a draft head would read the states of a model with another tokenizer than the target."""
    for draft, upper in zip(members[1:], above, strict=True):
        if draft.head is not None and reader_of(members, upper).tokens is not None:
            raise ModelError(
                f"The draft head of {draft.role} cannot read the states of a model with another tokenizer than the "
                "target's: they are of other tokens.",
                f"Leave [{draft.role}] out, or take a model in its place.",
            )
