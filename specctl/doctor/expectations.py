"""Memory and bytes read per pass of each model of a profile, computed without its weights."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from specctl.doctor.diagnosis import Diagnosis, ModelFacts
from specctl.doctor.gguf_facts import CACHE, gguf_estimate
from specctl.models.draft_heads.checkpoint import DraftHeadCheckpoint
from specctl.models.files.checkpoint import ITEM_BYTES, Checkpoint
from specctl.models.files.gguf_header import read_header
from specctl.models.files.skeleton import skeleton
from specctl.models.llama.rounding import MOST
from specctl.models.loading.draft_heads import needed
from specctl.models.loading.file_models import runs_on_llama
from specctl.models.loading.pair_members import PairMember
from specctl.models.onnx.store import PACKED
from specctl.models.passes.layer_sizes import largest
from specctl.models.passes.weights import Where
from specctl.models.placing.engine_table import chosen, chosen_for_head, engine_named
from specctl.models.placing.memory import CUDA_CONTEXT, DeviceMemory, Estimate, working_bytes
from specctl.models.placing.placement import weighed
from specctl.models.placing.quantization import form_of
from specctl.models.running.context import context_length
from specctl.models.running.engines import Choice, EngineSettings
from specctl.profile.schema import Engine, Profile

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

_ROUTED = ".experts."
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts", "moe_k")


@dataclass(frozen=True, slots=True)
class WeightReads:
    """The number of weights read in a pass."""

    numbers: int  # all weights of the model
    tables: int  # weights of embeddings that are not the output layer; a pass reads one row for each token
    experts: int  # weights of routed experts
    chosen: float  # the share of the experts used by each token; 1 if unknown
    layers: int  # the number of decoder layers

    @classmethod
    def of(cls, model: "nn.Module", config: Any, output: "nn.Module | None") -> "WeightReads":
        """Count the weights of a model or draft head, perhaps a `skeleton`.

        ``config`` is its decoder's, None for a draft head; ``output`` is its output layer, if it is a separate module.
        """
        from torch import nn

        own = None if output is None else id(output.weight)
        weights = {id(weight): weight.numel() for weight in model.parameters()}
        embeddings = {id(part.weight) for part in model.modules() if isinstance(part, nn.Embedding)} - {own}
        total, chosen = (None if config is None else largest(config, *names) for names in (_EXPERTS, _CHOSEN))
        return cls(
            numbers=sum(weights.values()),
            tables=sum(count for key, count in weights.items() if key in embeddings),
            experts=sum(weight.numel() for name, weight in model.named_parameters() if _ROUTED in name),
            chosen=min(1.0, chosen / total) if total and chosen else 1.0,
            layers=int(getattr(config, "num_hidden_layers", 0)),
        )

    def bytes(self, need: Estimate, dtype: str, width: int = 1) -> int:
        """Bytes of weights read in a pass over ``width`` tokens; ``dtype`` is that of unquantised weights.

        Tokens are assumed to choose experts at random, so wider passes read more experts.
        """
        read = self.numbers - self.tables
        whole = need.weight_bytes(dtype) - self.tables * ITEM_BYTES[dtype]
        left_out = self.experts * (1 - self.chosen) ** width
        return round(whole * (1 - left_out / read)) if read else 0


PROMPT = 2048  # Tokens of a prompt, for the estimate of working memory
SPARE = 1.5  # While llama.cpp's cache grows, the former one with half as many tokens is kept
WIDEST = 41  # Tokens of the widest pass: 40 draft tokens and the newest one


@dataclass(frozen=True, slots=True)
class Expectation:
    """The expected sizes of one model, draft head or lookup."""

    key: str  # its key in the profile
    dtype: str | None  # dtype of its weights; None for a lookup
    devices: dict[str, int]  # bytes of the weights by device
    context: int  # tokens of its full cache: the target's context, or its own if shorter
    # bytes that its passes need besides weights and cache, roughly: the states of `PROMPT` tokens in one layer, the
    # distributions of its widest pass, and `working_bytes`
    working: int
    cache: int  # bytes of its KV cache for one token; sliding windows are ignored
    spare: float  # the factor by which its cache may be overallocated
    layers: int  # the number of its decoder layers
    reads: tuple[int, ...]  # bytes of weights that passes of 1, 2, ... tokens read; empty for a lookup.
    blocks: bool  # whether one pass drafts a whole block
    engine: str  # its name in reports
    why: str  # the reason for its engine, in a few words
    longest: int | None = None  # the most tokens of a draft; None for any number

    @property
    def weights(self) -> int:
        """Bytes of its weights."""
        return sum(self.devices.values())


def expectations(profile: Profile, report: Diagnosis) -> list[Expectation]:
    """Expectations of each model of a profile, the target first; of draft heads only once they are downloaded.

    ``report`` is the profile's diagnosis, without problems.
    """
    known = {one.key: one for one in report.models}
    contexts = [one.context for one in report.models if one.context is not None]
    context = report.models[0].context or min(contexts, default=0)
    found: list[Expectation] = []
    above: PairMember | None = None
    for role, table in profile.models:
        member = PairMember(role, table)
        if not table.has_files:
            kind = "lookup" if table.is_lookup else "drafter"
            found.append(Expectation(role, None, {}, context, 0, 0, 1.0, 0, (), True, kind, "it has no model"))
            continue
        member = member.located(above)
        if member.checkpoint is not None and runs_on_llama(member.checkpoint, table, profile.engine):
            found.append(_of_gguf(member.checkpoint, known[role], context, ahead=member.head is not None))
        elif member.head is None:
            found.append(_of_model(member, known[role], context, profile, report.devices))
        elif member.head.local and above is not None and not above.is_gguf:
            found.append(_of_head(member.head, known[role], above, known[above.role], context, profile))
        above = member
    return found


def weight_reads(checkpoint: Checkpoint) -> WeightReads:
    """The weights read in a model's pass, by its configuration."""
    model = skeleton(checkpoint)
    return WeightReads.of(model, model.config.get_text_config(decoder=True), _output(model))


def _of_model(
    member: PairMember, facts: ModelFacts, context: int, profile: Profile, devices: Sequence[DeviceMemory]
) -> Expectation:
    assert member.checkpoint is not None, "it was located"
    need = weighed(member.checkpoint, member.table, devices, profile.engine)
    model = _skeleton(member, facts)
    config = model.config.get_text_config(decoder=True)
    reads = WeightReads.of(model, config, _output(model))
    packed = form_of(member.checkpoint, member.table, profile.engine, _where(facts).device.type) == PACKED
    quantised = "its checkpoint" if need.quantised and not packed else None
    if need.quantization is not None:
        quantised = need.quantization.scheme.package
    choice = chosen(profile.engine, model, _where(facts, quantised), EngineSettings.of(profile))
    return _expectation(
        facts,
        need,
        choice,
        config,
        profile.engine,
        context=min(context, facts.context or context),
        layers=reads.layers,
        reads=tuple(reads.bytes(need, _dtype(facts), width) for width in range(1, WIDEST + 1)),
    )


def _of_gguf(checkpoint: Checkpoint, facts: ModelFacts, context: int, *, ahead: bool) -> Expectation:
    """The expectation of a GGUF file on llama.cpp, or (``ahead``) of its layers that predict further tokens."""
    assert checkpoint.weights is not None, "it is a GGUF file"
    main, layers = read_header(checkpoint.weights).split()
    header, output = (layers, main.output_bytes) if ahead else (main, 0)
    need, numbers = gguf_estimate(header), ITEM_BYTES["float32"]
    hidden, inner = (header.count(f"{name}_length") for name in ("embedding", "feed_forward"))
    states = min(MOST, facts.context or MOST) * (4 * hidden + 3 * inner) * numbers
    return Expectation(
        key=facts.key,
        dtype=facts.dtype,
        devices=facts.devices,
        context=min(context, facts.context or context),
        working=states + WIDEST * (facts.vocabulary or 0) * 4 * numbers,
        cache=need.cache_bytes(CACHE, 1),
        spare=SPARE,
        layers=main.ahead if ahead else main.layers,
        reads=tuple(header.read_bytes(width) + output for width in range(1, WIDEST + 1)),
        blocks=False,
        engine="llama.cpp",
        why="it is a GGUF file",
    )


def _of_head(
    head: DraftHeadCheckpoint,
    facts: ModelFacts,
    above: PairMember,
    its: ModelFacts,
    context: int,
    profile: Profile,
) -> Expectation:
    dtype, model = _dtype(facts), _skeleton(above, its)
    network = head.network(model)
    need, output = needed(network), _output(model)
    reads = replace(WeightReads.of(network, None, None), layers=network.num_layers).bytes(need, dtype)
    if output is not None and network.borrowed_output is output:
        reads += sum(weight.numel() for weight in output.parameters()) * ITEM_BYTES[dtype]
    settings = EngineSettings.of(profile)
    engine = chosen(profile.engine, model, _where(its), settings).engine
    choice = chosen_for_head(profile.engine, _where(facts), settings, engine, blocks=head.writes_blocks)
    expected = _expectation(
        facts,
        need,
        choice,
        model.config.get_text_config(decoder=True),
        profile.engine,
        context=context,
        layers=network.num_layers,
        reads=(reads,) * WIDEST,
    )
    return replace(expected, blocks=head.writes_blocks, longest=network.longest)


def _expectation(
    facts: ModelFacts,
    need: Estimate,
    choice: Choice,
    config: Any,
    engine: Engine,
    *,
    context: int,
    layers: int,
    reads: tuple[int, ...],
) -> Expectation:
    """The expectation of a model or head; ``config`` is its decoder's, or its verifier's decoder's."""
    dtype, on_cuda = _dtype(facts), any(name.startswith("cuda") for name in facts.devices)
    return Expectation(
        key=facts.key,
        dtype=dtype,
        devices=facts.devices,
        context=context,
        working=_working(config, need, dtype, engine, on_cuda=on_cuda),
        cache=need.cache_bytes(dtype, 1),
        spare=engine_named(engine).spare if on_cuda else 1.0,
        layers=layers,
        reads=reads,
        blocks=False,
        engine=choice.name,
        why=choice.why,
    )


def _working(config: Any, need: Estimate, dtype: str, engine: Engine, *, on_cuda: bool) -> int:
    """Bytes of the states around one layer (input, norm, queries, keys, three products of the feed-forward part), of
    float32 logits, probabilities and two sums of them, and of `working_bytes` with an empty cache."""
    hidden = int(config.hidden_size)
    inner = largest(config, "intermediate_size") or 4 * hidden
    tokens = min(PROMPT, context_length(config) or PROMPT)
    states = tokens * (4 * hidden + 3 * inner) * ITEM_BYTES[dtype]
    distributions = WIDEST * int(config.vocab_size) * 4 * ITEM_BYTES["float32"]
    return states + distributions + working_bytes(need, dtype, 0, engine, on_cuda=on_cuda, first=False)


def _where(facts: ModelFacts, quantised: str | None = None) -> Where:
    return Where(tuple(facts.devices), sum(facts.devices.values()), quantised)


def _dtype(facts: ModelFacts) -> str:
    assert facts.dtype is not None, f"{facts.key} has a problem"
    return facts.dtype


def _skeleton(member: PairMember, facts: ModelFacts) -> "PreTrainedModel":
    """A model without weights, in the dtype for loading."""
    import torch

    assert member.checkpoint is not None, "it was located"
    made: Any = skeleton(member.checkpoint, member.table.trust_remote_code)
    model: PreTrainedModel = made.to(getattr(torch, _dtype(facts)))
    return model


def _output(model: "PreTrainedModel") -> "nn.Module | None":
    found: nn.Module | None = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    return found


@dataclass(frozen=True, slots=True)
class Room:
    """One device's memory, in bytes."""

    device: str  # its name
    free: int  # before anything is loaded
    weights: int  # of all models
    context: int  # the caches' length in tokens; a draft with a shorter context counts its own
    caches: int  # caches of all models at that length, with overallocation
    working: int  # working memory of passes
    tokens: int | None  # the length in tokens that fits; None if no memory grows with length

    @property
    def left(self) -> int:
        """Bytes left; negative if memory does not suffice."""
        return self.free - self.weights - self.caches - self.working


def rooms(models: Sequence[Expectation], devices: Sequence[DeviceMemory]) -> list[Room]:
    """The devices that hold weights; a cache is spread over devices like its model's weights."""
    found = []
    for device in devices:
        here = [model for model in models if model.devices.get(device.name)]
        if not here:
            continue
        weights = sum(model.devices[device.name] for model in here)
        cache = [model.cache * model.spare * model.devices[device.name] / model.weights for model in here]  # of a token
        each, caches = sum(cache), sum(size * model.context for size, model in zip(cache, here, strict=True))
        context = max(model.context for model in here)
        working = sum(model.working for model in here) + CUDA_CONTEXT * device.name.startswith("cuda")
        tokens = max(0, int((device.free - weights - working) / each)) if each else None
        found.append(Room(device.name, device.free, weights, context, round(caches), working, tokens))
    return found
