"""Reference data for EAGLE heads: what the published implementations of EAGLE-1 and EAGLE-3 compute.

    python -m tools.reference_heads.eagle tests/data/draft_heads EAGLE/eagle/model

writes a tiny checkpoint with random weights for each variant, in its published layout, and ``expected.safetensors``
beside it. The second argument is that folder of github.com/SafeAILab/EAGLE at cb7e084. Importable have to be

- `speculators` 0.9.0 from PyPI,
- `deepspec` of github.com/deepseek-ai/DeepSpec at afdfa7c.

``expected.safetensors`` holds the verifier's part and what the head makes of it, T places, for each step s of the
recursion from 0 on:

- ``ids`` (T + STEPS - 1,): the token after each place; place i is read with ``ids[i]``;
- ``states.{layer}`` (T, width): i is the input of decoder layer i, -1 the last state;
- ``logits.{s}`` (T, D): row i is what the head says after true rows up to place i and s rows of its own;
- ``embed`` and ``unembed``, the verifier's weights, where the head uses them.
"""

import json
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file

VOCABULARY, DRAFT_VOCABULARY, WIDTH, DEPTH = 96, 40, 32, 8
PLACES, STEPS = 9, 3
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 2.0,
    "original_max_position_embeddings": 64,
}

Tensors = dict[str, torch.Tensor]


def layer_settings(**more: Any) -> dict[str, Any]:
    """Keys that all of the configurations share."""
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_act": "silu",
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        **more,
    }


def randomised(model: Any, deviation: float = 0.3) -> Any:
    """The model with weights large enough that every part of it matters."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(0.0, deviation)
            if "norm" in name:
                parameter.add_(1.0)
    return model.eval()


def draft_vocabulary() -> tuple[torch.Tensor, torch.Tensor]:
    """``d2t`` and ``t2d`` of a random choice of tokens."""
    ids = torch.randperm(VOCABULARY)[:DRAFT_VOCABULARY].sort().values
    return ids - torch.arange(DRAFT_VOCABULARY), torch.zeros(VOCABULARY, dtype=torch.bool).index_fill(0, ids, True)


def inputs(layers: tuple[int, ...]) -> Tensors:
    found = {f"states.{layer}": torch.randn(PLACES, WIDTH) for layer in layers}
    found["ids"] = torch.randint(0, VOCABULARY, (PLACES + STEPS - 1,))
    return found


def joined(given: Tensors) -> torch.Tensor:  # (1, T, sources * width)
    return torch.cat([tensor for name, tensor in given.items() if name.startswith("states.")], -1)[None]


def write(folder: Path, config: dict[str, Any], weights: Tensors, expected: Tensors) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    for name, tensors in (("model", weights), ("expected", expected)):
        own = {key: tensor.detach().clone().contiguous() for key, tensor in tensors.items()}
        save_file(own, folder / f"{name}.safetensors", metadata={"format": "pt"})


def from_speculators(folder: Path, model_type: str, layer: dict[str, Any], **more: Any) -> None:
    """speculators gives logits of all places and steps at once, as it trains."""
    package = import_module("speculators")
    eagle3 = import_module("speculators.models.eagle3")
    greedy = import_module("speculators.proposals.greedy").GreedyTokenProposalConfig(speculative_tokens=STEPS)
    inner = import_module("transformers").AutoConfig.for_model(model_type, **layer_settings(head_dim=8, **layer))
    inner._attn_implementation = "sdpa"
    layers = (2, 4, 5)
    config = eagle3.Eagle3SpeculatorConfig(
        transformer_layer_config=inner,
        draft_vocab_size=DRAFT_VOCABULARY,
        eagle_aux_hidden_state_layer_ids=list(layers),
        speculators_config=package.SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[greedy],
            default_proposal_method="greedy",
            verifier=package.VerifierConfig(name_or_path="example/verifier", architectures=["LlamaForCausalLM"]),
        ),
        **more,
    )
    model = randomised(eagle3.Eagle3DraftModel(config))
    d2t, t2d = draft_vocabulary()
    model.load_vocab_mappings(t2d, d2t)
    given = inputs(layers)
    logits: list[torch.Tensor] = []
    model.lm_head.register_forward_hook(lambda _module, _given, output: logits.append(output[0]))
    ids = given["ids"]
    # Later steps run out of tokens at the end, so the sequence is longer than what is kept of it.
    padding = torch.randn(1, STEPS - 1, 3 * WIDTH)
    with torch.no_grad():
        model(torch.cat([joined(given), padding], 1), ids[None], torch.zeros(1, len(ids)).long(), ttt_steps=STEPS)
    expected = given | {f"logits.{step}": rows[:PLACES] for step, rows in enumerate(logits)}
    model.save_pretrained(folder)
    for code in folder.glob("*.py"):
        code.unlink()
    saved = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    weights = {name: weight for name, weight in model.state_dict().items() if not name.startswith("verifier_")}
    write(folder, saved, weights, expected)


def chained(given: Tensors, begin: Any, step: Any) -> Tensors:
    """Logits of all places and steps of an implementation that drafts from one place at a time.

    Args:
        given: as made by `inputs`.
        begin: of the number of true rows to the logits after them ``(D,)`` and what `step` needs.
        step: of that, the next token and its position to the same.
    """
    rows: list[list[torch.Tensor]] = [[] for _ in range(STEPS)]
    with torch.no_grad():
        for place in range(PLACES):
            logits, kept = begin(place + 1)
            rows[0].append(logits)
            for index in range(1, STEPS):
                logits, kept = step(kept, given["ids"][place + index], place + index)
                rows[index].append(logits)
    return given | {f"logits.{index}": torch.stack(each) for index, each in enumerate(rows)}


def from_eagle(folder: Path, version: int, **more: Any) -> None:
    """EAGLE's own networks: cnets (EAGLE-3) and cnets1 (EAGLE-1 and -2)."""
    settings = layer_settings(pad_token_id=0, **more)
    # Not its own class of configurations, whose rope_scaling transformers 5 takes for itself.
    config = SimpleNamespace(**settings, pretraining_tp=1, rope_scaling=None)
    given = inputs((2, 4, 5) if version == 3 else (-1,))
    if version == 3:
        model = randomised(import_module("cnets").Model(config))
        model.d2t, model.t2d = draft_vocabulary()
    else:
        # No norm keeps its rows from growing step by step, and float32 is compared to so many places only.
        model = randomised(import_module("cnets1").Model(config, bias=settings.get("bias", True)), 0.15)
        given["unembed"] = torch.randn(VOCABULARY, WIDTH) * 0.3
    weights = dict(model.state_dict())
    # A published file may leave the verifier's embeddings out; here EAGLE-1's does.
    if version == 1:
        given["embed"] = weights.pop("embed_tokens.weight")

    def logits(row: torch.Tensor) -> torch.Tensor:
        read: torch.Tensor = model.lm_head(model.norm(row)) if version == 3 else row @ given["unembed"].T
        return read

    def begin(count: int) -> tuple[torch.Tensor, Any]:
        rows, cache = model(joined(given)[:, :count], given["ids"][None, :count], use_cache=True)
        return logits(rows[0, -1]), (rows[:, -1:], cache)

    def step(kept: Any, token: torch.Tensor, position: int) -> tuple[torch.Tensor, Any]:
        rows, cache = kept
        where = torch.tensor([[position]])
        rows, cache = model(rows, token.view(1, 1), past_key_values=cache, position_ids=where, use_cache=True)
        return logits(rows[0, -1]), (rows[:, -1:], cache)

    names = {"architectures": ["LlamaForCausalLMEagle3" if version == 3 else "LlamaForCausalLM"]}
    published = {**names, "model_type": "llama", "use_cache": True, "transformers_version": "4.28.1", **settings}
    write(folder, published, weights, chained(given, begin, step))


def from_deepspec(folder: Path) -> None:
    """DeepSpec's network: Qwen3's norms of queries and keys, five layers of the verifier, all of its vocabulary."""
    transformers = import_module("transformers")
    outputs = (0, 2, 3, 4, 6)
    config = transformers.Qwen3Config(
        **layer_settings(head_dim=8, rope_parameters={"rope_type": "default", "rope_theta": 1000.0}),
        target_layer_ids=list(outputs),
        ttt_length=7,
        step_loss_decay=0.8,
        draft_num_hidden_layers=1,
        num_target_layers=DEPTH,
        target_model_name_or_path="example/verifier",
    )
    config.architectures = ["Qwen3Eagle3Model"]
    config._attn_implementation = "sdpa"
    model = randomised(import_module("deepspec.modeling.eagle3.qwen3.modeling").Qwen3Eagle3Model(config))
    given = inputs(tuple(layer + 1 for layer in outputs))

    def run(rows: torch.Tensor, ids: torch.Tensor, first: int, cache: Any) -> tuple[torch.Tensor, Any]:
        positions = torch.arange(first, first + ids.shape[1])[None]
        out = model(rows, ids, position_ids=positions, past_key_values=cache, use_cache=True)[:, -1:]
        return model.compute_logits(out)[0, 0], (out, cache)

    def begin(count: int) -> tuple[torch.Tensor, Any]:
        return run(joined(given)[:, :count], given["ids"][None, :count], 0, transformers.DynamicCache())

    def step(kept: Any, token: torch.Tensor, position: int) -> tuple[torch.Tensor, Any]:
        return run(kept[0], token.view(1, 1), position, kept[1])

    model.save_pretrained(folder)
    saved = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    write(folder, saved, dict(model.state_dict()), chained(given, begin, step))


def windowed(folder: Path) -> None:
    """Windows and LongRoPE, at the text's length and with the frequencies for short texts."""
    factors = {"short_factor": [1.0, 1.5, 2.0, 3.0], "long_factor": [2.0, 4.0, 8.0, 16.0]}
    rope = {"rope_type": "longrope", "rope_theta": 500.0, "original_max_position_embeddings": 64, **factors}
    from_speculators(
        folder / "eagle3-speculators-windowed",
        "llama",
        {"layer_types": ["sliding_attention"], "sliding_window": 4, "rope_parameters": rope},
    )


def main(folder: Path) -> None:
    torch.manual_seed(15)
    from_speculators(folder / "eagle3-speculators", "llama", {"rope_parameters": LLAMA3})
    from_speculators(
        folder / "eagle3-speculators-normed",
        "qwen3",
        {"num_hidden_layers": 2, "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0}},
        norm_before_residual=True,
        fc_norm=True,
        norm_output=True,
    )
    from_speculators(
        folder / "eagle3-speculators-biased",
        "llama",
        {"attention_bias": True, "mlp_bias": True, "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0}},
        norm_before_fc=True,
    )
    windowed(folder)
    from_eagle(folder / "eagle3-safeailab", 3, draft_vocab_size=DRAFT_VOCABULARY)
    from_eagle(folder / "eagle1-safeailab", 1, rope_theta=1000.0)
    from_eagle(folder / "eagle1-qwen2", 1, rope_theta=1000.0, qkv_bias=True, bias=False)
    from_deepspec(folder / "eagle3-deepspec")


if __name__ == "__main__":
    sys.path.append(sys.argv[2])
    main(Path(sys.argv[1]))
