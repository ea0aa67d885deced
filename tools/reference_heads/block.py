"""Reference data for block draft heads: what the published implementations of DFlash and DSpark compute.

    python -m tools.reference_heads.block tests/data/draft_heads

writes a tiny checkpoint with random weights for each variant, in its published layout, and `expected.safetensors`
beside it with inputs and outputs. The implementations have to be importable:

- `dflash` of github.com/z-lab/dflash at 44947fb,
- `deepspec` of github.com/deepseek-ai/DeepSpec at afdfa7c,
- `speculators` 0.9.0 from PyPI.

States are numbered as in specctl: i is the input of decoder layer i of the verifier.
"""

import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
from safetensors.torch import save_file
from transformers import DynamicCache, Qwen3Config

VOCABULARY, WIDTH, DEPTH, BLOCK, MASK = 40, 16, 8, 4, 39
PLACES, ANCHOR = 12, 6
"""Tokens of the sequence, and the place of the newest token in the first pass; a second pass begins 3 places later."""
LAYERS = (2, 4, 6)


def layer_settings() -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
        "tie_word_embeddings": False,
    }


def randomised(model: Any) -> Any:
    """The model with weights large enough that every part of it matters."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(0.0, 0.4)
            if "norm" in name:
                parameter.add_(1.0)
    return model.eval()


def inputs() -> dict[str, torch.Tensor]:
    found = {f"states.{layer}": torch.randn(PLACES, WIDTH) for layer in LAYERS}
    found["ids"] = torch.randint(0, VOCABULARY - 1, (PLACES,))
    return found


def joined(given: dict[str, torch.Tensor]) -> torch.Tensor:  # (1, places, sources * width)
    return torch.cat([given[f"states.{layer}"] for layer in LAYERS], -1)[None]


def write(model: Any, folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    for code in folder.glob("*.py"):
        code.unlink()
    save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, folder / "expected.safetensors")


def flat_config(architecture: str, **more: Any) -> Qwen3Config:
    config = Qwen3Config(**layer_settings(), **{"num_target_layers": DEPTH, "block_size": BLOCK, **more})
    config.architectures = [architecture]
    config._attn_implementation = "sdpa"
    return config


def block_ids(given: dict[str, torch.Tensor], anchor: int) -> torch.Tensor:  # (1, B)
    ids = torch.full((1, BLOCK), MASK)
    ids[0, 0] = given["ids"][anchor]
    return ids


def dflash(folder: Path) -> None:
    config = flat_config(
        "DFlashDraftModel",
        dflash_config={"target_layer_ids": [layer - 1 for layer in LAYERS], "mask_token_id": MASK},
        auto_map={"AutoModel": "dflash.DFlashDraftModel"},
    )
    model, given = randomised(import_module("dflash.model").DFlashDraftModel(config)), inputs()
    given["embeddings"], given["output"] = torch.randn(VOCABULARY, WIDTH), torch.randn(VOCABULARY, WIDTH)
    positions = torch.arange(PLACES + BLOCK)[None]

    def rows(start: int, anchor: int, cache: DynamicCache) -> torch.Tensor:
        hidden: torch.Tensor = model(
            target_hidden=joined(given)[:, start:anchor],
            noise_embedding=given["embeddings"][block_ids(given, anchor)],
            position_ids=positions[:, cache.get_seq_length() : anchor + BLOCK],
            past_key_values=cache,
            use_cache=True,
            is_causal=False,
        )
        cache.crop(-BLOCK)
        return (hidden[0] @ given["output"].T)[1:]  # (B - 1, V)

    cache = DynamicCache()
    given["first"] = rows(0, ANCHOR, cache)
    given["second"] = rows(ANCHOR, ANCHOR + 3, cache)
    given["alone"] = rows(0, 0, DynamicCache())
    write(model, folder, given)


def dspark(folder: Path, markov: str) -> None:
    config = flat_config(
        "Qwen3DSparkModel",
        mask_token_id=MASK,
        target_layer_ids=[layer - 1 for layer in LAYERS],
        num_anchors=4,
        enable_confidence_head=markov != "none",
        confidence_head_with_markov=markov != "gated",
        markov_rank=0 if markov == "none" else 6,
        markov_head_type="vanilla" if markov == "none" else markov,
    )
    model, given = (
        randomised(import_module("deepspec.modeling.dspark.qwen3.modeling").Qwen3DSparkModel(config)),
        inputs(),
    )
    positions = torch.arange(PLACES + BLOCK)[None]

    def rows(name: str, start: int, anchor: int, cache: DynamicCache) -> None:
        ids = block_ids(given, anchor)
        hidden = model._forward_backbone(
            target_hidden_states=joined(given)[:, start:anchor],
            noise_embedding=model.embed_tokens(ids),
            position_ids=positions[:, cache.get_seq_length() : anchor + BLOCK],
            past_key_values=cache,
            use_cache=True,
            is_causal=False,
        )
        cache.crop(-BLOCK)
        drawn, given[name] = (
            part[0]
            for part in model.sample_draft_tokens(
                model.compute_logits(hidden), first_prev_token_ids=ids[:, 0], hidden_states=hidden
            )
        )
        given[f"{name}.drawn"] = drawn
        if model.confidence_head is not None:
            before = torch.cat([ids[:, :1], drawn[None, :-1]], 1)
            given[f"{name}.confidence"] = model.predict_confidence_step(hidden, before)[0].sigmoid()

    cache = DynamicCache()
    rows("first", 0, ANCHOR, cache)
    rows("second", ANCHOR, ANCHOR + 3, cache)
    rows("alone", 0, 0, DynamicCache())
    write(model, folder, given)


def speculators_dflash(folder: Path, kind: str, *, from_anchor: bool, markov: str = "vanilla") -> None:
    """One forward pass as in training: blocks at two anchors, each of which sees only the places before it."""
    sys.modules.setdefault("hs_connectors", MagicMock())  # it loads training data, and nothing else
    package = import_module("speculators.config")
    dflash_classes, dspark_classes = (import_module(f"speculators.models.{name}") for name in ("dflash", "dspark"))
    dspark_core = import_module("speculators.models.dspark.core")
    greedy = import_module("speculators.proposals.greedy").GreedyTokenProposalConfig

    layer_config = Qwen3Config(**layer_settings())
    layer_config._attn_implementation = "eager"
    settings: dict[str, Any] = {
        "transformer_layer_config": layer_config,
        "block_size": BLOCK,
        "aux_hidden_state_layer_ids": list(LAYERS),
        "mask_token_id": MASK,
        "sample_from_anchor": from_anchor,
        "draft_vocab_size": 24 if kind == "dspark" else VOCABULARY,
        "speculators_config": package.SpeculatorsConfig(
            algorithm=kind,
            proposal_methods=[greedy(speculative_tokens=BLOCK - (not from_anchor))],
            default_proposal_method="greedy",
            verifier=package.VerifierConfig(name_or_path=None, architectures=["Qwen3ForCausalLM"]),
        ),
    }
    if kind == "dspark":
        model = dspark_classes.DSparkDraftModel(
            dspark_classes.DSparkSpeculatorConfig(**settings, markov_rank=6, markov_head_type=markov)
        )
        known = torch.zeros(VOCABULARY, dtype=torch.bool)
        known[torch.randperm(VOCABULARY)[:24]] = True
        model.load_vocab_mappings(known, known.nonzero()[:, 0] - torch.arange(24))
    else:
        model = dflash_classes.DFlashDraftModel(dflash_classes.DFlashSpeculatorConfig(**settings))
    randomised(model)
    given = inputs()
    loss_mask = torch.zeros(1, PLACES)
    anchors = [3, ANCHOR]
    loss_mask[0, anchors] = 1.0
    training = {
        "hidden_states": joined(given),
        "input_ids": given["ids"][None],
        "loss_mask": loss_mask,
        "verifier_last_hidden_states": torch.randn(1, PLACES, WIDTH),
        "document_ids": torch.zeros(1, PLACES, dtype=torch.int64),
        "max_anchors": len(anchors),
    }
    if kind == "dspark":
        seen = SimpleNamespace()

        def keep(logits: torch.Tensor, _: Any, confidence: torch.Tensor, *__: Any, **___: Any) -> tuple[Any, Any]:
            seen.logits, seen.confidence = logits, confidence
            return None, None

        dspark_core.compute_metrics = keep  # type: ignore[attr-defined]
        model(**training)
        rows, confidence = seen.logits[0], seen.confidence[0].sigmoid()
    else:
        rows, confidence = model._backbone_forward(**training)[1][0], None
    for index, name in enumerate(("first_block", "second_block")):
        begin = index * BLOCK
        given[name] = rows[begin : begin + BLOCK]
        if confidence is not None:
            given[f"{name}.confidence"] = confidence[begin : begin + BLOCK]
    # Saved checkpoints leave out what is the verifier's own.
    given["embeddings"], given["output"] = model.embed_tokens.weight, model.lm_head.weight
    write(model, folder, given)


def main(out: Path) -> None:
    torch.manual_seed(17)
    torch.set_grad_enabled(False)
    dflash(out / "dflash")
    for markov in ("vanilla", "gated", "rnn", "none"):
        dspark(out / f"dspark-{markov}", markov)
    speculators_dflash(out / "dflash-speculators", "dflash", from_anchor=False)
    speculators_dflash(out / "dspark-speculators", "dspark", from_anchor=True, markov="rnn")
    speculators_dflash(out / "dspark-speculators-masked", "dspark", from_anchor=False, markov="gated")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
