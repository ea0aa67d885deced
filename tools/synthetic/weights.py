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
    """Build target and draft; equal arguments give equal weights on the same kind of device.

    Raises:
        ValueError: the target's shape cannot contain the draft's function.
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
    """Measure the pair on one random text of ``tokens`` tokens."""
    draws = torch.Generator().manual_seed(seed)
    ids = torch.randint(draft.config.vocab_size, (1, tokens), generator=draws).to(draft.device)
    best, logits = target(ids.to(target.device)).logits[0].argmax(-1), draft(ids).logits[0].float()  # (T,), (T, V)
    entropies = torch.special.entr(logits.softmax(-1)).sum(-1)
    agreed = (logits.argmax(-1).to(best.device) == best).float().mean()
    return Traits(float(agreed), float(entropies.mean()), float(entropies.std()))


def dial(target: LlamaForCausalLM, draft: LlamaForCausalLM, dials: Dials, agreement: float, steps: int = 10) -> float:
    """Change the target's damping until the pair agrees at about this share of positions; return the damping."""
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
        **shape.config,
        head_dim=shape.head_dim,
        # The target norms over more dimensions, of which only the draft's are filled: the mean square is smaller.
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
                # Every matrix keeps the norm of its input, and the sum of all layers matches the embedding.
                for name, weight in model.model.layers.named_parameters():
                    if weight.dim() == 2:
                        outwards = name.endswith(("o_proj.weight", "down_proj.weight"))
                        weight.normal_(std=1 / sqrt(weight.shape[1] * (2 * shape.layers if outwards else 1)))
    finally:
        torch.set_default_dtype(before)
    return model


def _give_successors(draft: LlamaForCausalLM, shape: Shape, dials: Dials) -> None:
    """Scale the random output head; add each easy token's embedding to the head row of its successor."""
    draws = torch.Generator().manual_seed(dials.seed)
    head, words = draft.lm_head.weight, draft.model.embed_tokens.weight  # (V, D), (V, D)
    head *= dials.sharpness
    order = torch.randperm(shape.vocabulary, generator=draws)
    easy = order[: round(dials.easy * shape.vocabulary)].to(head.device)
    successors = torch.randperm(shape.vocabulary, generator=draws).to(head.device)[easy]
    along = words[easy] / words[easy].norm(dim=-1, keepdim=True)
    head[successors] += (dials.gain * dials.sharpness * sqrt(2 / shape.hidden) * along).to(head.dtype)


def _embed(small: LlamaForCausalLM, draft: Shape, large: LlamaForCausalLM, target: Shape) -> None:
    """Put the draft's function into the first dimensions and layers of the target.

    The residual stream stays zero in the target's further dimensions through these layers, so that the random weights
    that read those dimensions have no effect there.
    """
    width, shrink = draft.hidden, sqrt(draft.hidden / target.hidden)
    ratio = target.head_dim // draft.head_dim
    # RoPE rotates dimensions (i, i + half) at rate theta^(-2i / size): pick those of the larger head with equal rates.
    half = torch.arange(draft.head_dim // 2)
    inside = torch.cat([half * ratio, half * ratio + target.head_dim // 2])  # (head_dim of the draft,)
    group, large_group = draft.heads // draft.kv_heads, target.heads // target.kv_heads
    slots = torch.arange(draft.heads) // group * large_group + torch.arange(draft.heads) % group
    device = large.lm_head.weight.device
    queries = (slots[:, None] * target.head_dim + inside).flatten().to(device)
    keys = (torch.arange(draft.kv_heads)[:, None] * target.head_dim + inside).flatten().to(device)

    for theirs, ours in ((large.model.embed_tokens, small.model.embed_tokens), (large.lm_head, small.lm_head)):
        theirs.weight[:, :width] = ours.weight
        theirs.weight[:, width:] = 0
    large.model.norm.weight.fill_(shrink)
    for layer, theirs in zip(small.model.layers, large.model.layers, strict=False):
        theirs.input_layernorm.weight.fill_(shrink)
        theirs.post_attention_layernorm.weight.fill_(shrink)
        attention, wide = layer.self_attn, theirs.self_attn
        wide.q_proj.weight[queries, :width] = attention.q_proj.weight * sqrt(
            ratio
        )  # larger heads divide scores by more
        wide.k_proj.weight.zero_()  # otherwise the head's other dimensions would add to its scores
        wide.k_proj.weight[keys, :width] = attention.k_proj.weight
        wide.v_proj.weight[keys, :width] = attention.v_proj.weight
        wide.o_proj.weight.zero_()
        wide.o_proj.weight[:width, queries] = attention.o_proj.weight
        inner = draft.intermediate
        theirs.mlp.gate_proj.weight[:inner, :width] = layer.mlp.gate_proj.weight
        theirs.mlp.up_proj.weight[:inner, :width] = layer.mlp.up_proj.weight
        theirs.mlp.down_proj.weight.zero_()
        theirs.mlp.down_proj.weight[:width, :inner] = layer.mlp.down_proj.weight
