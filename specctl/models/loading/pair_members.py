"""Loading the members of a pair, target and drafts: files first, then weights or stored graphs."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal, TypeVar

from specctl.errors import AbsentError, ModelError, of_onnxruntime, pip_install
from specctl.models.draft_heads.checkpoint import DraftHeadCheckpoint, draft_head, head_in_target
from specctl.models.files.checkpoint import Checkpoint, locate
from specctl.models.files.tokenizer import Tokenizer, known_ids
from specctl.models.llama.library import WHEEL, package
from specctl.models.loading.contents import States, model_hash, model_states
from specctl.models.loading.file_models import FileModel, GgufHead, GgufModel, StoredModel, may_be_stored, require_plain
from specctl.models.loading.model import LoadedModel, load_inspected, load_packed, load_tokenizer, loading_order
from specctl.models.loading.vocabularies import WRITES_FEW, cannot_write_fewer, draft_vocabulary, token_map
from specctl.models.onnx.store import (
    PACKED,
    Store,
    Times,
    Unable,
    cache_folder,
    packages_there,
)
from specctl.models.passes.draft_vocabulary import DraftVocabulary
from specctl.models.placing.absent import absence
from specctl.models.placing.memory import DeviceMemory
from specctl.models.placing.placement import STRATEGIES, inspected, kind_of_device
from specctl.models.placing.quantization import Quantization, form_of
from specctl.models.running.engines import EngineSettings
from specctl.models.running.threads import decided
from specctl.models.translation import TokenMap
from specctl.profile.schema import IN_TARGET, DraftTable, Engine, ModelTable, Profile

if TYPE_CHECKING:
    from torch import nn

    from specctl.models.draft_heads.block import BlockHead
    from specctl.models.draft_heads.chain import ChainHead


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PairMember:
    """The target or a draft of a pair."""

    role: str  # its key in the profile
    table: ModelTable  # its profile table
    predictors: Sequence[str] = ()  # names of the acceptance heads to load for it
    # its files; None before they are found, for a draft without files, and for a model in memory
    checkpoint: Checkpoint | None = None
    head: DraftHeadCheckpoint | None = None  # the draft head in its files; None for a model
    quantization: Quantization | None = None  # how transformers quantises the model while it is loaded
    rounding: str | None = None  # how onnxruntime quantises a model that is loaded whole; None where it does not
    # its files as they were found; None for a draft head, and for weights that are fetched later
    states: States | None = None
    # the model or draft head; None before it is loaded, and for a draft without files
    network: "LoadedModel | FileModel | ChainHead | BlockHead | GgufHead | None" = None
    # what it shares with a target that has another tokenizer; None where they have the same one
    tokens: TokenMap | None = None

    def located(self, verifier: "PairMember | None") -> "PairMember":
        """This member with its files; ``verifier`` is the member it drafts for, None for the target.

        Raises:
            ModelError: there are no such files.
        """
        known = self.checkpoint
        if isinstance(self.table, DraftTable) and verifier is not None:
            above = (verifier.role, verifier.table)
            head = find_head(self.role, self.table, above) if known is None else draft_head(known)
            if head is not None:
                return replace(self, checkpoint=head.checkpoint, head=head)
        return replace(self, checkpoint=locate(self.table, self.role)) if known is None else self

    def inspected(self, devices: Sequence[DeviceMemory], engine: Engine) -> "PairMember":
        """This member after every check that needs no weights. Its files must have been located.

        Args:
            devices: those of the machine.
            engine: the engine requested for it.

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
            rounding=form_of(self.checkpoint, self.table, engine, kind_of_device(self.table, devices)),
            states=model_states(self.checkpoint),
        )

    @property
    def model(self) -> "LoadedModel | FileModel | None":
        """The model; None for a draft head, and for a draft without files."""
        return self.network if isinstance(self.network, LoadedModel | FileModel) else None

    @property
    def torch_model(self) -> LoadedModel | None:
        """The torch model; None if there is none."""
        return self.network if isinstance(self.network, LoadedModel) else None

    @property
    def file_model(self) -> FileModel | None:
        """The model that an engine runs from its file without torch; None if there is none."""
        return self.network if isinstance(self.network, FileModel) else None

    @property
    def is_gguf(self) -> bool:
        """Whether its weights are in a GGUF file."""
        return self.checkpoint is not None and self.checkpoint.weights is not None

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
        if self.network is None or isinstance(self.network, FileModel):
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
        """Its tokenizer; that of a `FileModel` without transformers, where that adds nothing.

        Raises:
            ModelError: the checkpoint has no tokenizer, or it cannot be read.
        """

        def whole() -> Tokenizer:
            return load_tokenizer(self.table, role=self.role)

        return whole() if self.file_model is None else self.file_model.tokenizer(whole)

    def translated(self, target: Tokenizer, own: Tokenizer, whole: int, *, verifies: bool) -> "PairMember":
        """This draft with the token map to a target that has another tokenizer.

        Args:
            target, whole: see `token_map`.
            own: its tokenizer.
            verifies: whether another draft drafts for it.

        Raises:
            ModelError, ProfileError: see `token_map`.
        """
        assert self.model is not None, "a draft head has no tokenizer"
        needs_law = verifies or bool(self.predictors)
        tokens = token_map(self.table, target, own, whole, self.model.vocabulary, needs_law=needs_law)
        return replace(self, tokens=tokens)

    def write_fewer(self, tokenizer: Tokenizer, whole: int, eos: Iterable[int]) -> None:
        """Cut a loaded draft's output layer to the ids that its table lets it write, if torch has the draft.

        The arguments are `draft_vocabulary`'s. Raises ModelError as that does, and if the output layer cannot be cut.
        """
        table, network = self.table, self.network
        if not isinstance(table, DraftTable) or table.tokens is None:
            return
        if network is None or isinstance(network, FileModel | GgufHead):
            return
        from specctl.models.draft_heads.chain import ChainHead
        from specctl.models.passes.trimmed_output import trim_output

        output = _output_of(network)
        if isinstance(output, str):
            if table.tokens == "auto":
                return
            raise cannot_write_fewer(self.name, output)
        share = _share(output, network.model if isinstance(network, LoadedModel) else network)
        ids = draft_vocabulary(table, tokenizer, whole, eos, len(output.weight), share)
        if ids is None:
            return
        if isinstance(network, LoadedModel):
            trim_output(network.model, ids)
        elif isinstance(network, ChainHead):
            network.draft_only(ids)

    def spells_like(self, other: "PairMember") -> bool:
        """Whether the facts of both files say that they have one tokenizer."""
        one, two = self.file_model, other.file_model
        if one is None or two is None:
            return False
        spelling = one.spelling  # of a GGUF file, its header is read
        return spelling is not None and spelling == two.spelling

    def load(self, verifier: "PairMember | None" = None) -> "PairMember":
        """This member loaded into memory; a draft head reads the states of the model in ``verifier``."""
        assert self.checkpoint is not None, "its files are found first"
        if self.head is None and self.rounding == PACKED:
            with suppress(Unable):  # then torch runs it
                return replace(self, network=load_packed(self.checkpoint, self.table))
        if self.head is None:
            return replace(self, network=load_inspected(self.checkpoint, self.table, self.quantization))
        if verifier is None or verifier.model is None:
            raise ModelError(
                f"{self.head} cannot draft for another draft head.", "A draft head reads the states of a whole model."
            )
        model = verifier.torch_model
        if model is not None and model.sharding is not None:
            raise ModelError(
                f"{self.head} cannot read a model that is in shards: it shares its embeddings.",
                'Set placement = "spread" for that model, or draft with a model.',
            )
        if model is None or verifier.is_gguf:
            raise no_embeddings(self.head)
        # Imported here because most pairs have no draft head, and need none of the networks.
        from specctl.models.loading.draft_heads import load_draft_head

        return replace(self, network=load_draft_head(self.head, self.table, model))


def no_embeddings(head: DraftHeadCheckpoint) -> ModelError:
    """The error for a draft head whose verifier is a file of blocks."""
    return ModelError(
        f"{head} cannot read a model whose weights stay in its file: it shares its embeddings.",
        "Draft with a model or with prompt:lookup, or unpack the file.",
    )


def require_head_settings(found: DraftHeadCheckpoint, table: ModelTable) -> None:
    """Raise a ModelError if a table has settings that make no sense for a draft head."""
    if isinstance(table, DraftTable) and table.draft is not None:
        raise ModelError(
            f"{found} cannot verify the tokens of a faster draft: it reads a block one token at a time, so "
            "verification would gain nothing.",
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
            f'Set device in [{found.checkpoint.role}] to one device, such as "cuda:0", or remove '
            "device: the head then goes to the device of its verifier's output layer.",
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
        above: see `Pair`.
        devices, engine: see `PairMember.inspected`.

    Raises:
        AbsentError: some are not on this machine; the message names all of them.
        ModelError: see `PairMember.located` and `PairMember.inspected`.
    """
    found = list(members)
    wanted = [place for place, one in enumerate(members) if one.table.has_files and one.network is None]
    try:
        for place in loading_order(wanted):
            verifier = reader_of(members, above[place - 1]) if place else None
            with offering_llama(members[place]):
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
    wanted = [place for place, one in enumerate(members) if one.checkpoint is not None and one.network is None]
    if any(members[place].table.splits for place in wanted):
        from specctl.models.sharding import lead

        shards = split(members[place].table for place in wanted)
        assert shards is not None, "a table is split"
        progress(f"{shards} processes for shards")
        lead(shards, restart=True)
    for place in loading_order(place for place in wanted if members[place].head is None):
        progress(members[place].table.model)
        with offering_llama(members[place]):
            loaded[place] = members[place].load()
    for place in (place for place in wanted if members[place].head is not None):
        progress(members[place].table.model)
        loaded[place] = members[place].load(reader_of(loaded, above[place - 1]))
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


@contextmanager
def offering_llama(member: PairMember) -> Iterator[None]:
    """Adds to an error about a GGUF file how to install llama.cpp, where that is missing."""
    try:
        yield
    except ModelError as error:
        if not member.is_gguf or package() is not None:
            raise
        hint = f"Or let llama.cpp run the file: `{pip_install(WHEEL)}`."
        raise ModelError(error.message, f"{error.hint} {hint}".strip()) from error


def with_gguf_models(
    members: Sequence[PairMember],
    above: Sequence[int | None],
    threads: int | Literal["auto"],
    settings: EngineSettings,
) -> list[PairMember]:
    """The members with the files that are on this machine, and with those models and heads that llama.cpp runs.

    Args:
        members: from the target down.
        above: see `Pair`.
        threads: as in the profile.
        settings: as a command asks for them.

    Raises:
        ModelError: there is no such model, or a GGUF file cannot be run as its table says.
    """
    found = list(members)
    for place, one in enumerate(members):
        if not one.table.has_files or one.network is not None:
            continue
        if one.table.model == IN_TARGET:
            found[place] = _with_gguf_head(one, reader_of(found, above[place - 1]))
            continue
        with suppress(AbsentError):  # `find_all` names all that are missing
            checkpoint = locate(one.table, one.role)
            network = GgufModel.find(checkpoint, one.table, threads, settings, exact=place == 0)
            found[place] = replace(one, checkpoint=checkpoint, network=network)
    return found


def _with_gguf_head(draft: PairMember, verifier: PairMember) -> PairMember:
    """A draft in its target's files, with its network if llama.cpp runs the target."""
    if not isinstance(verifier.network, GgufModel) or verifier.checkpoint is None:
        return draft
    head = head_in_target(verifier.checkpoint, draft.role)
    require_plain(head.checkpoint, draft.table)
    require_head_settings(head, draft.table)
    return replace(draft, checkpoint=head.checkpoint, head=head, network=GgufHead(verifier.network.model))


def with_stored_graphs(members: Sequence[PairMember], profile: Profile, settings: EngineSettings) -> list[PairMember]:
    """The members with stored graphs for all models that are not loaded yet, or for none of them.

    For none where a model has no graph yet, where the stored facts about a model do not cover all that is asked, and
    where there is too little memory. Then the models are loaded, which may raise an error that is not raised here.
    """
    try:
        return _with_stored_graphs(members, profile, settings) or [*members]
    except Exception as error:
        if not (isinstance(error, ModelError | OSError | RuntimeError) or of_onnxruntime(error)):
            raise
        return [*members]


def _with_stored_graphs(
    members: Sequence[PairMember], profile: Profile, settings: EngineSettings
) -> list[PairMember] | None:
    wanted = [place for place, one in enumerate(members) if one.table.has_files and one.network is None]
    if not wanted:
        return list(members)
    if (
        (settings.check and 0 in wanted)
        or any(one.predictors for one in members)
        or not all(may_be_stored(members[place].table) for place in wanted)
        or not _onnx_may_run([members[place].table for place in wanted], settings)
    ):
        return None
    known = decided(profile.threads)
    stored, needed = list(members), 0
    for place in wanted:
        one = members[place]
        if one.checkpoint is None:
            return None
        ids = _draft_ids(one, stored[0])
        found = StoredModel.find(one.checkpoint, one.table, settings.engine, settings.trees, ids)
        if found is None or (place == 0 and found.lacks(profile)):
            return None
        if settings.engine == "auto" and found.rounding != PACKED:  # whose choice the times of both engines decide
            times = Times(Store(cache_folder()).times(found.key))
            if not times.onnx_is_faster(None if known is None else known.number):
                return None
        stored[place] = replace(one, network=found)
        needed += found.weight_bytes
    import psutil  # type: ignore[import-untyped]

    return stored if needed <= psutil.virtual_memory().available else None


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


def eos_of(model: LoadedModel | FileModel, tokenizer: Tokenizer) -> frozenset[int]:
    """Every id that ends a sequence: those of a model's generation settings and its tokenizer's."""
    return model.eos_ids | ({tokenizer.eos_token_id} if isinstance(tokenizer.eos_token_id, int) else set())


def require_own_tokenizers(members: Sequence[PairMember], above: Sequence[int | None]) -> None:
    """Raise a ModelError if a draft head would read the states of a model with another tokenizer than the target."""
    for draft, upper in zip(members[1:], above, strict=True):
        if draft.head is not None and reader_of(members, upper).tokens is not None:
            raise ModelError(
                f"The draft head of {draft.role} cannot read the states of a model with another tokenizer than the "
                "target's: they are for other tokens.",
                f"Leave [{draft.role}] out, or take a model in its place.",
            )


def _output_of(network: "LoadedModel | ChainHead | BlockHead") -> "nn.Linear | str":
    """The output layer of a draft that writes all ids, or why it cannot be cut, as the end of a sentence."""
    from specctl.models.draft_heads.chain import ChainHead
    from specctl.models.passes.trimmed_output import trims

    if isinstance(network, LoadedModel):
        output = network.model.get_output_embeddings()  # type: ignore[no-untyped-call]
    elif network.tokens is not None:
        return WRITES_FEW.format(network.draft_vocabulary)
    elif not isinstance(network, ChainHead):
        return "its kind drafts blocks"
    else:
        output = network.output_layer
    return output if trims(output) else "its output layer is quantised or of a kind of its own"


def _share(output: "nn.Linear", module: "nn.Module") -> float:
    """The output layer's share of the weights that a draft step reads: all but the embeddings are read."""
    from torch import nn

    weights = {id(weight): weight.numel() for weight in module.parameters()}
    read = sum(weights.values())
    for part in module.modules():
        if isinstance(part, nn.Embedding) and part.weight is not output.weight:
            read -= part.weight.numel()
    if id(output.weight) not in weights:  # its verifier's
        read += output.weight.numel()
    return output.weight.numel() / read
