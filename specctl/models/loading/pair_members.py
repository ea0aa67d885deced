"""Loading the members of a pair, target and drafts: files first, then weights or stored graphs."""

from collections.abc import Callable, Iterable, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

from specctl.errors import AbsentError, ModelError
from specctl.models.draft_heads.checkpoint import DraftHeadCheckpoint, draft_head, head_in_target
from specctl.models.files.checkpoint import Checkpoint, locate
from specctl.models.files.tokenizer import BareTokenizer, Spelling, Tokenizer, known_ids
from specctl.models.loading.contents import States, model_hash, model_states
from specctl.models.loading.model import LoadedModel, load_inspected, load_packed, load_tokenizer, loading_order
from specctl.models.loading.vocabularies import WRITES_FEW, cannot_write_fewer, draft_vocabulary, token_map
from specctl.models.onnx.store import (
    CHAINS,
    PACKED,
    GraphFacts,
    Store,
    Times,
    Unable,
    cache_folder,
    key_of_files,
    no_tree_graph,
    packages_there,
)
from specctl.models.passes.draft_vocabulary import DraftVocabulary
from specctl.models.passes.inference import HOST
from specctl.models.placing.absent import absence
from specctl.models.placing.memory import DeviceMemory, accelerator
from specctl.models.placing.model_config import DTYPES
from specctl.models.placing.placement import STRATEGIES, inspected, kind_of_device
from specctl.models.placing.quantization import Quantization, form_of, rounding
from specctl.models.running.engines import EngineSettings
from specctl.models.running.slot import Slot
from specctl.models.running.threads import decided
from specctl.models.translation import TokenMap
from specctl.profile.schema import IN_TARGET, DraftTable, Engine, ModelTable, Profile

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedTokenizerBase

    from specctl.models.draft_heads.block import BlockHead
    from specctl.models.draft_heads.chain import ChainHead


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A model whose graph is in the store, with the facts that are stored next to it."""

    name: str  # the model's name in the profile
    path: Path  # of the graph
    key: str  # the graph's name in the store
    facts: GraphFacts  # of the model
    rounding: str | None  # how the graph's weights are rounded; None where they are not
    no_trees: str | None  # as in `OnnxPasses`
    ids: DraftVocabulary | None  # the token ids of its logits' columns; None where a column is an id

    @classmethod
    def find(
        cls, checkpoint: Checkpoint, table: ModelTable, engine: Engine, trees: bool, ids: DraftVocabulary | None
    ) -> "StoredModel | None":
        """Find the stored graph of a model that ``engine`` is to run, with ``trees`` one with tree support if the model
        allows it. None if the graph or the model's facts are not stored.
        """
        stated = next((dtype for name in DTYPES if (dtype := checkpoint.settings().get(name)) is not None), "float32")
        form = form_of(checkpoint, table, engine, "cpu")
        if form != PACKED and "float32" not in (table.dtype, stated):
            return None  # without reading its weights: graphs are of float32
        if "pard_token" in checkpoint.settings():
            return None  # the stored facts do not say that it drafts in parallel
        if (files := model_hash(checkpoint, table.trust_remote_code)) is None:
            return None
        store = Store(cache_folder())
        for asked in dict.fromkeys((trees, False)):
            key = key_of_files(files, "cpu", "float32", form, trees=asked, vocabulary=ids)
            facts = GraphFacts.read(store.facts(key))
            # If trees are wanted, a graph without tree support is accepted only if the model allows none.
            if facts is None:
                continue
            no_trees = no_tree_graph(facts.everything, "cpu", form) if trees else CHAINS
            if asked == (no_trees is None) and (path := store.find(key)) is not None:
                return cls(table.model, path, key, facts, form, no_trees, ids)
        return None

    @property
    def vocabulary(self) -> int:
        """Width of its logits, including padding."""
        return self.facts.rows

    @property
    def eos_ids(self) -> frozenset[int]:
        """The end-of-sequence ids of its generation settings."""
        return frozenset(self.facts.eos)

    @property
    def parameters(self) -> int:
        """The number of its weights."""
        return self.facts.parameters

    def runner(self, vocabulary: int, threads: Set[int]) -> Slot:
        """A runner of the graph, opened by `build_onnx_runner` with the fastest of the given thread counts."""
        from specctl.models.onnx.passes import Opening

        opening = Opening(HOST, vocabulary, self.facts.context, self.rounding, self.no_trees, self.ids)
        return Slot(opening.fastest(self.path, self.facts.weight_bytes, threads))


def rounded_graph(checkpoint: Checkpoint, table: ModelTable, form: str) -> tuple[Path | None, str | None]:
    """What is stored of a model's graph with rounded weights.

    Args:
        checkpoint, table: the model's.
        form: how the graph's weights are rounded.

    Returns:
        The graph's path, and why an earlier run found that it cannot be used; each None if unknown.
    """
    if (files := model_hash(checkpoint, table.trust_remote_code)) is None:
        return None, None
    store, key = Store(cache_folder()), key_of_files(files, "cpu", "float32", form)
    return store.find(key), store.refusal(key)


def may_be_stored(table: ModelTable) -> bool:
    """Whether a table asks for an unsplit model on the CPU, in a format that onnxruntime supports."""
    if table.quantize is not None and rounding(table, "onnx") is None:
        return False
    if isinstance(table, DraftTable) and table.tokens == "auto":  # needs the sizes of the model
        return False
    if table.model == IN_TARGET or table.dtype not in ("auto", "float32"):
        return False
    if table.shards is not None or table.max_memory is not None:
        return False
    # ``auto`` is the first accelerator.
    return table.device == "cpu" or (table.device == "auto" and accelerator() is None)


def store_facts(network: "LoadedModel", runner: Slot, tokenizer: Tokenizer, checkpoint: Checkpoint) -> None:
    """Store a model's facts next to its stored graph, unless they are there already.

    ``network`` may be a skeleton without weights; the other arguments describe the model.
    """
    path = getattr(getattr(runner, "passes", None), "facts", None)
    if path is None or GraphFacts.read(path) is not None:
        return
    from specctl.models.passes.masks import attends_to_everything
    from specctl.models.passes.weights import weight_bytes
    from specctl.models.placing.model_config import generation_config
    from specctl.models.running.text_rules import lone_repetition_penalty, unsupported_in

    configs = [each for each in (network.model.generation_config, generation_config(checkpoint)) if each is not None]
    penalties = {None if unsupported_in(each) else lone_repetition_penalty(each) for each in configs} or {1.0}
    GraphFacts(
        rows=network.vocabulary,
        context=runner.context,
        eos=tuple(sorted(network.eos_ids)),
        repetition_penalty=penalties.pop() if len(penalties) == 1 else None,
        everything=attends_to_everything(network.model),
        checked=network.untested,
        parameters=network.parameters,
        weight_bytes=weight_bytes(network.model),
        spelling=Spelling.of(cast("PreTrainedTokenizerBase", tokenizer)),
    ).write(path)


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
    network: "LoadedModel | StoredModel | ChainHead | BlockHead | None" = None
    # what it shares with a target that has another tokenizer; None where they have the same one
    tokens: TokenMap | None = None

    def located(self, verifier: "PairMember | None") -> "PairMember":
        """This member with its files; ``verifier`` is the member it drafts for, None for the target.

        Raises:
            ModelError: there are no such files.
        """
        if isinstance(self.table, DraftTable) and verifier is not None:
            head = find_head(self.role, self.table, (verifier.role, verifier.table))
            if head is not None:
                return replace(self, checkpoint=head.checkpoint, head=head)
        return replace(self, checkpoint=locate(self.table, self.role))

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
    def model(self) -> "LoadedModel | StoredModel | None":
        """The model; None for a draft head, and for a draft without files."""
        return self.network if isinstance(self.network, LoadedModel | StoredModel) else None

    @property
    def torch_model(self) -> LoadedModel | None:
        """The torch model; None if there is none."""
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
        if network is None or isinstance(network, StoredModel):
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
        """Whether the stored facts of both say that they have one tokenizer."""
        stored = [one.network.facts.spelling for one in (self, other) if isinstance(one.network, StoredModel)]
        return len(stored) == 2 and stored[0] is not None and stored[0] == stored[1]

    def load(self, verifier: LoadedModel | None = None) -> "PairMember":
        """This member loaded into memory; a draft head reads the states of the model in ``verifier``."""
        assert self.checkpoint is not None, "its files are found first"
        if self.head is None and self.rounding == PACKED:
            with suppress(Unable):  # then torch runs it
                return replace(self, network=load_packed(self.checkpoint, self.table))
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
        if verifier.weights is not None:
            raise ModelError(
                f"{self.head} cannot read a model whose weights stay in its file: it shares its embeddings.",
                "Draft with a model or with prompt:lookup, or unpack the file.",
            )
        # Imported here because most pairs have no draft head, and need none of the networks.
        from specctl.models.loading.draft_heads import load_draft_head

        return replace(self, network=load_draft_head(self.head, self.table, verifier))


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
        lead(shards, restart=True)
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
        found = StoredModel.find(checkpoint, one.table, settings.engine, settings.trees, _draft_ids(one, stored[0]))
        if found is None:
            return None
        if settings.engine == "auto" and found.rounding != PACKED:  # whose choice the times of both engines decide
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
