"""Writing MTP heads in speculators' layout."""

from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedModel

from specctl.models.draft_heads.mtp import MtpHead
from specctl.models.head_files.eagle_writing import VERSION
from specctl.models.head_files.network_files import write_network

_PARTS = {
    "eh_proj": "input_proj",
    "enorm": "token_layernorm",
    "hnorm": "hidden_layernorm",
    "norm": "final_layernorm",
}
"""Modules outside the decoder layer, in `MtpHead` and in speculators' layout."""


def write_mtp(
    folder: Path, head: MtpHead, target: PreTrainedModel, *, verifier: str, architectures: Sequence[str], ahead: int = 3
) -> None:
    """Write model.safetensors, and last config.json, each file completely or not at all.

    The target's embeddings and output layer are left out.

    Args:
        folder: made if it does not exist.
        head: without embeddings and output layer of its own, in the dtype to write it in.
        target: its verifier, whose configuration describes the layer.
        verifier: the target's hub id or path.
        architectures: the target's, as in its config.json.
        ahead: how many tokens to draft at a time where nothing else decides.

    Raises:
        OutputError: a file cannot be written.
    """

    def named(own: str) -> str:
        part, _, rest = own.partition(".")
        return f"mtp_layers.0.{_PARTS[part]}.{rest}" if part in _PARTS else f"mtp_layers.0.{rest}"

    weights = {named(own): weight for own, weight in head.state_dict().items()}
    proposal = {"proposal_type": "greedy", "speculative_tokens": ahead, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    described = {
        "architectures": ["MTPDraftModel"],
        "speculators_model_type": "mtp",
        "speculators_version": VERSION,
        "speculators_config": {
            "algorithm": "mtp",
            "proposal_methods": [proposal],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": verifier, "architectures": list(architectures)},
        },
        "transformer_layer_config": target.config.get_text_config(decoder=True).to_dict(),
        "num_nextn_predict_layers": 1,
        "tie_word_embeddings": False,
        "dtype": str(head.eh_proj.weight.dtype).removeprefix("torch."),
    }
    write_network(folder, weights, described)
