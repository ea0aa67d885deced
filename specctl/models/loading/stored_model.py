"""A model that its stored graph runs: opened without torch and transformers, and without reading its weights."""

from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from specctl.models.files.checkpoint import Checkpoint
from specctl.models.files.plain_config import DTYPES
from specctl.models.files.tokenizer import Spelling, Tokenizer
from specctl.models.loading.contents import model_hash
from specctl.models.onnx.store import CHAINS, GraphFacts, Store, cache_folder, key_of_files, no_tree_graph
from specctl.models.passes.draft_vocabulary import DraftVocabulary
from specctl.models.passes.inference import HOST
from specctl.models.placing.memory import accelerator
from specctl.models.placing.quantization import rounding
from specctl.models.running.slot import Slot
from specctl.profile.schema import IN_TARGET, DraftTable, ModelTable

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from specctl.models.loading.model import LoadedModel


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A model whose graph is in the store, with the facts that are stored beside it.

    Attributes:
        name: the model's name in the profile.
        path: of the graph.
        key: the graph's name in the store.
        facts: of the model.
        rounding: how the graph's weights are rounded; None where they are not.
        no_trees: as in `OnnxPasses`.
        ids: the token ids of its logits' columns; None where a column is an id.
    """

    name: str
    path: Path
    key: str
    facts: GraphFacts
    rounding: str | None
    no_trees: str | None
    ids: DraftVocabulary | None

    @classmethod
    def find(
        cls, checkpoint: Checkpoint, table: ModelTable, trees: bool, ids: DraftVocabulary | None
    ) -> "StoredModel | None":
        """Find a model's graph, one that reads ``trees`` if it can; None if it or the facts about its model are not
        stored.
        """
        stated = next((dtype for name in DTYPES if (dtype := checkpoint.settings().get(name)) is not None), "float32")
        if "float32" not in (table.dtype, stated):
            return None  # without reading its weights: graphs are of float32
        if "pard_token" in checkpoint.settings():
            return None  # the stored facts do not say that it drafts in parallel
        if (files := model_hash(checkpoint, table.trust_remote_code)) is None:
            return None
        store, form = Store(cache_folder()), rounding(table, "onnx")
        for asked in dict.fromkeys((trees, False)):
            key = key_of_files(files, "cpu", "float32", form, trees=asked, vocabulary=ids)
            facts = GraphFacts.read(store.facts(key))
            # Where trees are asked for, a graph without is the one to take only if the model cannot read them.
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
        """A runner of the graph, as `build_onnx_runner` opens it, with the fastest of some numbers of threads."""
        from specctl.models.onnx.passes import Opening

        opening = Opening(HOST, vocabulary, self.facts.context, self.rounding, self.no_trees, self.ids)
        return Slot(opening.fastest(self.path, self.facts.weight_bytes, threads))


def may_be_stored(table: ModelTable) -> bool:
    """Whether a table asks for a model in one piece on the CPU, in a form that onnxruntime has."""
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
    """Store the facts of a model beside its graph, if its runner has a stored one and there are none yet.

    ``network`` may have shapes and no weights; the others are the model's own.
    """
    path = getattr(getattr(runner, "passes", None), "facts", None)
    if path is None or GraphFacts.read(path) is not None:
        return
    from specctl.models.passes.masks import attends_to_everything
    from specctl.models.passes.weights import weight_bytes
    from specctl.models.placing.model_config import generation_config
    from specctl.models.running.rules.text_rules import lone_repetition_penalty, unsupported_in

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
