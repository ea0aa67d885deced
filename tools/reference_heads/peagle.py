"""Reference data for P-EAGLE heads: what speculators' implementation computes.

    python -m tools.reference_heads.peagle tests/data/draft_heads

writes a checkpoint as `tools.reference_heads.eagle` does; `speculators` 0.9.0 from PyPI has to be importable.

``expected.safetensors`` holds ``ids`` (T,), the token after each place; ``states.{layer}`` (T, width); and for two
places ``block.{place}`` (K, D), what the head says after true rows up to this place and masks behind it.
"""

import json
import sys
from importlib import import_module
from pathlib import Path
from unittest.mock import MagicMock

import torch
from transformers import AutoConfig

from tools.reference_heads.eagle import (
    DRAFT_VOCABULARY,
    PLACES,
    VOCABULARY,
    WIDTH,
    draft_vocabulary,
    inputs,
    joined,
    layer_settings,
    randomised,
    write,
)

BLOCK, ANCHORS = 4, (2, 5)


def main(out: Path) -> None:
    torch.manual_seed(29)
    sys.modules.setdefault("hs_connectors", MagicMock())  # it loads training data, and nothing else
    package, core = import_module("speculators"), import_module("speculators.models.peagle.core")
    greedy = import_module("speculators.proposals.greedy").GreedyTokenProposalConfig(speculative_tokens=BLOCK)
    inner = AutoConfig.for_model(
        "llama",
        **layer_settings(
            head_dim=8, num_hidden_layers=2, rope_parameters={"rope_type": "default", "rope_theta": 1000.0}
        ),
    )
    inner._attn_implementation = "sdpa"
    layers = (2, 4, 5)
    model = core.PEagleDraftModel(
        import_module("speculators.models.peagle").PEagleSpeculatorConfig(
            transformer_layer_config=inner,
            draft_vocab_size=DRAFT_VOCABULARY,
            eagle_aux_hidden_state_layer_ids=list(layers),
            mask_token_id=VOCABULARY - 1,
            norm_before_residual=True,
            fc_norm=True,
            speculators_config=package.SpeculatorsConfig(
                algorithm="peagle",
                proposal_methods=[greedy],
                default_proposal_method="greedy",
                verifier=package.VerifierConfig(name_or_path="example/verifier", architectures=["LlamaForCausalLM"]),
            ),
        )
    )
    randomised(model)
    d2t, t2d = draft_vocabulary()
    model.load_vocab_mappings(t2d, d2t)
    given = inputs(layers)
    given["ids"] = given["ids"][:PLACES]
    # Places of the text, and behind two of them as many masks as a block has.
    anchors = [*range(PLACES), *(anchor for anchor in ANCHORS for _ in range(1, BLOCK))]
    depths = [0] * PLACES + [*range(1, BLOCK)] * len(ANCHORS)
    vars(core)["generate_cod_sample_indices"] = lambda **_: (torch.tensor(anchors), torch.tensor(depths))
    seen: list[torch.Tensor] = []
    model.lm_head.register_forward_hook(lambda _module, _given, output: seen.append(output[0]))
    vars(core)["compute_metrics"] = lambda **_: (None, {})
    with torch.no_grad():
        model(
            joined(given),
            given["ids"][None],
            torch.zeros(1, PLACES).long(),
            verifier_last_hidden_states=torch.randn(1, PLACES, WIDTH),
        )
    rows = seen[0]
    for number, anchor in enumerate(ANCHORS):
        begin = PLACES + number * (BLOCK - 1)
        given[f"block.{anchor}"] = torch.cat([rows[anchor : anchor + 1], rows[begin : begin + BLOCK - 1]])
    folder = out / "peagle-speculators"
    model.save_pretrained(folder)
    for code in folder.glob("*.py"):
        code.unlink()
    saved = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    write(folder, saved, {k: w for k, w in model.state_dict().items() if not k.startswith("verifier_")}, given)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
