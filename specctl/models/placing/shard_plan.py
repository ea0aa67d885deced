"""Whether a model can be in shards, and what each rank then holds; told from its configuration."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from specctl.errors import ModelError
from specctl.models.files.checkpoint import ITEM_BYTES, Checkpoint
from specctl.models.files.skeleton import is_wrapper, skeleton
from specctl.models.passes.layer_sizes import key_value_heads, layer_configs, query_heads
from specctl.models.placing.memory import DeviceMemory, Estimate
from specctl.models.placing.model_config import load_config
from specctl.models.placing.placement import ROOM_FOR_WORK, Placement, dtype_on
from specctl.printable import gib
from specctl.profile.schema import ModelTable

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Kind = Literal["tensor", "pipeline"]

WHY: dict[Kind, str] = {
    "tensor": "all cards read their shares of a layer at the same time, the fastest",
    "pipeline": "the cards read their layers in turn; for heads that do not divide",
}
WHOLE = re.compile("replicated|all_reduce|mla_kv_a_proj|sequence_parallel")
"""Styles of a tensor parallel plan whose weights every rank holds whole."""


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """What each rank holds.

    Attributes:
        kind: how the model is split.
        parameters: number of weights by rank.
    """

    kind: Kind
    parameters: tuple[int, ...]


def shard_plan(model: "PreTrainedModel", kind: Kind, shards: int, role: str) -> ShardPlan:
    """How a model would be split.

    Args:
        model: a `skeleton`.
        kind: into parts of every layer, or into groups of layers.
        shards: into how many.
        role: the model's key in the profile, for messages.

    Raises:
        ModelError: it cannot be split so.
    """
    from specctl.models.passes.cache import cache_argument
    from specctl.models.passes.recurrent_state import keeps_states

    if keeps_states(model.config) or cache_argument(type(model)) in ("", "cache_params"):
        raise _refused(role, "has layers with a state of their own", 'placement = "spread"')
    if kind == "pipeline":
        return ShardPlan(kind, _staged(model, shards, role))
    config = model.config.get_text_config(decoder=True)
    if not _plan(model):
        raise _refused(role, "has no tensor parallel plan in transformers", 'placement = "spread"')
    if config.model_type not in SPLIT:
        raise _refused(
            role, f"is of the family {config.model_type}, whose plan specctl has not tested", 'placement = "spread"'
        )
    _require_heads(config, shards, role)
    split, whole = _split(model)
    return ShardPlan(kind, (split // shards + whole,) * shards)


def sharded_placement(
    checkpoint: Checkpoint, table: ModelTable, need: Estimate, devices: Sequence[DeviceMemory]
) -> Placement:
    """Where the shards of a model go: to the first cards, one each, or all to the CPU where there is none.

    Raises:
        ModelError: the model cannot be split so, or a card lacks the room for its share.
    """
    role, shards = checkpoint.role, table.shards
    assert shards is not None, "others are placed by `place`"
    if need.quantised or table.quantize is not None:
        raise _refused(role, "is quantised, and quantised weights are not split", 'placement = "spread"')
    cards = [device for device in devices if device.name != "cpu"]
    if table.device == "cpu" and cards:
        raise ModelError(
            f"[{role}] device = 'cpu' has no effect with shards: they go to the {len(cards)} accelerators here.",
            "Remove it, or hide the accelerators (CUDA_VISIBLE_DEVICES='').",
        )
    if cards and len(cards) < shards:
        raise ModelError(
            f"[{role}] shards = {shards} needs as many accelerators; this machine has {len(cards)}.",
            f"Set shards = {len(cards)}, or leave it out." if len(cards) > 1 else "Leave shards out.",
        )
    model = skeleton(checkpoint, load_config(checkpoint, table.trust_remote_code), table.trust_remote_code)
    plan = shard_plan(model, "pipeline" if table.placement == "pipeline" else "tensor", shards, role)
    dtype = dtype_on(table, need, cards[0].name if cards else "cpu")
    sizes = [count * ITEM_BYTES[dtype] for count in plan.parameters]
    shares = dict(zip((card.name for card in cards), sizes, strict=False)) or {"cpu": sum(sizes)}
    for device in devices:
        if shares.get(device.name, 0) > device.free:
            raise ModelError(
                f"The {role} model {table.model!r} needs {gib(shares[device.name])} on {device.name} for its share of "
                f"the weights in {dtype}; free: {gib(device.free)}.",
                "Set more shards, free memory on the card, or choose a smaller checkpoint.",
            )
    return Placement({}, None, dtype, shares, sharded=plan.kind, shards=shards)


def placement_advice(
    checkpoint: Checkpoint, table: ModelTable, need: Estimate, devices: Sequence[DeviceMemory], tokens: int
) -> list[str]:
    """A line for each way to split a model over its shards: whether it fits, and what speaks for it.

    Args:
        checkpoint, table, need, devices: as for `sharded_placement`.
        tokens: of a KV cache to have room for.
    """
    shards = table.shards
    assert shards is not None, "the model is to be split"
    cards = [device for device in devices if device.name != "cpu"][:shards]
    dtype = dtype_on(table, need, cards[0].name if cards else "cpu")
    cache = need.cache_bytes(dtype, tokens) // shards
    model = skeleton(checkpoint, load_config(checkpoint, table.trust_remote_code), table.trust_remote_code)
    free = min((card.free for card in cards), default=devices[-1].free // shards)

    def line(kind: str, most: int, why: str) -> str:
        fits = "fits" if most + cache <= free else "does not fit"
        needed = f"{gib(most)} of weights and {gib(cache)} of cache for {tokens} tokens on a card, {gib(free)} free"
        return f"{checkpoint} over {shards}, {kind}: {fits} ({needed}); {why}."

    lines = []
    for kind, why in WHY.items():
        try:
            plan = shard_plan(model, kind, shards, checkpoint.role)
        except ModelError as error:
            lines.append(f"{checkpoint} over {shards}, {kind}: no. {error.message}")
        else:
            lines.append(line(kind, max(plan.parameters) * ITEM_BYTES[dtype], why))
    most = int(need.weight_bytes(dtype) / (1 - ROOM_FOR_WORK)) // shards
    return [*lines, line("spread", most, "any model, one process, and the cards read their layers in turn")]


def _plan(model: "PreTrainedModel") -> dict[str, str]:
    """The styles of the modules that tensor parallelism splits, layer numbers as ``*``."""
    found: Any = model.tp_plan
    return dict(found or {})


def _split(model: "PreTrainedModel") -> tuple[int, int]:
    """How many weights are split evenly between ranks, and how many every rank holds."""
    plan, split, whole = _plan(model), 0, 0
    for name, weight in model.named_parameters():
        generic = re.sub(r"\d+", "*", name)
        style = plan.get(generic) or plan.get(generic.rpartition(".")[0])
        if style is None or WHOLE.search(style) or (style.startswith("rowwise") and name.endswith(".bias")):
            whole += weight.numel()
        else:
            split += weight.numel()
    return split, whole


def _require_heads(config: Any, shards: int, role: str) -> None:
    """Raise a ModelError where attention heads or key-value heads do not divide evenly."""
    heads, groups = ({count(layer) for layer in layer_configs(config)} for count in (query_heads, key_value_heads))
    if all(count % shards == 0 for count in heads | groups):
        return
    possible = [str(n) for n in range(2, min(groups) + 1) if all(count % n == 0 for count in heads | groups)]
    what = f"shards = {' or '.join(possible)}, or " if possible else ""
    spelled = [" or ".join(map(str, sorted(counts))) for counts in (heads, groups)]
    raise ModelError(
        f"[{role}] its {spelled[0]} attention heads and {spelled[1]} key-value heads do not divide by {shards}.",
        f'Set {what}placement = "pipeline" or "spread".',
    )


def _staged(model: "PreTrainedModel", shards: int, role: str) -> tuple[int, ...]:
    """Number of weights in each stage of a pipeline."""
    from specctl.models.passes.masks import mask_obstacle

    config = model.config.get_text_config(decoder=True)
    if config.model_type not in STAGED:
        raise _refused(
            role,
            f"is of the family {config.model_type}, whose pipelines specctl has not tested",
            'placement = "tensor" or "spread"',
        )
    if is_wrapper(model.config):  # transformers cuts at names that a wrapper's decoder has one level further down
        raise _refused(
            role, "is made for more than text, and its pipelines do not load", 'placement = "tensor" or "spread"'
        )
    if why := mask_obstacle(model):
        raise ModelError(f"[{role}] cannot be a pipeline: {why}.", f'Set placement = "tensor" or "spread" in [{role}].')
    layers = int(config.num_hidden_layers)
    if layers < shards:
        raise _refused(role, f"has only {layers} layers", f"shards = {layers}")
    stages = [0] * shards
    each = layers // shards
    for name, weight in model.named_parameters():
        number = re.search(r"\.layers\.(\d+)\.", name)
        if number:
            stages[min(int(number[1]) // each, shards - 1)] += weight.numel()
        elif "embed" in name:
            stages[0] += weight.numel()
            stages[-1] += weight.numel() if config.tie_word_embeddings else 0
        else:
            stages[-1] += weight.numel()
    return tuple(stages)


def _refused(role: str, why: str, instead: str) -> ModelError:
    return ModelError(f"[{role}] cannot be in shards: it {why}.", f"Set {instead} in [{role}].")


SPLIT = frozenset(
    """
    afmoe apertus arcee aria_text axk1 axk2 beam cohere cohere2 cohere2_moe cwm deepseek_v2 deepseek_v3 deepseek_v32
    diffllama dots1 ernie4_5 ernie4_5_moe exaone4 exaone_moe flex_olmo flint gemma gemma2 gemma3_text gemma3n_text
    gemma4_text glm glm4 glm4_moe glm4_moe_lite glm_moe_dsa gpt_neox gpt_oss granite granite_swa granitemoe
    granitemoe_swa granitemoeshared helium hunyuan_v1_dense hunyuan_v1_moe hy_v3 hy_v4 hyperclovax internlm3 iquestcoder
    jais2 kolibri1 laguna llama llama4_text longcat_flash mellum mimo_v2_flash minicpm3 minimax_m2 minimax_m3_vl_text
    ministral ministral3 mistral mixtral nanochat nemotron olmo olmo2 olmo3 olmoe phi phi3 phimoe qwen2 qwen2_moe qwen3
    qwen3_moe seed_oss smollm3 solar_open starcoder2 vaultgemma youtu
    """.split()  # noqa: SIM905 - a line for each would be 90 lines
)
"""Each process has a part of every layer. Not hrm_text, whose logits differ, nor doge, which fails."""

STAGED = frozenset(
    "cohere deepseek_v3 gemma glm4 granite llama olmo2 qwen2 qwen3 qwen3_moe seed_oss smollm3".split()  # noqa: SIM905
)
"""Each process has some of the layers. transformers cuts a model at the names that Llama's modules have: GPT-NeoX's
stages would each apply the last norm."""
