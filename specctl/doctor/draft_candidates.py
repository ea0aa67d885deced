"""Candidates for a target's draft, found by configurations and headers of weight files."""

import shlex
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from threading import Thread
from typing import NamedTuple

from specctl.doctor.diagnosis import Diagnosis, Overlap
from specctl.doctor.expectations import Expectation, expectations, weight_reads
from specctl.doctor.gguf_facts import CACHE, gguf_estimate
from specctl.doctor.outlook import CACHED, LONGEST, pays_from, priced
from specctl.errors import ModelError, SpecctlError
from specctl.models.draft_heads.checkpoint import DraftHeadCheckpoint, draft_head, head_in_target, tensor_names
from specctl.models.files.checkpoint import ITEM_BYTES, Checkpoint, locate
from specctl.models.files.gguf_header import read_header
from specctl.models.files.gguf_names import files_in, names_here
from specctl.models.files.library_calls import hushed_hub
from specctl.models.files.skeleton import load_config
from specctl.models.files.tokenizer import Tokenizer, known_ids
from specctl.models.loading.assembly import LARGE_DRAFT
from specctl.models.loading.file_models import find_tokenizer, runs_on_llama
from specctl.models.loading.vocabularies import token_map
from specctl.models.placing.memory import Estimate
from specctl.models.placing.placement import weighed
from specctl.models.running.context import context_length
from specctl.profile.schema import IN_TARGET, LOOKUP, DraftTable, Engine, ModelTable, Profile
from specctl.profile.wording import short_name

DEEPEST = 2  # Levels of folders below a folder that are searched
PATIENCE = 4.0  # Seconds to wait for the hub's answer
MOST = 10  # The most models of the hub's answer that are named
EMBEDDED = ("embedded:mid", "embedded:draft", "embedded:eagle3", "embedded:dspark")


def models_here(target: Checkpoint, folders: Sequence[Path]) -> Iterator[str]:
    """Names of the models and draft heads on this machine, as commands accept them.

    ``target`` is left out; for one that ships with the package, the others that ship are named. ``folders`` are
    searched before the hub's cache. For a GGUF file also those near it and in the stores of other programs are named.
    """
    if target.source == "embedded":
        yield from (name for name in EMBEDDED if name != target.name)
    own = target.path.resolve()
    if target.weights is not None:
        near = dict.fromkeys(file for folder in (own.parent, *folders) for file in files_in(folder))
        yield from (str(file) for file in near if file.resolve() != own)
        yield from (name for name in names_here() if name != target.name)
    for folder in folders:
        yield from (str(found) for found in _models_in(folder, DEEPEST) if found.resolve() != own)
    from huggingface_hub.constants import HF_HUB_CACHE

    for folder in sorted(Path(HF_HUB_CACHE).glob("models--*")):
        name = folder.name.removeprefix("models--").replace("--", "/")
        if name != target.name and any(folder.glob("snapshots/*/config.json")):
            yield name


@contextmanager
def files_here_only() -> Iterator[None]:
    """Use only the hub's cache inside the block, without network requests."""
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def _models_in(folder: Path, depth: int) -> Iterable[Path]:
    inside: list[Path] = []
    with suppress(OSError):  # an unreadable folder counts as empty
        if (folder / "config.json").is_file():
            return (folder,)
        if depth:
            inside = sorted(inner for inner in folder.iterdir() if inner.is_dir() and not inner.name.startswith("."))
    return chain.from_iterable(_models_in(inner, depth - 1) for inner in inside)


def models_on_hub(target: Checkpoint) -> tuple[list[str], str | None]:
    """Names of hub models whose cards say that they derive from a target; else the reason for none.

    Waits no longer than `PATIENCE`.
    """
    from huggingface_hub.constants import HF_HUB_OFFLINE

    if target.source != "hub":
        return [], "the hub was not asked: the target is not one of its models"
    if HF_HUB_OFFLINE:
        return [], "the hub was not asked: HF_HUB_OFFLINE is set"
    found: list[str] = []
    failed: list[str] = []

    def ask() -> None:
        from huggingface_hub import HfApi

        try:
            with hushed_hub():
                some = HfApi().list_models(filter=f"base_model:{target.name}", sort="downloads", limit=MOST)
                found.extend(model.id for model in some)
        except Exception as error:  # all failures are treated alike
            failed.append(type(error).__name__)

    asking = Thread(target=ask, daemon=True)
    asking.start()
    asking.join(PATIENCE)
    if asking.is_alive():
        return [], f"the hub did not answer within {PATIENCE:.0f} seconds"
    if failed:
        return [], f"the hub cannot be reached ({failed[0]})"
    return found, None if found else f"the hub names no model that was made from {target.name}"


ITS = "the target's"


@dataclass(frozen=True, slots=True)
class DraftCandidate:
    """A model, draft head or lookup that could draft for a target."""

    model: str  # its name for ``--draft``
    kind: str  # what it is, in words
    parameters: int | None  # the number of weights; None for a lookup, and if unknown
    tokens: str  # how its tokenizer relates to the target's, in words
    cost: float  # bytes read in a draft step over those of a target pass, with `CACHED` tokens in the caches
    pays_from: float | None  # the break-even acceptance rate at this cost; None if no rate is high enough
    full: int  # the shorter of both contexts, in tokens
    pays_from_full: float | None  # `pays_from` with that number of tokens in the caches
    command: str  # what to run next


@dataclass(frozen=True, slots=True)
class DraftSearch:
    """What was found."""

    candidates: list[DraftCandidate]  # those with the target's tokenizer first, and among them those that pay earliest
    left_out: dict[str, str]  # by name, why a local model is not a candidate
    on_hub: list[str]  # names of models on the hub that may be candidates
    hub: str | None  # why the hub named none; None if it did
    compare: list[str]  # commands that compare the first candidates that are models or heads; empty for fewer than two


def find_drafts(
    profile: Profile, report: Diagnosis, folders: Sequence[Path], given: Sequence[str] | None = None
) -> DraftSearch:
    """Look for drafts for a profile's target.

    Args:
        profile: without a draft.
        report: its diagnosis, without problems.
        folders: searched besides the hub's cache.
        given: the arguments that name this target in a command, with its settings; None for its name alone.
    """
    target = _Target.of(profile, report, ["--target", profile.target.model] if given is None else given)
    found = [target.candidate(LOOKUP, "copies from the text", None, ITS, 0, 0, None)]
    left_out: dict[str, str] = {}
    try:
        head_in_target(target.files, "draft")
        found.append(target.own_layers())
    except ModelError:
        pass
    for name in dict.fromkeys(models_here(target.files, folders)):
        try:
            with files_here_only():
                one = target.judged(name)
        except SpecctlError as error:
            left_out[name] = error.message
            continue
        except Exception as error:  # an unreadable folder must not hide the others
            left_out[name] = f"it cannot be read ({type(error).__name__}: {error})"
            continue
        if isinstance(one, str):
            left_out[name] = one
        else:
            found.append(one)
    found.sort(key=lambda one: (one.pays_from is None, one.tokens != ITS, one.pays_from or 0.0, one.cost))
    hub, why = models_on_hub(target.files)
    here = {*left_out, *(one.model for one in found)}
    return DraftSearch(found, left_out, [name for name in hub if name not in here], why, [*_compared(target, found)])


def _compared(target: "_Target", found: Sequence[DraftCandidate]) -> Iterator[str]:
    models = [one.model for one in found if one.model != LOOKUP]
    if len(models) < 2:
        return
    name, first, second = shlex.quote(target.name), *map(shlex.quote, models[:2])
    yield f"specctl profiles new --target {name} --draft {second} -o second.toml"
    yield f"specctl calibrate {target.given} --draft {first} --against second.toml -o fastest.toml"


class _Sizes(NamedTuple):
    """What a model's configuration says, or the header of its GGUF file."""

    rows: int  # of its output layer
    hidden: int  # width of its states
    context: int | None  # in tokens

    @classmethod
    def of(cls, files: Checkpoint, table: ModelTable, engine: Engine) -> "_Sizes":
        """Raises ModelError if the files cannot be read."""
        if files.weights is not None and runs_on_llama(files, table, engine):
            header = read_header(files.weights)
            return cls(header.values["tokenizer.ggml.tokens"], header.count("embedding_length"), header.context)
        config = load_config(files, table.trust_remote_code).get_text_config(decoder=True)
        return cls(config.vocab_size, config.hidden_size, context_length(config))


@dataclass(frozen=True, slots=True)
class _Target:
    name: str
    given: str
    files: Checkpoint
    expected: Expectation
    profile: Profile
    report: Diagnosis
    tokenizer: Tokenizer
    vocabulary: int
    hidden: int

    @classmethod
    def of(cls, profile: Profile, report: Diagnosis, given: Sequence[str]) -> "_Target":
        files, (expected, *_) = locate(profile.target, "target"), expectations(profile, report)
        tokenizer = find_tokenizer(files, profile.target, profile.engine)
        sizes = _Sizes.of(files, profile.target, profile.engine)
        name, flags = profile.target.model, shlex.join(given)
        vocabulary = known_ids(tokenizer, sizes.rows)
        return cls(name, flags, files, expected, profile, report, tokenizer, vocabulary, sizes.hidden)

    @property
    def output_bytes(self) -> int:
        """Bytes of the target's output layer."""
        if self.files.weights is not None:
            return read_header(self.files.weights).output_bytes
        return self.vocabulary * self.hidden * ITEM_BYTES[self.expected.dtype or "float32"]

    def candidate(
        self,
        model: str,
        kind: str,
        parameters: int | None,
        tokens: str,
        reads: int,
        cache: int,
        context: int | None,
        *,
        blocks: bool = False,
    ) -> DraftCandidate:
        """Price a candidate. ``reads`` are the weight bytes read in a step, ``cache`` its KV cache's bytes per token.

        ``context`` is the number of tokens that it holds, None for any number; ``blocks`` is whether a step writes a
        whole draft. For the other arguments see `DraftCandidate`.
        """
        own = self.expected
        full = min(own.context, context or own.context)

        def pays(cached: int) -> float | None:
            passes = [float(weights + own.cache * cached) for weights in own.reads[: LONGEST + 1]]
            return pays_from(priced(float(reads + cache * cached), passes, blocks=blocks))

        cost = (reads + cache * CACHED) / (own.reads[0] + own.cache * CACHED)
        where = f"{self.given} --draft {shlex.quote(model)}"
        command = f"specctl calibrate {where} -o fastest.toml"
        if model == LOOKUP:
            command = f"specctl bench {where} --policy none --policy cost-optimal"
        return DraftCandidate(model, kind, parameters, tokens, cost, pays(CACHED), full, pays(full), command)

    def own_layers(self) -> DraftCandidate:
        """The target's own MTP layer; a step reads about one decoder layer and the output layer."""
        own, kind = self.expected, "the target's own multi-token prediction layer"
        if self.files.weights is not None:
            _, layers = read_header(self.files.weights).split()
            reads, cache = layers.read_bytes(1) + self.output_bytes, gguf_estimate(layers).cache_bytes(CACHE, 1)
            return self.candidate(IN_TARGET, kind, layers.parameters, ITS, reads, cache, None)
        layer = max(0, own.reads[0] - self.output_bytes) // max(1, own.layers)
        cache = own.cache // max(1, own.layers)
        return self.candidate(IN_TARGET, kind, None, ITS, layer + self.output_bytes, cache, None)

    def judged(self, name: str) -> DraftCandidate | str:
        """Judge a model: a candidate, or the reason against it. Raises ModelError or ProfileError if it cannot be a
        draft.
        """
        table = DraftTable(model=name)
        files = locate(table, "draft")
        if (head := draft_head(files)) is not None:
            return self._head(head)
        need = self._need(files, table)
        larger = next((one.parameters for one in self.report.models if one.parameters), None)
        if larger and need.parameters > LARGE_DRAFT * larger:
            return f"it has {need.parameters / larger:.0%} of the target's parameters"
        own = find_tokenizer(files, table, self.profile.engine)
        sizes = _Sizes.of(files, table, self.profile.engine)
        shared = token_map(table, self.tokenizer, own, self.vocabulary, sizes.rows)
        tokens = ITS if shared is None else f"another than the target's: it {shared.summary}; "
        if shared is not None:
            tokens += str(Overlap.of(shared, self.tokenizer))
        reads, cache = self._step(files, table, need)
        return self.candidate(name, "model", need.parameters, tokens, reads, cache, sizes.context)

    def _need(self, files: Checkpoint, table: ModelTable) -> Estimate:
        """The memory that a draft needs; of a GGUF file as its header says, which is read at once."""
        if files.weights is not None:
            return gguf_estimate(read_header(files.weights))
        return weighed(files, table, self.report.devices, self.profile.engine)

    def _step(self, files: Checkpoint, table: ModelTable, need: Estimate) -> tuple[int, int]:
        """Bytes of weights that a draft's pass over one token reads, and of its cache for a token."""
        if files.weights is not None:
            if runs_on_llama(files, table, self.profile.engine):
                return read_header(files.weights).read_bytes(1), need.cache_bytes(CACHE, 1)
            need = weighed(files, table, self.report.devices, self.profile.engine)
        dtypes = (need.stored_dtype, self.report.models[0].dtype, "float32")
        dtype = next(name for name in dtypes if name in ITEM_BYTES)
        return weight_reads(files).bytes(need, dtype), need.cache_bytes(dtype, 1)

    def _head(self, head: DraftHeadCheckpoint) -> DraftCandidate | str:
        verifier, hidden = head.verifier, head.config.get("hidden_size")
        if verifier is not None and short_name(verifier) != short_name(self.name):
            return f"it is a draft head ({head.kind}) of {verifier}"
        if verifier is None and isinstance(hidden, int) and hidden != self.hidden:
            return f"it is a draft head ({head.kind}) of a model {hidden} wide, and the target is {self.hidden} wide"
        made = "of this target" if verifier is not None else "of a model that its files do not name"
        headers = head.checkpoint.headers()
        reads = headers.bytes_without("embed_tokens.weight", "codebook")
        if not any(tensor.endswith("lm_head.weight") for tensor in tensor_names(head.checkpoint)):
            reads += self.output_bytes
        cache = self.expected.cache // max(1, self.expected.layers)
        kind, parameters = f"draft head ({head.kind}) {made}", sum(headers.counts.values())
        return self.candidate(head.name, kind, parameters, ITS, reads, cache, None, blocks=head.writes_blocks)
