"""A pair of models whose graphs are there, opened without loading a model."""

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from specctl.errors import ModelError, of_onnxruntime
from specctl.models.files.checkpoint import locate
from specctl.models.files.plain_config import DTYPES
from specctl.models.files.tokenizer import BareTokenizer, Tokenizer
from specctl.models.files.vocabulary import check_vocabulary
from specctl.models.loading.contents import model_hash
from specctl.models.loading.fewer_tokens import draft_vocabulary
from specctl.models.loading.fileless_drafts import Places
from specctl.models.loading.proportion import large_draft
from specctl.models.loading.vocabularies import notice_of, own_text_runner, token_map
from specctl.models.onnx.store import (
    CHAINS,
    Kept,
    Store,
    Times,
    cache_folder,
    key_of_files,
    no_tree_graph,
    packages_there,
)
from specctl.models.passes.draft_vocabulary import DraftVocabulary
from specctl.models.passes.host_device import HOST
from specctl.models.placing.accelerator import accelerator
from specctl.models.placing.quantization import rounding
from specctl.models.running.engines import EngineSettings
from specctl.models.running.fixed_width import FixedWidthRunner
from specctl.models.running.pair import Pair, in_a_row
from specctl.models.running.rules.ruled import RuledRunner
from specctl.models.running.rules.text_rules import repetition_rule
from specctl.models.running.slot import Slot
from specctl.models.running.threads import LARGE, Threads, choose, decided, tell_torch, threads_of
from specctl.models.translation import TokenMap
from specctl.processes.cores import CoreTime
from specctl.profile.schema import IN_TARGET, DraftTable, ModelTable, Profile

if TYPE_CHECKING:
    from specctl.models.onnx.runner import OnnxRunner


@dataclass(frozen=True, slots=True)
class Graph:
    """A model's graph that is there.

    Attributes:
        table: the model's.
        role: the table's key in the profile.
        path: of the graph.
        key: its name in the store.
        kept: what is known of the model.
        no_trees: as of `OnnxRunner`.
        ids: of the columns of its logits; None where a column is an id.
    """

    table: ModelTable
    role: str
    path: Path
    key: str
    kept: Kept
    no_trees: str | None
    ids: DraftVocabulary | None

    @classmethod
    def find(cls, table: ModelTable, role: str, asked: bool, ids: DraftVocabulary | None) -> "Graph | None":
        """That of a model; None if there is none, or not what must be known of the model.

        Args:
            table, role: the model's.
            asked: whether it is to read trees.
            ids: as of a graph.

        Raises:
            ModelError: there is no such model.
        """
        checkpoint = locate(table, role)
        stated = next((dtype for name in DTYPES if (dtype := checkpoint.settings().get(name)) is not None), "float32")
        if "float32" not in (table.dtype, stated):
            return None  # without reading its weights: graphs are of float32
        if "pard_token" in checkpoint.settings():
            return None  # what is kept does not say that it drafts in parallel
        if (files := model_hash(checkpoint, table.trust_remote_code)) is None:
            return None
        store, form = Store(cache_folder()), rounding(table, "onnx")
        for trees in dict.fromkeys((asked, False)):
            key = key_of_files(files, "cpu", "float32", form, trees=trees, vocabulary=ids)
            kept = Kept.read(store.facts(key))
            # Where trees are asked for, a graph without is the one to take only if the model cannot read them.
            if kept is None:
                continue
            no_trees = no_tree_graph(kept.everything, "cpu", form) if asked else CHAINS
            if trees == (no_trees is None) and (path := store.find(key)) is not None:
                return cls(table, role, path, key, kept, no_trees, ids)
        return None

    def is_faster(self, threads: int | None) -> bool:
        """Whether `automatic_runner` would take it, for torch's passes take longer."""
        return Times(Store(cache_folder()).times(self.key)).onnx_is_faster(threads)

    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer, without transformers where that adds nothing."""
        whole = cache(partial(_whole_tokenizer, self.table, self.role))
        return whole() if self.kept.spelling is None else BareTokenizer(self.kept.spelling, whole)

    def runner(self, vocabulary: int, threads: Set[int]) -> "OnnxRunner":
        """A runner of the graph, as `build_onnx_runner` opens it, with one of some numbers of threads."""
        from specctl.models.onnx.runner import Opening

        form = rounding(self.table, "onnx")
        opening = Opening(HOST, vocabulary, self.kept.context, form, self.no_trees, self.ids)
        return opening.fastest(self.path, self.kept.weight_bytes, threads)


def _whole_tokenizer(table: ModelTable, role: str) -> Tokenizer:
    from specctl.models.loading.model import load_tokenizer

    return load_tokenizer(table, role=role)


def kept_pair(
    profile: Profile,
    settings: EngineSettings,
    progress: Callable[[str], None] = lambda _: None,
    *,
    with_predictors: bool = True,
) -> Pair | None:
    """The pair of a profile, if all its models have a graph that is there: the short way of `load_pair`.

    Its texts and its messages are those of the long way. It has no `Pair.models` and no predictors.

    Args:
        profile: names the models.
        settings: how forward passes run.
        progress: called with the name of each model before it is opened.
        with_predictors: whether those that the profile names are wanted, which takes the long way.

    Returns:
        None where a model has no graph yet, where anything is asked for that takes a model itself, and where the long
        way has an error to tell.
    """
    began = CoreTime.now()
    levels = profile.draft.levels if profile.draft is not None else ()
    if with_predictors and any(level.head is not None for level in levels):
        return None
    roles = ["target", *(".".join(["draft"] * depth) for depth in range(1, len(levels) + 1))]
    tables = [(table, role) for table, role in zip((profile.target, *levels), roles, strict=True) if table.has_files]
    if settings.check or not all(_ordinary(table) for table, _ in tables):
        return None
    if settings.engine == "onnx":
        if find_spec("onnxruntime") is None:
            return None
    elif settings.engine != "auto" or not _automatic(settings, [table for table, _ in tables]):
        return None
    number = known.number if (known := decided(profile.threads)) is not None else None
    try:
        graphs: list[Graph] = []
        for table, role in tables:
            graph = Graph.find(table, role, settings.trees, _ids(table, graphs))
            if graph is None or (settings.engine == "auto" and not graph.is_faster(number)):
                return None
            graphs.append(graph)
        return _opened(profile, settings, graphs, Places(levels), began, progress) if _enough(profile, graphs) else None
    except Exception as error:
        if isinstance(error, ModelError | OSError | RuntimeError) or of_onnxruntime(error):
            return None
        raise


def _ids(table: ModelTable, above: Sequence[Graph]) -> DraftVocabulary | None:
    """The ids that a draft can write; None for all."""
    if not isinstance(table, DraftTable) or table.tokens is None:
        return None
    target, tokenizer = above[0].kept, above[0].tokenizer()
    vocabulary = check_vocabulary(tokenizer, tokenizer, target.rows, target.rows)
    return draft_vocabulary(table, tokenizer, vocabulary, eos_of(target, tokenizer))


def eos_of(target: Kept, tokenizer: Tokenizer) -> frozenset[int]:
    """Every id that ends a sequence."""
    return frozenset({*target.eos, *([tokenizer.eos_token_id] if isinstance(tokenizer.eos_token_id, int) else [])})


def _automatic(settings: EngineSettings, tables: Sequence[ModelTable]) -> bool:
    """Whether ``auto`` could be onnxruntime, as far as settings and the sizes of files tell."""
    if settings.compile is True or any(table.quantize is not None for table in tables):
        return False
    return packages_there() and cache_folder().exists()


def _ordinary(table: ModelTable) -> bool:
    """Whether a table asks for a model in one piece on the CPU, in a form that onnxruntime has."""
    if table.quantize is not None and rounding(table, "onnx") is None:
        return False
    if isinstance(table, DraftTable) and table.tokens == "auto":  # which asks for the model's sizes
        return False
    if table.model == IN_TARGET or table.dtype not in ("auto", "float32"):
        return False
    if table.shards is not None or table.max_memory is not None:
        return False
    # ``auto`` is the first accelerator.
    return table.device == "cpu" or (table.device == "auto" and accelerator() is None)


def _enough(profile: Profile, graphs: Sequence[Graph]) -> bool:
    """Whether what is kept of models tells all that is asked of them."""
    import psutil  # type: ignore[import-untyped]

    target = graphs[0].kept
    if (
        target.checked
        or (profile.generation_config and target.repetition_penalty is None)
        or (profile.deterministic and not target.everything)
    ):
        return False
    return bool(sum(graph.kept.weight_bytes for graph in graphs) <= psutil.virtual_memory().available)


def _opened(
    profile: Profile,
    settings: EngineSettings,
    graphs: Sequence[Graph],
    places: Places,
    began: CoreTime | None,
    progress: Callable[[str], None],
) -> Pair:
    above = in_a_row(len(places.drafts))
    target = graphs[0].kept
    tokenizer = graphs[0].tokenizer()
    vocabulary = check_vocabulary(tokenizer, tokenizer, target.rows, target.rows)
    maps: list[TokenMap | None] = [None]
    for place, graph in enumerate(graphs[1:], start=1):
        same = graph.kept.spelling is not None and graph.kept.spelling == target.spelling
        own = tokenizer if same else graph.tokenizer()
        needs_law = place + 1 < len(graphs)  # for one below it
        maps.append(token_map(graph.table, tokenizer, own, vocabulary, graph.kept.rows, needs_law=needs_law))
        if (tokens := maps[-1]) is not None:
            settings.notice(notice_of(graph.role, graph.table, tokens))
    threads = choose(profile.threads, (), vocabulary, began)
    tries = decided(profile.threads) is None and sum(graph.kept.weight_bytes for graph in graphs) <= LARGE
    numbers = {1, threads.free} if tries else {threads.number}
    runners: list[Slot] = []
    for graph, tokens in zip(graphs, maps, strict=True):
        progress(graph.table.model)
        runner: Slot = graph.runner(vocabulary if tokens is None else tokens.draft.whole, numbers)
        runners.append(runner if tokens is None else own_text_runner(runner, tokens))
    for upper, lower in pairwise(graphs):
        if told := large_draft((upper.role, upper.kept.parameters), (lower.role, lower.kept.parameters)):
            settings.notice(told)
    threads = _of_graph(threads, runners[0], tries)
    if settings.deterministic:
        runners[0] = FixedWidthRunner(runners[0])
    if profile.generation_config and (penalty := target.repetition_penalty) is not None and penalty != 1:
        rule = repetition_rule(penalty, vocabulary)
        runners = [each if each.writes_text else RuledRunner(each, rule) for each in runners]
    pair = Pair(
        target=runners[0],
        drafts=tuple(runners[1:]),
        tokenizer=tokenizer,
        eos=eos_of(target, tokenizer),
        context=runners[0].context,
        models=(),
        named_predictors=tuple({} for _ in runners[1:]),
        above=tuple(places.above(above)),
        threads=threads,
        vocabulary=vocabulary,
    )
    whole = places.filled(pair, above, vocabulary)
    tell_torch(threads.number)  # which a registered drafter may have imported
    return whole


def _of_graph(threads: Threads, target: Slot, free: bool) -> Threads:
    """The number of threads of the target's graph; torch's own has nothing to do with it where it is ``free``."""
    found = threads.by_engine(target)
    if not free or found is not threads:
        return found
    return replace(threads, number=threads_of(target), reason="as its graph is small")
