"""Pairs of any real shape without real weights, for measuring speed where there are none to be had.

The draft is an untrained Llama. The target holds the same function inside its larger shape and then lets further layers
disturb it; their outputs are damped by a factor that sets how often the two agree. Some tokens have a likely
successor, the others have not, so that easy and hard positions alternate. What such a pair writes is noise: its
acceptance rate and entropy are set, not found, and every number that comes of it is to be called synthetic.

    python -m tools.synthetic_pair llama3-8b-1b FOLDER

writes both checkpoints, prompts of 128 and 2,048 tokens, and a profile for ``specctl bench --profile``.
"""

import argparse
import json
from dataclasses import dataclass
from math import sqrt
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from specctl.models.loading.model import hushed
from specctl.profile.writing import write_profile

MARK = "synthetic"
"""True in the configuration of every such model."""
ROPE_THETA = 500_000.0
EPSILON = 1e-5


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a Llama; every model of a pair has the same vocabulary."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    intermediate: int
    vocabulary: int
    context: int = 8192

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


SHAPES: dict[str, tuple[Shape, Shape]] = {
    "llama3-8b-1b": (Shape(32, 4096, 32, 8, 14336, 128256), Shape(16, 2048, 32, 8, 8192, 128256)),
    "llama2-7b-68m": (Shape(32, 4096, 32, 32, 11008, 32000), Shape(2, 768, 12, 12, 3072, 32000)),
    # Layers of Llama 3 70B, 34 of its 80, so that one large GPU holds them beside the draft.
    "llama3-70b-cut-8b": (Shape(34, 8192, 64, 8, 28672, 128256), Shape(32, 4096, 32, 8, 14336, 128256)),
    "tiny": (Shape(5, 64, 8, 4, 160, 512, 256), Shape(2, 32, 4, 2, 96, 512, 256)),
}


@dataclass(frozen=True, slots=True)
class Dials:
    """What a synthetic pair is made to be.

    Attributes:
        damping: factor on the outputs of the target's own layers; 0 is a target that always agrees with the draft.
        sharpness: standard deviation of the logits of a token without a likely successor.
        easy: share of tokens that have one.
        gain: how far, in such deviations, the successor's logit stands above the others' mean.
        seed: of all weights.
    """

    damping: float = 0.3
    sharpness: float = 2.0
    easy: float = 0.5
    gain: float = 7.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Traits:
    """What a pair turns out to be on random text.

    Attributes:
        agreement: share of positions at which both have the same argmax: the acceptance rate of greedy decoding.
        entropy, entropy_deviation: of the draft's distribution, in nats.
    """

    agreement: float
    entropy: float
    entropy_deviation: float


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


def tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """One token a byte, the rest of the vocabulary being tokens that no text contains; no end of sequence."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [*letters, *(f"<{MARK}-{place}>" for place in range(len(letters), vocabulary))]
    core = Tokenizer(models.BPE(vocab={name: place for place, name in enumerate(names)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core)  # type: ignore[no-untyped-call]


def write_pair(folder: Path, name: str, target: LlamaForCausalLM, draft: LlamaForCausalLM, traits: Traits) -> None:
    """Checkpoints, profile and prompts in a folder; all of them say that they are synthetic."""
    words = tokenizer(draft.config.vocab_size)
    with hushed(verbose=False):
        for role, model in (("target", target), ("draft", draft)):
            model.save_pretrained(folder / role)
            words.save_pretrained(folder / role)
    table = {"device": "auto", "dtype": str(target.dtype).removeprefix("torch.")}
    profile = {
        "schema_version": 1,
        "description": f"SYNTHETIC pair of the shape {name}: random weights, agreement set to {traits.agreement:.2f}",
        "target": {"model": str((folder / "target").absolute()), **table},
        "draft": {"model": str((folder / "draft").absolute()), **table, "policy": {"name": "constant"}},
        "provenance": {MARK: True, "agreement": traits.agreement, "entropy": traits.entropy},
    }
    write_profile(folder / "profile.toml", profile, overwrite=True)
    draws = torch.Generator().manual_seed(1)
    with (folder / "prompts.jsonl").open("w", encoding="utf-8") as file:
        for length in (128, 2048):
            if length < target.config.max_position_embeddings:
                for place in range(4):
                    letters = torch.randint(97, 123, (length,), generator=draws).tolist()
                    record = {
                        "id": f"{length}-{place}",
                        "category": f"{length} tokens",
                        "prompt": "".join(map(chr, letters)),
                    }
                    file.write(json.dumps(record) + "\n")


def require_room(target: Shape, draft: Shape) -> None:
    """Raise ValueError where a target of one shape cannot hold the function of a draft of the other."""
    ratio, rest = divmod(target.head_dim, draft.head_dim)
    fits = (
        target.vocabulary == draft.vocabulary
        and target.layers > draft.layers
        and target.hidden >= draft.hidden
        and target.intermediate >= draft.intermediate
        and target.kv_heads >= draft.kv_heads
        and target.heads // target.kv_heads >= draft.heads // draft.kv_heads
        and ratio >= 1
        and rest == 0
    )
    if not fits:
        raise ValueError(
            "the target must have more layers than the draft, the same vocabulary, at least its sizes, and heads whose "
            "size is a multiple"
        )


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


def main() -> None:
    usual = Dials()
    summary = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m tools.synthetic_pair", description=summary)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--agreement", type=float, default=0.8, help="how often both choose the same token (0.8)")
    parser.add_argument("--sharpness", type=float, default=usual.sharpness, help="spread of the logits")
    parser.add_argument("--easy", type=float, default=usual.easy, help="share of tokens with a likely successor")
    parser.add_argument("--seed", type=int, default=usual.seed)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    given = parser.parse_args()
    dials = Dials(sharpness=given.sharpness, easy=given.easy, seed=given.seed)
    target, draft = build_pair(*SHAPES[given.shape], dials, dtype=getattr(torch, given.dtype), device=given.device)
    damping = dial(target, draft, dials, given.agreement)
    traits = measure(target, draft, tokens=512, seed=1)
    write_pair(given.folder, given.shape, target, draft, traits)
    print(f"synthetic pair in {given.folder}: damping {damping:.3f}, {traits}")


if __name__ == "__main__":
    main()
