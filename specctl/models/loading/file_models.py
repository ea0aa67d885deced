"""Models that an engine runs straight from a file, without torch and transformers: stored graphs and GGUF files."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Set
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

from specctl.errors import ModelError
from specctl.models.files.checkpoint import Checkpoint
from specctl.models.files.gguf_header import read_header
from specctl.models.files.tokenizer import BareTokenizer, Spelling, Tokenizer
from specctl.models.llama.library import package
from specctl.models.loading.contents import model_hash
from specctl.models.onnx.store import (
    CHAINS,
    PACKED,
    GraphFacts,
    Store,
    cache_folder,
    key_of_files,
    no_tree_graph,
)
from specctl.models.passes.draft_vocabulary import DraftVocabulary
from specctl.models.passes.inference import HOST
from specctl.models.placing.memory import accelerator
from specctl.models.placing.model_config import DTYPES
from specctl.models.placing.quantization import form_of, rounding
from specctl.models.placing.torch_gguf import kernels_fit, stays_packed
from specctl.models.running.engines import EngineSettings
from specctl.models.running.ruled import TokenRule
from specctl.models.running.slot import Slot
from specctl.models.running.text_rules import repetition_rule
from specctl.models.running.transforms import FixedWidthPasses
from specctl.profile.schema import IN_TARGET, DraftTable, Engine, ModelTable, Profile

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from specctl.models.llama.model import LlamaModel
    from specctl.models.llama.rounding import Rounding
    from specctl.models.loading.model import LoadedModel


class FileModel(ABC):
    """A model that an engine runs straight from a file, with the facts that are known without torch."""

    name: str  # the model's name in the profile

    @property
    @abstractmethod
    def vocabulary(self) -> int:
        """Width of its logits, including padding."""

    @property
    @abstractmethod
    def eos_ids(self) -> frozenset[int]:
        """The ids that end a sequence, by its files."""

    @property
    @abstractmethod
    def parameters(self) -> int:
        """The number of its weights."""

    @property
    @abstractmethod
    def weight_bytes(self) -> int:
        """The size of its weights in bytes."""

    @property
    @abstractmethod
    def spelling(self) -> object:
        """What determines its tokenizer: models with equal ones have one tokenizer. None if unknown."""

    @abstractmethod
    def tokenizer(self, whole: Callable[[], Tokenizer]) -> Tokenizer:
        """Its tokenizer, without transformers where possible; ``whole`` loads that of transformers."""

    @abstractmethod
    def rule(self, vocabulary: int) -> TokenRule | None:
        """The rule of its generation settings about which tokens may follow a text, if any.

        ``vocabulary`` is the pair's.
        """

    @abstractmethod
    def lacks(self, profile: Profile) -> bool:
        """Whether it cannot be the target as a profile asks, so that torch's model is needed."""

    @abstractmethod
    def runner(self, vocabulary: int, threads: Set[int], settings: EngineSettings) -> Slot:
        """A runner of the file, with the fastest of the given thread counts; ``vocabulary`` is the pair's."""

    @abstractmethod
    def deterministic(self, runner: Slot) -> Slot:
        """A verifier whose logits do not depend on the number of tokens in a verification."""


@dataclass(frozen=True, slots=True)
class StoredModel(FileModel):
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

    @property
    def weight_bytes(self) -> int:
        return self.facts.weight_bytes

    @property
    def spelling(self) -> Spelling | None:
        return self.facts.spelling

    def tokenizer(self, whole: Callable[[], Tokenizer]) -> Tokenizer:
        """See `FileModel`; that of transformers where it does more than the library below it."""
        return whole() if self.spelling is None else BareTokenizer(self.spelling, whole)

    def rule(self, vocabulary: int) -> TokenRule | None:
        penalty = self.facts.repetition_penalty
        assert penalty is not None, "other rules need the model"
        return None if penalty == 1 else repetition_rule(penalty, vocabulary)

    def lacks(self, profile: Profile) -> bool:
        """See `FileModel`; the stored facts do not cover everything."""
        facts = self.facts
        return (
            facts.checked
            or (profile.generation_config and facts.repetition_penalty is None)
            or (profile.deterministic and not facts.everything)
        )

    def runner(self, vocabulary: int, threads: Set[int], settings: EngineSettings) -> Slot:  # noqa: ARG002
        from specctl.models.onnx.passes import Opening

        opening = Opening(HOST, vocabulary, self.facts.context, self.rounding, self.no_trees, self.ids)
        return Slot(opening.fastest(self.path, self.weight_bytes, threads))

    def deterministic(self, runner: Slot) -> Slot:
        return Slot(FixedWidthPasses(runner))


@dataclass(frozen=True, slots=True)
class GgufModel(FileModel):
    """A GGUF file that llama.cpp runs."""

    name: str  # the model's name in the profile
    model: "LlamaModel"  # the opened file
    rounding: "Rounding"  # how its passes round alike

    @classmethod
    def find(
        cls,
        checkpoint: Checkpoint,
        table: ModelTable,
        threads: int | Literal["auto"],
        settings: EngineSettings,
        *,
        exact: bool,
    ) -> "GgufModel | None":
        """Open a GGUF file that llama.cpp is to run; None where it is not installed or another engine is asked for.

        Args:
            checkpoint, table: the model's.
            threads: as in the profile.
            settings: as a command asks for them.
            exact: whether it is a target, whose passes of all widths must round alike.

        Raises:
            ModelError: the file cannot be read or run, or the table asks for what llama.cpp does not do.
        """
        if checkpoint.weights is None or package() is None or not runs_on_llama(checkpoint, table, settings.engine):
            return None
        require_plain(checkpoint, table)
        from specctl.models.llama.model import LlamaModel
        from specctl.models.llama.rounding import Rounding
        from specctl.models.llama.width_trial import rounding_of

        file, device = checkpoint.weights, str(table.device)
        try:
            rounding = rounding_of(file, threads=threads, device=device) if exact else Rounding()
            model = LlamaModel.open(file, device=device, repack=rounding.repack)
        except ModelError:
            read_header(file)  # says what is wrong with a file in fewer words than llama.cpp's log
            raise
        return cls(table.model, model, rounding)

    @property
    def vocabulary(self) -> int:
        return self.model.vocabulary

    @property
    def eos_ids(self) -> frozenset[int]:
        return frozenset(self.model.ends)

    @property
    def parameters(self) -> int:
        return self.model.parameters

    @property
    def weight_bytes(self) -> int:
        return self.model.bytes

    @property
    def spelling(self) -> str:
        return read_header(self.model.path).tokens

    def tokenizer(self, whole: Callable[[], Tokenizer]) -> Tokenizer:  # noqa: ARG002
        from specctl.models.llama.vocabulary import LlamaTokenizer

        return LlamaTokenizer(self.model)

    def rule(self, vocabulary: int) -> None:
        """See `FileModel`; a GGUF file has no such rules."""

    def lacks(self, profile: Profile) -> bool:  # noqa: ARG002
        return False

    def runner(self, vocabulary: int, threads: Set[int], settings: EngineSettings) -> Slot:
        from specctl.models.llama.passes import LlamaPasses

        if settings.compile is True:
            settings.notice(f"{self.name} runs uncompiled: llama.cpp has its own kernels")
        passes = LlamaPasses(self.model, vocabulary, self.model.context, self.rounding, min(threads))
        passes.try_threads(threads)
        return Slot(passes)

    def deterministic(self, runner: Slot) -> Slot:
        """See `FileModel`; its rows are equal at every width."""
        return runner


def runs_on_llama(checkpoint: Checkpoint, table: ModelTable, engine: Engine) -> bool:
    """Whether llama.cpp is to run a model. It need not be installed where the profile names it.

    ``auto`` takes torch for a file that it runs on a CUDA device as it is, where llama.cpp has no accelerator.
    """
    if checkpoint.weights is None or engine not in ("auto", "llama"):
        return False
    if engine == "llama" or package() is None:
        return engine == "llama"
    from specctl.models.llama.library import library
    from specctl.models.llama.model import cards_of

    if cards_of(library()):
        return True
    named = isinstance(table.device, str) and table.device.startswith("cuda")
    first = accelerator() if table.device == "auto" else None
    on_cuda = named or (first is not None and first.type == "cuda")
    if not on_cuda or not stays_packed(checkpoint, engine, "cuda"):
        return True
    return not named and not kernels_fit()


@dataclass(frozen=True, slots=True)
class GgufHead:
    """The MTP layers in a GGUF target's file, which llama.cpp runs."""

    model: "LlamaModel"  # the opened file

    @property
    def width(self) -> int:
        """The size of their states."""
        return self.model.width

    def runner(self, vocabulary: int, verifier: Slot) -> Slot:
        """A runner of the layers; ``vocabulary`` is the pair's, and ``verifier`` runs the target."""
        from specctl.models.llama.mtp import MtpPasses

        return Slot(MtpPasses(self.model, vocabulary, verifier.context, verifier.passes.threads or 1))


def find_tokenizer(checkpoint: Checkpoint, table: ModelTable, engine: Engine) -> Tokenizer:
    """The tokenizer of a model that is not loaded: a GGUF file's own where llama.cpp runs it, else transformers'.

    Raises:
        ModelError: there is none, or it cannot be read.
    """
    if checkpoint.weights is not None and runs_on_llama(checkpoint, table, engine):
        from specctl.models.llama.vocabulary import LlamaTokenizer

        return LlamaTokenizer.open(checkpoint.weights)
    from specctl.models.loading.model import load_tokenizer

    return load_tokenizer(table, role=checkpoint.role)


def require_plain(checkpoint: Checkpoint, table: ModelTable) -> None:
    """Raise a ModelError if a table asks for what llama.cpp does not do with a GGUF file."""
    role = checkpoint.role
    for key, why in (
        ("adapter", "an adapter cannot be merged into its rounded weights"),
        ("quantize", "its weights are rounded already"),
        ("shards", "llama.cpp runs it in one process"),
        ("max_memory", "llama.cpp places it itself"),
        ("dtype", "llama.cpp computes with the file's own blocks, and in float32"),
        ("tokens", "llama.cpp computes all of its output layer"),
        ("head", "acceptance heads read states of a model that torch runs"),
    ):
        value = getattr(table, key, None)
        if value not in (None, "auto", "float32"):
            raise ModelError(f"{checkpoint} is a GGUF file: {why}.", f"Remove {key} from [{role}].")
    if not isinstance(table.device, str):
        raise ModelError(
            f"{checkpoint} is a GGUF file: llama.cpp spreads its layers itself.",
            f'Set device in [{role}] to "auto", or to one device.',
        )


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
