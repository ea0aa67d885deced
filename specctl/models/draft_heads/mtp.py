"""MTP: the head trained with its target to predict the token after next, a decoder layer over its last state."""

import inspect
from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import Cache, DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from specctl.errors import ModelError, reason
from specctl.models.draft_heads.chain import ChainHead, ChainPass, last_of
from specctl.models.draft_heads.file_layout import ANEW, HeadFile, Verifier, published_weights
from specctl.models.draft_heads.head import Borrowed
from specctl.models.draft_heads.mtp_tensors import mtp_tensors
from specctl.models.passes.cache import cache_argument
from specctl.models.passes.layer_sizes import attention_values, layer_configs
from specctl.models.passes.masks import WITH_MASKS
from specctl.models.running.context import ENDLESS, context_length

if TYPE_CHECKING:
    from specctl.models.draft_heads.kinds import Recipe
    from specctl.models.draft_heads.training import Given, Lesson, Step

_HINT = "Draft with a small model instead, or use a head of another kind that was made for this target."


def mtp_config(target: PreTrainedModel, *, sparse: bool) -> PreTrainedConfig:
    """The configuration of a target's MTP layer: the target's own with one layer, possibly a mixture of experts.

    Raises:
        ModelError: the layer cannot run over a cache of plain keys and values.
    """
    layers = layer_configs(target.config)
    kinds = getattr(layers[-1], "layer_types", None) or [None] * len(layers)
    # In hybrid models the MTP layer has full attention, unless the configuration says otherwise.
    like = max(range(len(layers)), key=lambda layer: (kinds[layer] == "full_attention", layer))
    config: Any = deepcopy(layers[like])
    config.num_hidden_layers = 1
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = list(getattr(config, "mtp_layer_types", None) or [kinds[like]])[:1]
    # Families have different keys for the first layer with experts.
    depths = {
        "mlp_layer_types": ["sparse" if sparse else "dense"],
        "first_k_dense_replace": 0 if sparse else 1,
        "mlp_only_layers": [] if sparse else [0],
        "decoder_sparse_step": 1,
    }
    for key, value in depths.items():
        if getattr(config, key, None) is not None:
            setattr(config, key, value)
    if config._attn_implementation not in WITH_MASKS:
        raise _cannot_run(config, "its attention takes no ready-made mask")
    if type(DynamicCache(config=config).layers[0]) is not DynamicLayer:
        raise _cannot_run(config, "it has a sliding window, a recurrent state or a cache of its own kind")
    return config  # type: ignore[no-any-return]


class MtpHead(ChainHead):
    """One decoder layer of the target's class, applied recursively for further tokens.

    For token x_p and the features f of place p - 1 it computes
    ``f' = norm(block(eh_proj([enorm(E[x_p]); hnorm(f)])))`` and the logits ``W f'`` of token x_(p+1). E and W are the
    target's embeddings and output layer, unless the head has its own. The first features are the target's last state
    after its final norm; f' are the next (DeepSeek-V3, arXiv:2412.19437, equations 21 to 23; applied recursively as in
    FastMTP, arXiv:2509.18362).

    Args:
        target: the verifier, in eval mode; its modules are not part of the head.
        sparse: whether the layer's MLP is a mixture of experts.
        own_embeddings: whether the head has embeddings of its own.
        own_output: whether it has an output layer of its own.

    Raises:
        ModelError: layers of the target's kind cannot draft this way.
    """

    kind = "mtp"
    layers = (-1,)
    num_layers = 1

    def __init__(
        self, target: PreTrainedModel, *, sparse: bool = False, own_embeddings: bool = False, own_output: bool = False
    ) -> None:
        super().__init__()
        config: Any = mtp_config(target, sparse=sparse)
        decoder: Any = target.get_decoder()  # type: ignore[no-untyped-call]
        lacks = [part for part in ("layers", "norm", "rotary_emb") if getattr(decoder, part, None) is None]
        if lacks or set(inspect.signature(decoder.rotary_emb.forward).parameters) != {"x", "position_ids"}:
            raise _cannot_run(config, f"its decoder has no {lacks[0]}" if lacks else "its layers rotate differently")
        norm = type(decoder.norm)
        self.width = self.state_size = int(config.hidden_size)
        self.context = context_length(target) or ENDLESS
        self.enorm = norm(self.width, eps=config.rms_norm_eps)
        self.hnorm = norm(self.width, eps=config.rms_norm_eps)
        self.eh_proj = nn.Linear(2 * self.width, self.width, bias=False)
        self.block = type(decoder.layers[-1])(config, 0)
        self._cache_argument = cache_argument(type(self.block))
        self.norm = norm(self.width, eps=config.rms_norm_eps)
        output: Any = target.get_output_embeddings()  # type: ignore[no-untyped-call]
        self.draft_vocabulary: int = config.vocab_size if output is None else output.weight.shape[0]
        self.vocabulary = self.draft_vocabulary
        self.cached_values = attention_values(config)
        if own_embeddings:
            self.embed_tokens = nn.Embedding(config.vocab_size, self.width)
        if own_output:
            self.lm_head = nn.Linear(self.width, self.draft_vocabulary, bias=False)
        self.share(target.get_input_embeddings(), output)
        self._rotary = Borrowed(decoder.rotary_emb)
        # Multimodal rotary embeddings need a position for each of three axes.
        self._axes = 3 if hasattr(decoder.rotary_emb, "mrope_section") else 0
        # Inkling's order; all others put the embedding first.
        self._state_first = bool(getattr(config, "mtp_hidden_states_first", False))
        self.eval()

    def share(self, embeddings: nn.Module, output: nn.Module | None) -> None:
        """Use these modules where the head has none of its own: the target's, or copies in the head's dtype."""
        self._embeddings = None if "embed_tokens" in self._modules else Borrowed(embeddings)
        self._output = None if "lm_head" in self._modules else Borrowed(output)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Embeddings ``(..., H)`` of ids ``(...)``, as the target embeds."""
        found: torch.Tensor = (self._embeddings.module if self._embeddings else self.embed_tokens)(ids)
        return found

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "MtpHead":
        # Buffers must not be cast: the router's correction is float32 in every model.
        before = dict(self.named_buffers())
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, buffer in self.named_buffers():
            buffer.data = before[name].to(buffer.device)
        return self

    def fuse(self, states: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """The features ``(T, H)`` are the target's last states as they are."""
        return states[-1]

    def forward(
        self,
        ids: torch.Tensor,
        features: torch.Tensor,
        positions: torch.Tensor,
        mask: torch.Tensor,
        cache: Cache,
        keep: int | torch.Tensor = 0,
    ) -> ChainPass:
        embedded = self.embed(ids).to(features)  # (1, T, H)
        parts = [self.enorm(embedded), self.hnorm(features)]
        places = positions[None]
        axes = places.expand(self._axes, 1, -1) if self._axes else places
        states = self.block(
            self.eh_proj(torch.cat(parts[::-1] if self._state_first else parts, dim=-1)),
            attention_mask=mask,
            position_ids=places,
            position_embeddings=self._rotary.module(embedded, axes),
            **{self._cache_argument: cache},
        )
        states = self.norm(last_of(states, keep))  # (keep, H)
        return ChainPass(self.output_layer(states), states, states)


def _cannot_run(config: Any, why: str) -> ModelError:
    return ModelError(f"The MTP layer of a {config.model_type} target cannot run here: {why}.", _HINT)


_OTHER = "Use a head that was made for this target."
_KNOWN_KEYS = {
    "architectures",
    "auto_map",
    "dtype",
    "num_nextn_predict_layers",
    "speculators_config",
    "speculators_model_type",
    "speculators_version",
    "tie_word_embeddings",
    "transformer_layer_config",
    "transformers_version",
}
_ALIKE = (
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "num_experts_per_tok",
    "norm_topk_prob",
    "rope_parameters",
)
"""Configuration keys that shapes do not reveal, or that explain a wrong shape."""


_LAYER = "mtp_layers.0"
NAMES = {
    "block.": f"{_LAYER}.",
    "eh_proj.": f"{_LAYER}.input_proj.",
    "enorm.": f"{_LAYER}.token_layernorm.",
    "hnorm.": f"{_LAYER}.hidden_layernorm.",
    "norm.": f"{_LAYER}.final_layernorm.",
}
"""Prefixes of weight names in speculators' layout, by prefix in the network."""


def read(file: HeadFile) -> MtpHead:
    """A target's MTP head from tensors in any of the known layouts; see `read_head`.

    The configuration is the target's own or speculators'. Only the first MTP layer is used, recursively.
    """
    weights, target, subject = file.weights, file.target, file.subject
    if "speculators_model_type" in file.config:
        _require_alike(file.config, file.text, subject)
    found = mtp_tensors(weights, file.text.num_hidden_layers)
    names = {own: name for name, own in found.first.items()}
    if unknown := sorted(weights.keys() - found.places.keys()):
        raise ModelError(f"{subject} holds unknown tensors: {', '.join(unknown)}.", ANEW)
    named = {own: weights[name] for own, name in names.items()}
    for own, weight in named.items():
        _require_plain(names[own], weight, subject)
    # A repeated copy of the target's weights would only take memory.
    for own, module in (
        ("embed_tokens.weight", target.get_input_embeddings()),
        ("lm_head.weight", target.get_output_embeddings()),  # type: ignore[no-untyped-call]
    ):
        if own in named and _same(named[own], getattr(module, "weight", None)):
            del named[own]
    with torch.device("meta"):
        head = MtpHead(
            target,
            sparse=any(".experts." in own for own in named),
            own_embeddings="embed_tokens.weight" in named,
            own_output="lm_head.weight" in named,
        )
    expected = head.state_dict()
    named = _fused(named, expected, subject)
    # A missing tensor is reported by the network's name, because no file names it.
    names = {own: names.get(own, own.removeprefix("block.")) for own in {**expected, **named}}
    file.fill(head, {names[own]: weight for own, weight in named.items()}, names)
    if left := [name for name, buffer in head.named_buffers() if buffer.is_meta]:
        raise ModelError(f"{subject} has a layer that computes {left[0]} itself, which specctl does not do.")
    return head


def describe(head: MtpHead, verifier: Verifier) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """An MTP head without embeddings and output layer of its own in speculators' layout; see `HeadKind`."""
    described = {
        "architectures": ["MTPDraftModel"],
        "transformer_layer_config": dict(verifier.layers),
        "num_nextn_predict_layers": 1,
        "tie_word_embeddings": False,
    }
    return described, published_weights(head, NAMES)


def _fused(
    weights: dict[str, torch.Tensor], expected: Mapping[str, torch.Tensor], subject: str
) -> dict[str, torch.Tensor]:
    """Weights with all experts fused into one tensor ``(experts, out, in)``, if the layer expects this."""
    fused = dict(weights)

    def stacked(experts: str, part: str, count: int) -> torch.Tensor:
        own = [f"{experts}.{number}.{part}_proj.weight" for number in range(count)]
        if missing := [name for name in own if name not in fused]:
            raise ModelError(f"{subject} lacks tensors: {missing[0].removeprefix('block.')}.", ANEW)
        single = [fused.pop(name) for name in own]
        if len(shapes := {tuple(weight.shape) for weight in single}) > 1:
            raise ModelError(f"{subject} has experts of several shapes: {sorted(shapes)}.", ANEW)
        return torch.stack(single)

    for name, weight in expected.items():
        experts = name.removesuffix(".down_proj")
        if name not in fused and weight.ndim == 3 and f"{experts}.gate_up_proj" in expected:
            gate, up, down = (stacked(experts, part, len(weight)) for part in ("gate", "up", "down"))
            fused |= {f"{experts}.gate_up_proj": torch.cat([gate, up], 1), name: down}
    return fused


def _require_plain(name: str, weight: torch.Tensor, subject: str) -> None:
    if weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ModelError(
            f"{subject} is quantised or damaged: {name} is of dtype {weight.dtype}.",
            "Use a checkpoint of this target that is not quantised; `quantize` quantises a target as it is loaded.",
        )


def _same(weight: torch.Tensor, other: Any) -> bool:
    """Whether two weights are equal up to the dtype. If they cannot be compared (meta device), they count as equal, as
    published ones are.
    """
    if other is None or not other.is_floating_point() or other.shape != weight.shape:
        return False
    return other.is_meta or bool((weight.to(other.device, other.dtype) == other).all())


def _require_alike(config: Mapping[str, Any], text: Any, subject: str) -> None:
    """Raise a ModelError unless speculators' configuration describes one layer like the target's."""
    if unknown := sorted(set(config) - _KNOWN_KEYS):
        raise ModelError(
            f"{subject}: its config.json has keys that specctl does not know: {', '.join(unknown)}.", _OTHER
        )
    if (count := config.get("num_nextn_predict_layers", 1)) != 1:
        raise ModelError(f"{subject} has num_nextn_predict_layers = {count!r}; specctl knows heads with 1.", _OTHER)
    layer = config.get("transformer_layer_config")
    layer = dict(layer) if isinstance(layer, Mapping) else {}
    if (kind := layer.pop("model_type", None)) != text.model_type:
        raise ModelError(f"{subject} is for layers of kind {kind!r}; the verifier's are {text.model_type!r}.", _OTHER)
    try:
        made = type(text)(**layer)
    except (StrictDataclassError, TypeError, ValueError) as error:
        raise ModelError(f"{subject}: transformers rejects its transformer_layer_config ({reason(error)}).") from error
    for key in _ALIKE:
        own, target = getattr(made, key, None), getattr(text, key, None)
        if own != target:
            raise ModelError(f"{subject} is for a model with {key} = {own!r}; the verifier's is {target!r}.", _OTHER)


STEP_DECAY = 0.6  # Decay of the loss weight from step to step (FastMTP, arXiv 2509.18362)


def new(_: "Recipe", given: "Given") -> MtpHead:
    """A head to train; see `HeadKind`."""
    from specctl.models.draft_heads.training import drawn

    head = MtpHead(given.target).float()
    head.share(given.embeddings, given.output)
    return drawn(head)


def loss(head: MtpHead, lesson: "Lesson", recipe: "Recipe", _: torch.Generator) -> torch.Tensor:
    """The loss of an answer; see `HeadKind`."""
    from specctl.models.draft_heads.training import drafted_steps

    steps = drafted_steps(head, lesson, recipe.steps)
    return torch.stack([step_loss(step, lesson, recipe.steps) for step in steps]).sum()


def step_loss(step: "Step", lesson: "Lesson", steps: int) -> torch.Tensor:
    """FastMTP's loss of one of ``steps`` steps: cross-entropy with the answer's tokens, summed."""
    from specctl.models.draft_heads.training import text_loss

    weight = STEP_DECAY**step.index / sum(STEP_DECAY**index for index in range(steps))
    return weight * text_loss(step, lesson)
