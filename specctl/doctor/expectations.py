"""What each model of a profile will need and read, told without its weights."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from specctl.doctor.diagnosis import Diagnosis, ModelFacts
from specctl.models.draft_heads.checkpoint import DraftHeadCheckpoint
from specctl.models.files.checkpoint import ITEM_BYTES, Checkpoint, locate
from specctl.models.files.skeleton import skeleton
from specctl.models.loading.draft_heads import needed
from specctl.models.loading.model import loading_order, model_tables
from specctl.models.loading.pair_members import find_head
from specctl.models.passes.layer_sizes import largest
from specctl.models.placing.engine_table import chosen, chosen_for_head, engine_named
from specctl.models.placing.memory import CUDA_CONTEXT, DeviceMemory, Estimate, working_bytes
from specctl.models.placing.placement import weighed
from specctl.models.running.context import context_length
from specctl.models.running.engines import EngineSettings, Where
from specctl.profile.schema import DraftTable, Engine, ModelTable, Profile

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

_ROUTED = ".experts."
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts", "moe_k")


@dataclass(frozen=True, slots=True)
class WeightReads:
    """How many of a model's numbers a pass reads.

    Attributes:
        numbers: of the whole model.
        tables: those of embeddings that are no output layer, of which a pass reads a row for each token.
        experts: those of experts among which a router chooses.
        chosen: the share of them that each token goes through; 1 where that is not known.
        layers: decoder layers.
    """

    numbers: int
    tables: int
    experts: int
    chosen: float
    layers: int

    @classmethod
    def of(cls, model: "nn.Module", config: Any, output: "nn.Module | None") -> "WeightReads":
        """Count them.

        Args:
            model: a model or draft head, perhaps a `skeleton`.
            config: of its decoder; None for a draft head.
            output: the layer that makes its logits, if that is a module of its own.
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
        """Bytes of the weights that a pass over ``width`` tokens reads.

        Of experts, each token is taken to choose its own at random, so that wider passes read more of them.

        Args:
            need: of the same model in the form in which it is loaded.
            dtype: of what is not quantised.
            width: tokens in the pass.
        """
        read = self.numbers - self.tables
        whole = need.weight_bytes(dtype) - self.tables * ITEM_BYTES[dtype]
        left_out = self.experts * (1 - self.chosen) ** width
        return round(whole * (1 - left_out / read)) if read else 0


PROMPT = 2048
"""Tokens of a prompt for which working room is counted."""
WIDEST = 41
"""Tokens of the widest pass that is told: 40 drafted ones and the newest."""


@dataclass(frozen=True, slots=True)
class Expectation:
    """What is expected of one model, draft head or lookup.

    Attributes:
        key: its key in the profile.
        dtype: of its weights; None for a lookup, which has none and reads nothing.
        devices: bytes of the weights by device.
        context: tokens that its cache is to hold: the target's context, or its own where that is shorter.
        working: bytes that its passes need besides weights and cache, roughly: the states of `PROMPT` tokens in one
            layer, the distributions of its widest pass, and what `working_bytes` knows.
        cache: bytes of its KV cache for one token; sliding windows are ignored.
        spare: how many times as many tokens as it holds its cache may have room for.
        layers: its decoder layers.
        reads: bytes of weights that passes of 1, 2, ... tokens read; empty for a lookup.
        blocks: whether one pass drafts a whole block.
        longest: the most tokens of a draft; None for any number.
        engine: how reports name it.
        why: it was chosen, in a few words.
    """

    key: str
    dtype: str | None
    devices: dict[str, int]
    context: int
    working: int
    cache: int
    spare: float
    layers: int
    reads: tuple[int, ...]
    blocks: bool
    engine: str
    why: str
    longest: int | None = None

    @property
    def weights(self) -> int:
        """Bytes of its weights."""
        return sum(self.devices.values())


def expectations(profile: Profile, report: Diagnosis) -> list[Expectation]:
    """What is expected of each model of a profile, the target first; of draft heads only once they are downloaded.

    Args:
        profile: as it was diagnosed.
        report: its diagnosis, without problems.
    """
    tables = loading_order(model_tables(profile))
    known = {one.key: one for one in report.models}
    known_contexts = [one.context for one in report.models if one.context is not None]
    context = report.models[0].context or min(known_contexts, default=0)
    uppers = {key: upper for (key, _), upper in pairwise(tables)}
    found: list[Expectation] = []
    for key, table in tables:
        facts = known[key]
        if table.is_lookup:
            found.append(Expectation(key, None, {}, context, 0, 0, 1.0, 0, (), True, "lookup", "it has no model"))
        elif isinstance(table, DraftTable) and (head := find_head(key, table, uppers[key])) is not None:
            if head.local:
                found.append(_of_head(head, facts, known[uppers[key][0]], uppers[key][1], context, profile))
        else:
            found.append(_of_model(facts, table, context, profile, report.devices))
    return found[::-1]


def weight_reads(checkpoint: Checkpoint) -> WeightReads:
    """What a pass of a model reads, by its configuration."""
    model = skeleton(checkpoint)
    return WeightReads.of(model, model.config.get_text_config(decoder=True), _output(model))


def _of_model(
    facts: ModelFacts, table: ModelTable, context: int, profile: Profile, devices: Sequence[DeviceMemory]
) -> Expectation:
    dtype, on_cuda = _dtype(facts), any(name.startswith("cuda") for name in facts.devices)
    need = weighed(locate(table, facts.key), table, devices, profile.engine)
    model = _skeleton(table, facts)
    config = model.config.get_text_config(decoder=True)
    reads = WeightReads.of(model, config, _output(model))
    quantised = "its checkpoint" if need.quantised else None
    if need.quantization is not None:
        quantised = need.quantization.scheme.package
    where = Where(tuple(facts.devices), sum(facts.devices.values()), quantised)
    choice = chosen(profile.engine, model, where, EngineSettings.of(profile))
    return Expectation(
        key=facts.key,
        dtype=dtype,
        devices=facts.devices,
        context=min(context, facts.context or context),
        working=_working(config, need, dtype, profile.engine, on_cuda=on_cuda),
        cache=need.cache_bytes(dtype, 1),
        spare=_spare(profile.engine, on_cuda=on_cuda),
        layers=reads.layers,
        reads=tuple(reads.bytes(need, dtype, width) for width in range(1, WIDEST + 1)),
        blocks=False,
        engine=choice.name,
        why=choice.why,
    )


def _of_head(
    head: DraftHeadCheckpoint,
    facts: ModelFacts,
    above: ModelFacts,
    verifier: ModelTable,
    context: int,
    profile: Profile,
) -> Expectation:
    dtype, on_cuda = _dtype(facts), any(name.startswith("cuda") for name in facts.devices)
    model = _skeleton(verifier, above)
    network = head.network(model)
    need, output = needed(network), _output(model)
    reads = replace(WeightReads.of(network, None, None), layers=network.num_layers).bytes(need, dtype)
    if output is not None and network.borrowed_output is output:
        reads += sum(weight.numel() for weight in output.parameters()) * ITEM_BYTES[dtype]
    where = Where(tuple(facts.devices), sum(facts.devices.values()))
    settings = EngineSettings.of(profile)
    its = chosen(profile.engine, model, Where(tuple(above.devices), sum(above.devices.values())), settings)
    choice = chosen_for_head(profile.engine, where, settings, its.engine, blocks=head.writes_blocks)
    return Expectation(
        key=facts.key,
        dtype=dtype,
        devices=facts.devices,
        context=context,
        working=_working(model.config.get_text_config(decoder=True), need, dtype, profile.engine, on_cuda=on_cuda),
        cache=need.cache_bytes(dtype, 1),
        spare=_spare(profile.engine, on_cuda=on_cuda),
        layers=network.num_layers,
        reads=(reads,) * WIDEST,
        blocks=head.writes_blocks,
        engine=choice.name,
        why=choice.why,
        longest=network.longest,
    )


def _working(config: Any, need: Estimate, dtype: str, engine: Engine, *, on_cuda: bool) -> int:
    """States in and around one layer, each token's input, its norm, queries and keys, and the three products of its
    feed-forward part; then float32 logits, probabilities and two sums of them; then what an empty cache's model takes.
    """
    hidden = int(config.hidden_size)
    inner = largest(config, "intermediate_size") or 4 * hidden
    tokens = min(PROMPT, context_length(config) or PROMPT)
    states = tokens * (4 * hidden + 3 * inner) * ITEM_BYTES[dtype]
    laws = WIDEST * int(config.vocab_size) * 4 * ITEM_BYTES["float32"]
    return states + laws + working_bytes(need, dtype, 0, engine, on_cuda=on_cuda, first=False)


def _spare(engine: Engine, *, on_cuda: bool) -> float:
    return engine_named(engine).spare if on_cuda else 1.0


def _dtype(facts: ModelFacts) -> str:
    assert facts.dtype is not None, f"{facts.key} has a problem"
    return facts.dtype


def _skeleton(table: ModelTable, facts: ModelFacts) -> "PreTrainedModel":
    """A model without weights, in the dtype that they will have."""
    import torch

    checkpoint = locate(table, facts.key)
    made: Any = skeleton(checkpoint, table.trust_remote_code)
    model: PreTrainedModel = made.to(getattr(torch, _dtype(facts)))
    return model


def _output(model: "PreTrainedModel") -> "nn.Module | None":
    found: nn.Module | None = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    return found


@dataclass(frozen=True, slots=True)
class Room:
    """One device's memory, in bytes.

    Attributes:
        device: its name.
        free: before anything is loaded.
        weights: of all models.
        context: how many tokens the caches are counted for; that of a draft with a shorter context, for as many.
        caches: of all models, for that length, with the room that they keep for more.
        working: what passes need beside both.
        tokens: for how many tokens there is room; None where nothing grows with them.
    """

    device: str
    free: int
    weights: int
    context: int
    caches: int
    working: int
    tokens: int | None

    @property
    def left(self) -> int:
        """Bytes left; less than 0 where there are too few."""
        return self.free - self.weights - self.caches - self.working


def rooms(models: Sequence[Expectation], devices: Sequence[DeviceMemory]) -> list[Room]:
    """The devices on which weights lie; a cache is spread over devices as its model's weights are."""
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
