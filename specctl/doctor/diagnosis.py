"""Facts and problems of a profile's models, found without loading their weights. Sizes are bytes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specctl.doctor.gguf_facts import (
    CACHE,
    GgufFacts,
    gguf_estimate,
    gguf_facts,
    gguf_placement,
    passes_text,
)
from specctl.errors import AbsentError, ModelError, ProfileError, SpecctlError
from specctl.models.draft_heads.checkpoint import DraftHeadCheckpoint
from specctl.models.files.checkpoint import ITEM_BYTES, Checkpoint, locate, terms_of
from specctl.models.files.gguf_header import read_header
from specctl.models.files.gguf_names import HubFiles, find, quantisation
from specctl.models.files.skeleton import skeleton
from specctl.models.files.token_counts import TokenCounts, shipped_texts
from specctl.models.files.tokenizer import Tokenizer, known_ids, one_tokenizer
from specctl.models.llama.library import require_llama
from specctl.models.loading.assembly import large_draft
from specctl.models.loading.file_models import require_plain, rounded_graph, runs_on_llama
from specctl.models.loading.model import load_tokenizer, loading_order
from specctl.models.loading.model_check import check_model, stored_check
from specctl.models.loading.model_runners import model_runner
from specctl.models.loading.pair_members import PairMember, no_embeddings
from specctl.models.loading.vocabularies import counts_for, draft_vocabulary, notice_of, token_map, trained_on_few
from specctl.models.onnx.engine import rounded_bytes
from specctl.models.onnx.store import PACKED, integer_products
from specctl.models.passes.watching import LAST, decoder_layers
from specctl.models.passes.weights import Where
from specctl.models.placing.absent import bytes_by_name, lacking_devices, size_text
from specctl.models.placing.engine_table import engine_named
from specctl.models.placing.memory import DeviceMemory, Estimate, device_memory, estimate, working_bytes
from specctl.models.placing.model_config import ModelConfig, generation_config, is_plain, require_supported_rules
from specctl.models.placing.placement import (
    STRATEGIES,
    Placement,
    after,
    dtype_on,
    kind_of_device,
    named_devices,
    place,
    placed,
    placement_advice,
    weighed,
)
from specctl.models.placing.quantization import form_of
from specctl.models.placing.torch_gguf import stays_packed
from specctl.models.predictors.predictor_checkpoint import locate_predictor, mismatch, on_hub, require_kind
from specctl.models.running.context import ENDLESS
from specctl.models.running.engines import EngineSettings, require_fixed_width
from specctl.models.running.text_rules import prompt_rules_in, rules_in
from specctl.models.running.transforms import PARD_TOKENS
from specctl.models.translation import TokenMap, agreement
from specctl.plugins import DRAFTER, DRAFTERS
from specctl.policies import POLICIES
from specctl.printable import gib
from specctl.profile.schema import DraftTable, ModelTable, Profile
from specctl.profile.wording import short_name
from specctl.versions import versions

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from specctl.models.llama.model import LlamaModel

NOT_FOUND = "not found"
CACHE_TOKENS = 4096  # Tokens of the KV cache for which memory should suffice besides the weights
MOSTLY = 0.5  # Below this share of quantised weights, the report says that most weights stay unquantised


@dataclass(frozen=True, slots=True)
class Overlap:
    """What a draft with another tokenizer shares with its target."""

    shared: int  # the number of the target's tokens in its vocabulary
    whole: int  # the number of the target's tokens
    # the share of shared ones among the target's tokens of the shipped prompts; an upper bound of the acceptance rate
    # where the draft writes shared tokens
    used: float
    # the share of these tokens reproduced if the draft writes the prompts as text; an upper bound if it writes text
    agreed: float
    writes_text: bool  # whether it writes text

    def __str__(self) -> str:
        shared = f"{self.used:.1%} of the tokens in the prompts that come with specctl are shared"
        written = f"{self.agreed:.1%} are reproduced from text"
        first, other, name = (written, shared, "intersection") if self.writes_text else (shared, written, "text")
        return f'{first}, and no more of a draft can be accepted ({other}: draft.vocabulary = "{name}")'

    @classmethod
    def of(cls, tokens: TokenMap, target: Tokenizer) -> "Overlap":
        ids, texts = tokens.vocabulary.ids.tolist(), shipped_texts(target)
        agreed = agreement(tokens, texts)
        return cls(len(ids), tokens.target.whole, TokenCounts.of(texts).covered(ids), agreed, tokens.writes_text)


@dataclass(frozen=True, slots=True)
class RoundedGraph:
    """The graph of a model whose weights onnxruntime rounds."""

    form: str  # how they are rounded
    stored: bool  # whether it is stored; it is made at first use
    # why torch rounds and runs the model instead: its configuration, or what an earlier run found
    refused: str | None
    bytes: int  # its size on disk, and in memory without caches; about, if it is not stored


@dataclass(slots=True)
class ModelFacts:
    """One model or draft head of the profile; unknown facts are None or empty."""

    key: str
    model: str
    found: str = NOT_FOUND
    folder: str | None = None
    adapter: str | None = None  # the name of a LoRA adapter, its rank and the model that it was trained on
    architecture: str | None = None
    parameters: int | None = None
    context: int | None = None
    vocabulary: int | None = None
    weights_by_dtype: dict[str, int] = field(default_factory=dict)
    cache_per_1k_tokens: int | None = None
    eos_ids: list[int] = field(default_factory=list)
    rules: list[str] = field(default_factory=list)
    licence: str | None = None
    gated: str | None = None
    dtype: str | None = None
    quantize: str | None = None
    gguf: GgufFacts | None = None  # only of a GGUF file
    graph: RoundedGraph | None = None  # only where onnxruntime rounds its weights
    devices: dict[str, int] = field(default_factory=dict)
    # the kind of a draft head; ``reads_layers`` are the layers of its verifier whose states it reads, and
    # ``trained_on`` is the model that its files name
    draft_head: str | None = None
    reads_layers: list[int] = field(default_factory=list)
    # the number of tokens a draft can write, if limited; ``covered`` is their share of the counted tokens, ``covers``
    # the expected share of other texts
    draft_tokens: int | None = None
    covered: float | None = None
    covers: float | None = None
    output_share: float = 0.0  # the output layer's share of the weights read in a pass
    trained_on: str | None = None
    without_files: bool = False  # whether it is a lookup or registered by another distribution
    overlap: Overlap | None = None  # of a draft with another tokenizer than the target's
    # whether a target is known to compute the same for a text whatever passes it is read in
    checked: bool | None = None
    about: int | None = None  # bytes in 16 bits of a model that is not here, by its name
    # the number of layers on each device; for a model that is split within layers, the number of layers that the device
    # has a part of. Empty where it was not asked.
    layers: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Problem:
    """A reason why the models cannot run, and how to fix it."""

    where: str  # names the models, such as ``draft``
    # message, hint: those of the error
    message: str
    hint: str
    absent: bool = False  # whether files are missing and cannot be downloaded now


@dataclass(slots=True)
class Diagnosis:
    """The whole report. Models with ``problems`` cannot run; ``advice`` does not prevent a run.

    ``here`` says whether ``devices`` are this machine's.
    """

    versions: dict[str, str]
    devices: list[DeviceMemory]
    models: list[ModelFacts] = field(default_factory=list)
    shared_vocabulary: int | None = None
    problems: list[Problem] = field(default_factory=list)
    advice: list[str] = field(default_factory=list)
    here: bool = True

    @property
    def ready(self) -> bool:
        return not self.problems

    @property
    def placed(self) -> bool:
        """Whether every model has a placement; its weights or tokenizer may still be missing."""
        return all(one.without_files or one.draft_head is not None or one.dtype is not None for one in self.models)

    def add(self, where: str, error: SpecctlError, *, absent: bool = False) -> None:
        """Add an error to the problems, unless it is there already."""
        problem = Problem(where, error.message, error.hint, absent or isinstance(error, AbsentError))
        if problem not in self.problems:
            self.problems.append(problem)


def diagnose(profile: Profile, *, tries: bool = False, machine: Sequence[DeviceMemory] | None = None) -> Diagnosis:
    """Examine every model of a profile: its files, the devices it would be placed on, its tokenizer and its head.

    Args:
        profile: names the models.
        tries: whether to load a target of an unknown family and check that its results do not depend on how a text is
            split into passes. Only done if its weights are here and no earlier check is stored.
        machine: the devices of another machine; None for this one.
    """
    report = Diagnosis(versions(), device_memory() if machine is None else [*machine], here=machine is None)
    return _Examination(profile, report).made(tries=tries)


class _Examination:
    """The work of `diagnose`: fills in a report, the lowest draft first, in the order of loading.

    Args:
        profile: names the models.
        report: has devices and no models yet.
    """

    def __init__(self, profile: Profile, report: Diagnosis) -> None:
        self.profile, self.report, self.free = profile, report, report.devices
        self.tables = dict(profile.models)
        self.members = {role: PairMember(role, table) for role, table in self.tables.items()}
        self.facts = {
            role: ModelFacts(role, one.model, without_files=not one.has_files) for role, one in self.tables.items()
        }
        self.opened: dict[str, LlamaModel] = {}  # the vocabularies of the models that llama.cpp runs, by role
        report.models += self.facts.values()

    def made(self, *, tries: bool) -> Diagnosis:
        report = self.report
        report.advice += [f"{why}." for why in (*POLICIES.broken.values(), *DRAFTERS.broken.values())]
        try:
            engine_named(self.profile.engine).require()
        except ModelError as error:
            report.add("engine", error)
        roles = loading_order(self.tables)
        sizes = bytes_by_name(self.tables.items())
        for role, upper in zip(roles, [*roles[1:], None], strict=True):
            try:
                self._examine(role, upper)
            except ModelError as error:
                report.add(role, error)
                if isinstance(error, AbsentError):
                    self.facts[role].about = None if (size := sizes.get(role)) is None else round(size)
                    here = (device.name for device in report.devices)
                    report.advice += lacking_devices([(role, self.tables[role])], here)
        tokenizers = self._tokenizers()
        self._compare(tokenizers)
        self._note_short_contexts()
        for role in roles:
            if "target" in tokenizers:
                self._examine_tokens(role, tokenizers["target"])
        for role, upper in pairwise(roles):
            self._examine_predictor(role, upper)
        if not report.here:
            room = sum(device.free for device in report.devices if device.name != "cpu") or report.devices[-1].free
            report.advice += [
                f"By its name {one.model} takes about {size_text(one.about)} in 16 bits; --memory describes "
                f"{size_text(room)}."
                for one in report.models
                if one.about is not None
            ]
            if report.placed:
                report.advice.append("All weights fit on the devices that --memory describes.")
        elif report.ready:
            try:
                self._check_target(tries=tries)
            except ModelError as error:
                report.models[0].checked = None
                report.add("target", error)
        return report

    def _examine(self, role: str, upper: str | None) -> None:
        """Examine one model, which drafts for ``upper``."""
        table, facts = self.tables[role], self.facts[role]
        if table.is_lookup:
            facts.found = "copies from the text"
        elif table.is_registered:
            facts.found = f"of {DRAFTERS.origin(table.model.removeprefix(DRAFTER).partition(':')[0])}"
        else:
            self._require_here(role, table, facts)
            member = self.members[role].located(None if upper is None else self.members[upper])
            checkpoint = member.checkpoint
            assert checkpoint is not None, "it was located"
            self.members[role] = member
            facts.found = {"embedded": "ships with specctl", "folder": "local folder", "file": "local file"}.get(
                checkpoint.source, "cached" if checkpoint.has_weights() else "on the hub"
            )
            facts.licence, facts.gated = terms_of(checkpoint)
            if member.head is not None:
                facts.draft_head = member.head.kind
                assert upper is not None, "the target is not a draft head"
                self._examine_head(member, member.head, upper, facts)
            elif checkpoint.weights is None:
                self._examine_model(member, checkpoint, facts)
            else:
                self._examine_gguf(member, checkpoint, checkpoint.weights, facts)

    def _require_here(self, role: str, table: ModelTable, facts: ModelFacts) -> None:
        """Raise an AbsentError for a GGUF file that is on the hub alone: its facts are in the file itself."""
        if isinstance(found := find(table.model, role, table.revision), HubFiles):
            facts.found, size = "on the hub", sum(found.sizes.values())
            facts.weights_by_dtype = {quantisation(next(iter(found.sizes))): size}
            raise AbsentError(
                f"The {role} model {table.model!r} is on the hub and not on this machine: {size_text(size)}.",
                f"A run downloads it, and so does `{found.command}`; doctor reads its header then.",
            )

    def _examine_gguf(self, member: PairMember, checkpoint: Checkpoint, file: Path, facts: ModelFacts) -> None:
        """Examine a GGUF file: its header, then on llama.cpp, else as other models are."""
        (header, _), engine, table = read_header(file).split(), self.profile.engine, member.table
        need, on_llama = gguf_estimate(header), runs_on_llama(checkpoint, table, engine)
        facts.folder, facts.architecture = str(file), header.architecture
        facts.parameters, facts.context, facts.weights_by_dtype = header.parameters, header.context, header.sizes
        facts.vocabulary, facts.eos_ids = header.values.get("tokenizer.ggml.tokens"), header.end_ids
        facts.cache_per_1k_tokens = need.cache_bytes(CACHE, 1000)
        on_torch = not on_llama and stays_packed(checkpoint, engine, kind_of_device(table, self.free))
        facts.gguf = gguf_facts(header, on_llama=on_llama, on_torch=on_torch)
        if not on_llama:
            self._examine_model(member, checkpoint, facts)
            facts.weights_by_dtype = header.sizes
            return
        require_llama()
        require_plain(checkpoint, table)
        from specctl.models.llama.model import LlamaModel
        from specctl.models.llama.width_trial import exact, kept_rounding

        model = self.opened[member.role] = LlamaModel.open(file, vocab_only=True)
        facts.vocabulary, facts.eos_ids = model.vocabulary, list(model.ends)
        if member.role == "target" and self.report.here:
            known, rounding = kept_rounding(file, threads=self.profile.threads, device=str(table.device))
            facts.gguf, facts.checked = replace(facts.gguf, passes=passes_text(known, rounding)), known
            if known:
                exact(file, rounding)
        placement = gguf_placement(table, need, self.free, member.role, here=self.report.here)
        facts.dtype, facts.devices = "as stored", placement.shares
        self._advise_on_memory(checkpoint, need, placement)
        self.free = after(self.free, placement)

    def _examine_model(self, member: PairMember, checkpoint: Checkpoint, facts: ModelFacts) -> None:
        table, report, engine = member.table, self.report, self.profile.engine
        facts.folder = str(checkpoint.folder)
        facts.adapter = None if checkpoint.adapter is None else checkpoint.adapter.summary
        config = ModelConfig.read(checkpoint, table.trust_remote_code)
        facts.architecture, facts.context, facts.vocabulary = config.architecture, config.context, config.vocabulary
        settings = generation_config(checkpoint)
        facts.eos_ids = sorted(_ids(config.eos if settings is None else getattr(settings, "eos_token_id", None)))
        member = member.inspected(self.free, engine)
        need = estimate(checkpoint, table.trust_remote_code, member.quantization)
        if member.role == "target" and self.profile.deterministic:
            require_fixed_width(skeleton(checkpoint, table.trust_remote_code))
        if member.role == "target" and self.profile.generation_config:
            require_supported_rules(checkpoint)
            rules = {} if settings is None else {**rules_in(settings), **prompt_rules_in(settings)}
            facts.rules = [f"{name} = {value}" for name, value in rules.items()]
        facts.parameters = need.parameters
        output = config.vocabulary * config.hidden_size
        facts.output_share = output / max(need.parameters - (0 if config.ties else output), output)
        facts.weights_by_dtype = _sizes(table, need, self.free)
        if need.unread and not report.here:  # the fit is known without them
            report.advice.append(f"{need.unread.message} Their size is known from its configuration.")
        elif need.unread:
            report.add(member.role, need.unread, absent=checkpoint.source == "hub")
        elif not checkpoint.has_weights():
            report.advice.append(f"{checkpoint} will be downloaded at first use: {gib(need.stored_bytes)}.")
        if table.shards is not None:
            report.advice += placement_advice(checkpoint, table, need, self.free, CACHE_TOKENS)
        packed = member.rounding == PACKED
        placement = placed(checkpoint, table, need, self.free, here=report.here and not packed)
        if packed:
            placement = replace(placement, dtype="float32")
        facts.dtype, facts.devices, facts.quantize = placement.dtype, placement.shares, table.quantize
        if not report.here or len(placement.shares) > 1:
            import torch

            model = skeleton(checkpoint, table.trust_remote_code).to(getattr(torch, placement.dtype))
            facts.layers = layer_places(model, placement)
        facts.cache_per_1k_tokens = need.cache_bytes(placement.dtype, 1000)
        if report.here and member.rounding is not None and set(placement.shares) == {"cpu"}:
            facts.graph = _rounded_graph(checkpoint, table, member.rounding, placement, need)
        self._advise_on_memory(checkpoint, need, placement)
        self.free = after(self.free, placement)

    def _advise_on_memory(self, checkpoint: Checkpoint, need: Estimate, placement: Placement) -> None:
        """Add advice about a model that fits but leaves little memory, or is larger than expected."""
        advice, engine = self.report.advice, self.profile.engine
        if need.quantization is not None and (share := need.quantization.weights / need.parameters) < MOSTLY:
            advice.append(
                f"{checkpoint}: quantize covers {share:.0%} of its weights; embeddings, the output layer and what is "
                "not in linear layers of a size that fits stay as they are."
            )
        free = sum(device.free for device in self.free if device.name in placement.shares)
        room = free - sum(placement.shares.values())
        on_cuda = any(name.startswith("cuda") for name in placement.shares)
        others = {name for one in self.report.models for name in one.devices if one.key != checkpoint.role}
        first = on_cuda and not others & set(placement.shares)
        work = working_bytes(need, placement.dtype, CACHE_TOKENS, engine, on_cuda=on_cuda, first=first)
        if work > room:
            takes = "s, CUDA's context and working memory take" if on_cuda else "s takes"
            advice.append(
                f"{checkpoint} leaves {gib(room)} free, but the cache of {CACHE_TOKENS} token{takes} {gib(work)}: use "
                "short prompts or a device with more memory."
            )
        graph = self.facts[checkpoint.role].graph
        form = None if graph is None or graph.refused is not None else graph.form
        if form not in (None, PACKED) and (products := integer_products()) is not None:
            slow = f"{form} weights are unpacked in every pass: this processor has no integer products for onnxruntime"
            advice.append(f"{checkpoint}: {f'{form} weights are multiplied with {products}' if products else slow}.")
        making = int(engine_named(engine).making * need.weight_bytes(placement.dtype))
        if making > room:
            takes = f"making its graph for onnxruntime, once, takes up to {gib(making)}"
            advice.append(f"{checkpoint} leaves {gib(room)} free, but {takes}.")

    def _examine_head(self, member: PairMember, head: DraftHeadCheckpoint, upper: str, facts: ModelFacts) -> None:
        """Build a draft head next to its verifier's skeleton; heads on the hub are not downloaded."""
        from specctl.models.loading.draft_heads import needed

        member.inspected(self.free, self.profile.engine)
        facts.trained_on = head.verifier
        verifier, table, devices = self.tables[upper], member.table, self.free
        if head.verifier is not None and short_name(head.verifier) != short_name(verifier.model):
            self.report.advice.append(
                f"{head} was trained on {head.verifier}; the {upper} model here is {verifier.model}. The text stays "
                "the target's, but less of a draft may be accepted."
            )
        above = locate(verifier, upper)
        if above.weights is not None:
            if not head.in_target or not runs_on_llama(above, verifier, self.profile.engine):
                raise no_embeddings(head)
            _, layers = read_header(above.weights).split()
            need = gguf_estimate(layers)
            placement = gguf_placement(verifier, need, self.free, facts.key, here=self.report.here)
            facts.reads_layers, facts.context, facts.parameters = [LAST], layers.context, layers.parameters
            facts.dtype, facts.devices, facts.weights_by_dtype = "as stored", placement.shares, layers.sizes
            facts.cache_per_1k_tokens = need.cache_bytes(CACHE, 1000)
            return
        model = skeleton(above, verifier.trust_remote_code)
        if not head.local:
            self.report.advice.append(f"{head} will be downloaded at first use.")
            return
        network = head.network(model)
        facts.architecture, facts.context = type(network).__name__, network.context
        facts.reads_layers, facts.draft_tokens = list(network.layers), network.draft_vocabulary
        facts.vocabulary = model.config.get_text_config(decoder=True).vocab_size
        need = needed(network)
        if table.dtype == "auto":  # a head is loaded in its verifier's dtype
            weights = weighed(above, verifier, devices, self.profile.engine)
            dtype = dtype_on(verifier, weights, kind_of_device(verifier, devices))
            table = table.model_copy(update={"dtype": dtype})
        placement = place(table, need, devices, head.checkpoint.role)
        facts.parameters, facts.dtype, facts.devices = need.parameters, placement.dtype, placement.shares
        facts.weights_by_dtype = {name: need.weight_bytes(name) for name in ITEM_BYTES if name != "float64"}
        facts.cache_per_1k_tokens = need.cache_bytes(placement.dtype, 1000)

    def _models(self) -> dict[str, Checkpoint]:
        """The files of the models found, by role, without draft heads, the lowest draft first."""
        found = ((one.role, one.checkpoint) for one in loading_order(self.members.values()) if one.head is None)
        return {role: checkpoint for role, checkpoint in found if checkpoint is not None}

    def _tokenizers(self) -> dict[str, Tokenizer]:
        """The readable tokenizers by role; their end-of-sequence ids are added to the facts."""
        found: dict[str, Tokenizer] = {}
        files = self._models()
        # A draft with a limited vocabulary counts tokens with the target's whole tokenizer.
        few = any(isinstance(table, DraftTable) and table.tokens is not None for table in self.tables.values())
        one = None if few or any(each.weights for each in files.values()) else one_tokenizer([*files.values()])
        for role, checkpoint in files.items():
            try:
                if (model := self.opened.get(role)) is not None:
                    from specctl.models.llama.vocabulary import LlamaTokenizer

                    found[role] = LlamaTokenizer(model)
                elif not runs_on_llama(checkpoint, self.tables[role], self.profile.engine):
                    found[role] = load_tokenizer(self.tables[role], role=role) if one is None else one
            except ModelError as error:
                self.report.add(role, error)
        for role, tokenizer in found.items():
            self.facts[role].eos_ids = sorted({*self.facts[role].eos_ids, *_ids(tokenizer.eos_token_id)})
        return found

    def _compare(self, tokenizers: Mapping[str, Tokenizer]) -> None:
        """Compare each draft's tokenizer with the target's, and the models' sizes with each other."""
        report = self.report
        target, *drafts = [facts for facts in report.models if facts.draft_head is None and not facts.without_files]
        sizes = [target.vocabulary] if target.vocabulary and target.key in tokenizers else []
        for draft in drafts:
            if draft.key not in tokenizers or not sizes or not target.vocabulary or not draft.vocabulary:
                sizes = []
                break
            try:
                pair = tokenizers[target.key], tokenizers[draft.key]
                whole, table = known_ids(pair[0], target.vocabulary), self.tables[draft.key]
                needs_law = isinstance(table, DraftTable) and (table.draft or table.head) is not None
                tokens = token_map(table, *pair, whole, draft.vocabulary, needs_law=needs_law)
            except (ModelError, ProfileError) as error:
                report.add(f"target and {draft.key}", error)
                sizes = []
                break
            if tokens is None:
                sizes.append(whole)
            else:
                draft.overlap = Overlap.of(tokens, pair[0])
                report.advice.append(f"{notice_of(draft.key, table, tokens)}; {draft.overlap}.")
        if sizes and drafts and not any(draft.overlap for draft in drafts):
            report.shared_vocabulary = min(sizes)
        for larger, smaller in pairwise(report.models):
            if larger.parameters and smaller.parameters:
                sizes_of = (larger.key, larger.parameters), (smaller.key, smaller.parameters)
                report.advice += filter(None, [large_draft(*sizes_of)])

    def _note_short_contexts(self) -> None:
        """Add advice where a draft's context ends before that of the model it drafts for.

        A draft with another tokenizer is left out: it continues with the end of the text.
        """
        target, *drafts = self.report.models
        lowest = self._models().get(self.report.models[-1].key)
        parallel = lowest is not None and lowest.weights is None and "pard_token" in lowest.settings()
        masks = PARD_TOKENS - 1 if parallel else 0
        reached = ENDLESS if target.context is None else target.context
        for draft in drafts:
            if draft.context is None or draft.overlap is not None:
                continue
            holds = draft.context - (masks if draft is drafts[-1] else 0)
            if holds < reached:
                reached = holds
                end = "of any number" if target.context is None else f"of {target.context:,}"
                self.report.advice.append(
                    f"{draft.key} drafts until token {reached:,} {end}: its context ends there, and the text goes on "
                    "without it."
                )

    def _examine_tokens(self, role: str, tokenizer: Tokenizer) -> None:
        """Add the tokens that a draft can write to its facts, if its table limits them."""
        table, draft, target = self.tables[role], self.facts[role], self.report.models[0]
        if not isinstance(table, DraftTable) or table.tokens is None:
            return
        rows = max(tokenizer.get_vocab().values()) + 1
        whole = self.report.shared_vocabulary or min(rows, target.vocabulary or rows)
        try:
            if draft.draft_head is not None and draft.draft_tokens != draft.vocabulary:
                if table.tokens == "auto":
                    return
                raise trained_on_few(table.model, draft.draft_tokens or 0)
            ids = draft_vocabulary(table, tokenizer, whole, target.eos_ids, draft.vocabulary, draft.output_share)
            counts = counts_for(table, tokenizer, whole)
        except ModelError as error:
            self.report.add(f"{role}.tokens", error)
            return
        some = range(whole) if ids is None else ids.ids.tolist()
        draft.draft_tokens = len(some)
        draft.covered, draft.covers = counts.covered(some), counts.expected(some, whole)

    def _examine_predictor(self, role: str, upper: str) -> None:
        """Check that a draft's head exists, has the draft's hidden size, and was trained on the draft's weights.

        If the draft's policy does not use the head, its faults are only advice and its weights are not read.
        """
        table = self.tables[role]
        if not isinstance(table, DraftTable) or table.head is None:
            return
        if on_hub(table.head):
            self.report.advice.append(f"The acceptance head {table.head!r} will be downloaded at first use.")
            return
        needed = table.policy.setting.needs_predictor
        try:
            head = locate_predictor(table.head)
            require_kind(head, table.policy)
            draft = PairMember(role, table).located(self.members[upper])
            assert draft.checkpoint is not None, "it was located"
            if not needed:
                head.require_weights()
            elif draft.head is None:  # a draft head's state width is known only once it is built
                head.load(ModelConfig.read(draft.checkpoint, table.trust_remote_code).hidden_size)
            if draft.checkpoint.has_weights() and (reason := mismatch(head, draft.checkpoint)):
                raise ModelError(f"{reason}.", "Train a head on this draft with `specctl train-head`.")
        except ModelError as error:
            if not needed:
                self.report.advice.append(f"{error.message} {error.hint}")
            elif error.message not in {problem.message for problem in self.report.problems}:
                self.report.add(f"{role}.head", error)

    def _check_target(self, *, tries: bool) -> None:
        """Note whether the target's results are known not to depend on how a text is split into passes.

        If onnxruntime quantises the target, its graph is made too; if the graph cannot be used, the torch model is
        checked.

        Raises:
            ModelError: it does not, or cannot be loaded.
        """
        target, facts, table = self.members["target"], self.facts["target"], self.profile.target
        checkpoint = target.checkpoint
        assert checkpoint is not None, "a target without problems has files"
        assert facts.dtype is not None, "a target without problems has a place"
        if "target" in self.opened:
            return
        if not checkpoint.has_weights():
            facts.checked = False
            return
        kind = next(iter(facts.devices)).partition(":")[0]
        form = form_of(checkpoint, table, self.profile.engine, kind)
        known = stored_check(checkpoint, table, kind, facts.dtype, None if form is not None else table.quantize)
        if known is not None:
            known.require(table.model)
        ordinary = is_plain(checkpoint.settings()) and checkpoint.adapter is None and table.quantize is None
        facts.checked = known is not None and form is None
        if facts.checked or not tries or ordinary or table.splits:
            return
        loaded = target.inspected(device_memory(named_devices(table)), self.profile.engine).load()
        network = loaded.torch_model
        assert network is not None, "a target is not a draft head"
        check_model(network, loaded, network.vocabulary)
        if form is not None:
            as_run, _ = model_runner(loaded, network, network.vocabulary, EngineSettings.of(self.profile))
            if as_run is not network:
                check_model(as_run, loaded, as_run.vocabulary)
        facts.checked = True


def _rounded_graph(
    checkpoint: Checkpoint, table: ModelTable, form: str, placement: Placement, need: Estimate
) -> RoundedGraph:
    import torch

    where = Where(tuple(placement.shares), sum(placement.shares.values()))
    model = skeleton(checkpoint, table.trust_remote_code).to(getattr(torch, placement.dtype))
    path, refused = None, engine_named("onnx").why_not(model, where)
    if refused is None and checkpoint.has_weights():
        path, refused = rounded_graph(checkpoint, table, form)
    if path is None:
        return RoundedGraph(form, False, refused, need.stored_bytes if form == PACKED else rounded_bytes(model, form))
    return RoundedGraph(form, True, None, sum(file.stat().st_size for file in path.parent.iterdir()))


def _sizes(table: ModelTable, need: Estimate, devices: Sequence[DeviceMemory]) -> dict[str, int]:
    """Bytes of the weights by dtype. Weights that are or will be quantised count in quantised form only."""
    if need.quantised:
        return {"as stored": need.stored_bytes}
    if need.quantization is not None:
        dtype = dtype_on(table, need, kind_of_device(table, devices))
        return {need.quantization.name: need.weight_bytes(dtype)}
    return {dtype: need.weight_bytes(dtype) for dtype in ITEM_BYTES if dtype != "float64"}


def _ids(ids: int | list[int] | None) -> set[int]:
    return {ids} if isinstance(ids, int) else set(ids or ())


def layer_places(model: "PreTrainedModel", placement: Placement) -> dict[str, int]:
    """The number of layers on each device; for a model split within layers, the layers with a part on the device.

    ``model`` is a `skeleton` in the dtype of its placement.
    """
    layers = decoder_layers(model)
    name, count = next(name for name, part in model.named_modules() if part is layers), len(layers)
    devices = placement.devices
    if placement.sharded == "tensor":
        return dict.fromkeys(devices, count)
    if placement.sharded == "pipeline":
        least, more = divmod(count, len(devices))
        return {device: least + (number < more) for number, device in enumerate(devices)}
    where = placement.device_map
    if isinstance(where, str) and where in STRATEGIES:
        where = _accelerates(model, f"{name}.0", where, placement)
    elif isinstance(where, str):
        return {where: count}
    found: dict[str, int] = {}
    for number in range(count):
        layer = f"{name}.{number}"
        keys = [key for key in where if key == "" or layer == key or layer.startswith(f"{key}.")]
        inside = [key for key in where if key.startswith(f"{layer}.")]
        if keys or inside:
            device = where[max(keys, key=len) if keys else inside[0]]
            label = f"cuda:{device}" if isinstance(device, int) else str(device)
            found[label] = found.get(label, 0) + 1
    return found


def _accelerates(model: "PreTrainedModel", layer: str, strategy: str, placement: Placement) -> dict[str, Any]:
    """accelerate's device map for a strategy, computed as transformers does on loading."""
    import torch
    from accelerate import infer_auto_device_map  # type: ignore[import-untyped]
    from accelerate.utils import get_balanced_memory  # type: ignore[import-untyped]

    whole = [type(model.get_submodule(layer)).__name__]
    dtype = getattr(torch, placement.dtype)
    memory: dict[Any, Any] = dict(placement.max_memory or {})
    model.tie_weights()
    if strategy != "sequential":
        low = strategy == "balanced_low_0"
        memory = get_balanced_memory(model, memory, no_split_module_classes=whole, dtype=dtype, low_zero=low)
    found: dict[str, Any] = infer_auto_device_map(model, memory, no_split_module_classes=whole, dtype=dtype)
    return found
