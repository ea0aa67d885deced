"""What could draft for a target: told from configurations and the headers of weight files."""

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from specctl.doctor.diagnosis import Diagnosis
from specctl.doctor.draft_places import files_here_only, models_here, models_on_hub
from specctl.doctor.expectations import Expectation, expectations, weight_reads
from specctl.doctor.model_facts import Overlap
from specctl.doctor.outlook import CACHED, LONGEST, pays_from, priced
from specctl.errors import ModelError, SpecctlError
from specctl.models.draft_heads.checkpoint import DraftHeadCheckpoint, draft_head, head_in_target, tensor_names
from specctl.models.files.checkpoint import ITEM_BYTES, Checkpoint, locate
from specctl.models.files.tokenizer import Tokenizer, known_ids
from specctl.models.loading.assembly import LARGE_DRAFT
from specctl.models.loading.model import load_tokenizer
from specctl.models.loading.vocabularies import token_map
from specctl.models.placing.model_config import load_config
from specctl.models.placing.requirements import weighed
from specctl.models.running.context import context_length
from specctl.profile.schema import IN_TARGET, LOOKUP, DraftTable, Profile
from specctl.profile.wording import short_name

ITS = "the target's"


@dataclass(frozen=True, slots=True)
class DraftCandidate:
    """A model, draft head or lookup that could draft for a target.

    Attributes:
        model: its name, as ``--draft`` takes it.
        kind: what it is, in words.
        parameters: of a model or head; None for a lookup, and where the files do not tell.
        tokens: how its tokenizer goes with the target's, in words.
        cost: bytes that a step reads over those of a target pass, with `CACHED` tokens in the caches.
        pays_from: the acceptance rate from which drafts save time at this cost; None if none is high enough.
        full: tokens that both hold.
        pays_from_full: `pays_from` with so many tokens in the caches.
        command: what to run next.
    """

    model: str
    kind: str
    parameters: int | None
    tokens: str
    cost: float
    pays_from: float | None
    full: int
    pays_from_full: float | None
    command: str


@dataclass(frozen=True, slots=True)
class DraftSearch:
    """What was found.

    Attributes:
        candidates: those with the target's tokenizer come first, of them those that soonest pay.
        left_out: by name, why a model that is here is no candidate.
        on_hub: names of models on the hub that may be one.
        hub: why the hub names none; None if it does.
        compare: commands that compare the first candidates that are models or heads; empty without two.
    """

    candidates: list[DraftCandidate]
    left_out: dict[str, str]
    on_hub: list[str]
    hub: str | None
    compare: list[str]


def find_drafts(
    profile: Profile, report: Diagnosis, folders: Sequence[Path], given: Sequence[str] | None = None
) -> DraftSearch:
    """Look for drafts for a profile's target.

    Args:
        profile: without a draft.
        report: its diagnosis, without problems.
        folders: to look into, besides the hub's cache.
        given: the arguments that name this target in a command, with what is set of it; None for its name alone.
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
        except Exception as error:  # whatever stands in a folder that nobody named, the others are told of
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
        tokenizer = load_tokenizer(profile.target)
        text = load_config(files, profile.target.trust_remote_code).get_text_config(decoder=True)
        vocabulary = known_ids(tokenizer, text.vocab_size)
        name, told = profile.target.model, shlex.join(given)
        return cls(name, told, files, expected, profile, report, tokenizer, vocabulary, text.hidden_size)

    @property
    def output_bytes(self) -> int:
        """Bytes of its output layer."""
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
        """Price one.

        Args:
            model, kind, parameters, tokens: as of `DraftCandidate`.
            reads: bytes of weights of a step.
            cache: bytes of its cache for each token.
            context: tokens that it holds; None for any number.
            blocks: whether a step writes a whole draft.
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
        """The target's own MTP layer, which is about one of its layers and the output layer."""
        own = self.expected
        layer = max(0, own.reads[0] - self.output_bytes) // max(1, own.layers)
        cache = own.cache // max(1, own.layers)
        kind = "the target's own multi-token prediction layer"
        return self.candidate(IN_TARGET, kind, None, ITS, layer + self.output_bytes, cache, None)

    def judged(self, name: str) -> DraftCandidate | str:
        """A candidate, or why a model is none.

        Raises:
            ModelError, ProfileError: it cannot be a draft.
        """
        table = DraftTable(model=name)
        files = locate(table, "draft")
        if (head := draft_head(files)) is not None:
            return self._head(head)
        need = weighed(files, table, self.report.devices, self.profile.engine)
        larger = next((one.parameters for one in self.report.models if one.parameters), None)
        if larger and need.parameters > LARGE_DRAFT * larger:
            return f"it has {need.parameters / larger:.0%} of the target's parameters"
        config = load_config(files).get_text_config(decoder=True)
        own = load_tokenizer(table, role="draft")
        shared = token_map(table, self.tokenizer, own, self.vocabulary, config.vocab_size)
        tokens = ITS if shared is None else f"another than the target's: it {shared.told}; "
        if shared is not None:
            tokens += str(Overlap.of(shared, self.tokenizer))
        dtype = need.stored_dtype if need.stored_dtype in ITEM_BYTES else self.expected.dtype or "float32"
        reads, context = weight_reads(files, load_config(files)).bytes(need, dtype), context_length(config)
        return self.candidate(name, "model", need.parameters, tokens, reads, need.cache_bytes(dtype, 1), context)

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
