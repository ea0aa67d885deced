"""Reference data for DFlash2 heads and for windows in block heads: what their publishers' code computes.

    python -m tools.reference_heads.dflash2 tests/data/draft_heads

writes checkpoints as `tools.reference_heads.block` does. The implementations have to be importable:

- `dflash` 0.1.0 from PyPI (z-lab),
- `speculators` 0.9.0 from PyPI.
"""

import sys
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch
from safetensors.torch import load_file, save_file
from transformers import DynamicCache, Qwen3Config

from tools.reference_heads.block import (
    ANCHOR,
    BLOCK,
    LAYERS,
    MASK,
    PLACES,
    VOCABULARY,
    WIDTH,
    block_ids,
    flat_config,
    inputs,
    joined,
    layer_settings,
    randomised,
    write,
)

WINDOW = 4
WINDOWS: dict[str, Any] = {
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": WINDOW,
    "use_sliding_window": True,
    "max_window_layers": 2,
}
SMALL: dict[str, Any] = {"conv_kernel_size": 3, "conv_group_size": 4, "selector_rank": 6, "selector_top_k": 5}


def scattered(candidates: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Laws ``(B, V)`` of probabilities ``(B, K)`` of candidates ``(B, K)``."""
    return torch.zeros(len(candidates), VOCABULARY).scatter(-1, candidates, values)


def z_lab(folder: Path, architecture: str, *, windows: dict[str, Any], **more: Any) -> None:
    """Rounds of z-lab's package: laws of a block's rows, and of DFlash2 the tokens drawn from them."""
    config = flat_config(
        architecture,
        dflash_config={
            "target_layer_ids": [layer - 1 for layer in LAYERS],
            "mask_token_id": MASK,
            "block_size": BLOCK,
            **more,
        },
        **windows,
    )
    model, given = randomised(getattr(import_module("dflash.model"), architecture)(config)), inputs()
    given["embeddings"], given["output"] = torch.randn(VOCABULARY, WIDTH), torch.randn(VOCABULARY, WIDTH)
    head = torch.nn.Linear(WIDTH, VOCABULARY, bias=False)
    head.weight.copy_(given["output"])
    scale = more.get("input_embedding_scale", 1.0)
    positions = torch.arange(PLACES + BLOCK)[None]

    def rows(name: str, start: int, anchor: int, cache: DynamicCache) -> None:
        ids = block_ids(given, anchor)
        hidden = model(
            target_hidden=joined(given)[:, start:anchor],
            noise_embedding=given["embeddings"][ids] * scale,
            position_ids=positions[:, cache.get_seq_length() : anchor + BLOCK],
            past_key_values=cache,
            use_cache=True,
        )[:, 1:]
        cache.crop(-BLOCK)
        if architecture == "DFlashDraftModel":
            given[f"{name}.laws"] = model.compute_logits(hidden, head)[0].softmax(-1)
        else:
            path, candidates, laws = model.propose(hidden, ids[:, 0], head, 1.0)
            given[f"{name}.drawn"], given[f"{name}.laws"] = path[0], scattered(candidates[0], laws[0])

    cache = DynamicCache()
    rows("first", 0, ANCHOR, cache)
    rows("second", ANCHOR, ANCHOR + 3, cache)
    rows("alone", 0, 0, DynamicCache())
    write(model, folder, given)
    # As in published files, which the package maps to its names when it reads them.
    weights = load_file(folder / "model.safetensors")
    names = {name: name.removesuffix(".weight") if "_codebook" in name else name for name in weights}
    save_file({names[name]: weight for name, weight in weights.items()}, folder / "model.safetensors")


def of_speculators(folder: Path, kind: str, *, both_ways: bool, **more: Any) -> None:
    """One forward pass as in training: blocks at two anchors, each of which sees only the places before it."""
    sys.modules.setdefault("hs_connectors", MagicMock())  # it loads training data, and nothing else
    package = import_module("speculators.config")
    classes = import_module(f"speculators.models.{kind}")
    greedy = import_module("speculators.proposals.greedy").GreedyTokenProposalConfig
    layer_config = Qwen3Config(**layer_settings(), **WINDOWS)
    layer_config._attn_implementation = "eager"
    name = kind.replace("df", "DF")
    model = getattr(classes, f"{name}DraftModel")(
        getattr(classes, f"{name}SpeculatorConfig")(
            transformer_layer_config=layer_config,
            block_size=BLOCK,
            aux_hidden_state_layer_ids=list(LAYERS),
            mask_token_id=MASK,
            draft_vocab_size=VOCABULARY,
            sliding_window_non_causal=both_ways,
            speculators_config=package.SpeculatorsConfig(
                algorithm=kind,
                proposal_methods=[greedy(speculative_tokens=BLOCK - 1)],
                default_proposal_method="greedy",
                verifier=package.VerifierConfig(name_or_path=None, architectures=["Qwen3ForCausalLM"]),
            ),
            **more,
        )
    )
    randomised(model)
    given = inputs()
    loss_mask = torch.zeros(1, PLACES)
    anchors = [3, ANCHOR]
    loss_mask[0, anchors] = 1.0
    ids = given["ids"][None]
    hidden, logits, *_ = model._backbone_forward(
        joined(given),
        ids,
        loss_mask,
        torch.randn(1, PLACES, WIDTH),
        torch.zeros(1, PLACES, dtype=torch.int64),
        max_anchors=len(anchors),
    )
    for index, (part, anchor) in enumerate(zip(("first_block", "second_block"), anchors, strict=True)):
        rows = slice(index * BLOCK + 1, (index + 1) * BLOCK)
        if kind == "dflash2":
            before = ids[0, anchor : anchor + BLOCK - 1]
            candidates, scores = model.candidate_selector.select(logits[0, rows], hidden[0, rows], before)
            given[f"{part}.laws"] = scattered(candidates, scores.softmax(-1))
        else:
            given[f"{part}.laws"] = logits[0, rows].softmax(-1)
    # Saved checkpoints leave out what is the verifier's own.
    given["embeddings"], given["output"] = model.embed_tokens.weight, model.lm_head.weight
    write(model, folder, given)


def main(out: Path) -> None:
    torch.manual_seed(23)
    torch.set_grad_enabled(False)
    z_lab(out / "dflash-windows", "DFlashDraftModel", windows=WINDOWS)
    z_lab(
        out / "dflash2",
        "DFlash2DraftModel",
        windows={**WINDOWS, "is_causal": False},
        **SMALL,
        output_multiplier=0.4,
        final_logit_softcapping=2.0,
        input_embedding_scale=1.5,
    )
    of_speculators(out / "dflash-windows-speculators", "dflash", both_ways=False)
    of_speculators(out / "dflash2-speculators", "dflash2", both_ways=True, **SMALL)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
