"""The weights of a synthetic pair.

The draft is an untrained Llama. The target contains the same function inside its larger shape; its further layers
disturb that function, damped by a factor that sets how often the two agree.
"""

from math import sqrt

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tools.synthetic.shapes import MARK, Dials, Shape, Traits, require_room

ROPE_THETA = 500_000.0
EPSILON = 1e-5


def build_pair(
    target: Shape, draft: Shape, dials: Dials, *, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> tuple[LlamaForCausalLM, LlamaForCausalLM]:
    """Target and draft, the same for the same arguments on the same kind of device.

    Raises:
        ValueError: the target's shape has no room for the draft's function.
    """
    require_room(target, draft)
    large, small = (
        _untrained(target, draft, dtype, device, dials.seed),
        _untrained(draft, draft, dtype, device, dials.seed + 1),
    )
    with torch.no_grad():
        _give_successors(small, draft, dials)
        _embed(small, draft, large, target)
        for layer in large.model.layers[draft.layers :]:
            layer.self_attn.o_proj.weight.mul_(dials.damping)
            layer.mlp.down_proj.weight.mul_(dials.damping)
    return large, small


@torch.inference_mode()
def measure(target: LlamaForCausalLM, draft: LlamaForCausalLM, *, tokens: int = 256, seed: int = 0) -> Traits:
    """What the pair is like on one random text."""
    draws = torch.Generator().manual_seed(seed)
    ids = torch.randint(draft.config.vocab_size, (1, tokens), generator=draws).to(draft.device)
    theirs, ours = target(ids.to(target.device)).logits[0].argmax(-1), draft(ids).logits[0].float()  # (T,), (T, V)
    entropies = torch.special.entr(ours.softmax(-1)).sum(-1)
    agreed = (ours.argmax(-1).to(theirs.device) == theirs).float().mean()
    return Traits(float(agreed), float(entropies.mean()), float(entropies.std()))


def dial(target: LlamaForCausalLM, draft: LlamaForCausalLM, dials: Dials, agreement: float, steps: int = 10) -> float:
    """Change the target's damping until the pair agrees about as often as asked; returns the damping found."""
    own = list(target.model.layers[draft.config.num_hidden_layers :])
    low, high, now = 0.0, 4.0, dials.damping
    for _ in range(steps):
        middle = (low + high) / 2
        with torch.no_grad():
            for layer in own:
                layer.self_attn.o_proj.weight.mul_(middle / now)
                layer.mlp.down_proj.weight.mul_(middle / now)
        now = middle
        low, high = (middle, high) if measure(target, draft).agreement > agreement else (low, middle)
    return now


def _untrained(shape: Shape, draft: Shape, dtype: torch.dtype, device: str, seed: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.context,
        # Normed over more places of which only the draft's are filled, the same vector has a smaller mean square.
        rms_norm_eps=EPSILON * draft.hidden / shape.hidden,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        bos_token_id=None,
        eos_token_id=None,
        tie_word_embeddings=False,
        dtype=dtype,
    )
    setattr(config, MARK, True)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.random.fork_rng(devices=[]), torch.device(device):
            torch.manual_seed(seed)
            model = LlamaForCausalLM(config)
            model.eval()  # type: ignore[no-untyped-call]
            with torch.no_grad():
                model.model.embed_tokens.weight.normal_()
                model.lm_head.weight.normal_(std=1 / sqrt(shape.hidden))
                # Every matrix keeps the size of what it is given, and all layers together match the embedding.
                for name, weight in model.model.layers.named_parameters():
                    if weight.dim() == 2:
                        outwards = name.endswith(("o_proj.weight", "down_proj.weight"))
                        weight.normal_(std=1 / sqrt(weight.shape[1] * (2 * shape.layers if outwards else 1)))
    finally:
        torch.set_default_dtype(before)
    return model


def _give_successors(draft: LlamaForCausalLM, shape: Shape, dials: Dials) -> None:
    """An output head of random rows; the row of an easy token's successor points along that token's embedding too."""
    draws = torch.Generator().manual_seed(dials.seed)
    head, words = draft.lm_head.weight, draft.model.embed_tokens.weight  # (V, D), (V, D)
    head *= dials.sharpness
    order = torch.randperm(shape.vocabulary, generator=draws)
    easy = order[: round(dials.easy * shape.vocabulary)].to(head.device)
    successors = torch.randperm(shape.vocabulary, generator=draws).to(head.device)[easy]
    along = words[easy] / words[easy].norm(dim=-1, keepdim=True)
    head[successors] += (dials.gain * dials.sharpness * sqrt(2 / shape.hidden) * along).to(head.dtype)


def _embed(small: LlamaForCausalLM, draft: Shape, large: LlamaForCausalLM, target: Shape) -> None:
    """Put the draft's function into the first places and layers of the target.

    Behind the draft's places the residual stream stays zero through its layers, so that what the target's matrices
    hold for those places, which is random, does not matter there.
    """
    places, shrink = draft.hidden, sqrt(draft.hidden / target.hidden)
    ratio = target.head_dim // draft.head_dim
    # A head's places turn in pairs (i, i + half) at rates theta^(-2i / size): those of the larger head that turn alike.
    half = torch.arange(draft.head_dim // 2)
    inside = torch.cat([half * ratio, half * ratio + target.head_dim // 2])  # (head_dim of the draft,)
    group, large_group = draft.heads // draft.kv_heads, target.heads // target.kv_heads
    slots = torch.arange(draft.heads) // group * large_group + torch.arange(draft.heads) % group
    device = large.lm_head.weight.device
    queries = (slots[:, None] * target.head_dim + inside).flatten().to(device)
    keys = (torch.arange(draft.kv_heads)[:, None] * target.head_dim + inside).flatten().to(device)

    for theirs, ours in ((large.model.embed_tokens, small.model.embed_tokens), (large.lm_head, small.lm_head)):
        theirs.weight[:, :places] = ours.weight
        theirs.weight[:, places:] = 0
    large.model.norm.weight.fill_(shrink)
    for layer, theirs in zip(small.model.layers, large.model.layers, strict=False):
        theirs.input_layernorm.weight.fill_(shrink)
        theirs.post_attention_layernorm.weight.fill_(shrink)
        attention, wide = layer.self_attn, theirs.self_attn
        wide.q_proj.weight[queries, :places] = attention.q_proj.weight * sqrt(ratio)  # scores are divided by more
        wide.k_proj.weight.zero_()  # or a head's other places would add to its scores
        wide.k_proj.weight[keys, :places] = attention.k_proj.weight
        wide.v_proj.weight[keys, :places] = attention.v_proj.weight
        wide.o_proj.weight.zero_()
        wide.o_proj.weight[:places, queries] = attention.o_proj.weight
        inner = draft.intermediate
        theirs.mlp.gate_proj.weight[:inner, :places] = layer.mlp.gate_proj.weight
        theirs.mlp.up_proj.weight[:inner, :places] = layer.mlp.up_proj.weight
        theirs.mlp.down_proj.weight.zero_()
        theirs.mlp.down_proj.weight[:places, :inner] = layer.mlp.down_proj.weight
