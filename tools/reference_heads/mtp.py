"""Tiny random MTP heads, and what reference implementations compute with them, for the tests.

Each target is a folder of `FOLDER` with the MTP layer in its own shards:

- ``glm4_moe`` and ``deepseek_v3`` against `transformers.modeling_layers.MtpModel` (transformers 5.23): one pass over a
  text, then three single steps of its layer over the same cache, each fed the layer's own output;
- ``qwen3_next`` and ``qwen3_5_text`` against `speculators.models.mtp.MTPDraftModel` (speculators 0.9.0, which wants
  transformers below 5.20): three steps over a text, each over the whole of it. Its converter writes the same head in
  the layout of speculators, to the folder ``speculators`` within the target's.

The two need different versions of transformers, so each has its own call::

    python -m tools.reference_heads.mtp transformers
    python -m tools.reference_heads.mtp speculators
"""

import argparse
import json
import shutil
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

FOLDER = Path(__file__).parents[2] / "tests" / "data" / "draft_heads" / "mtp"
PLACES, STEPS, DEPTH = 12, 3, 2
_COMMON: dict[str, Any] = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": DEPTH}
_COMMON |= {"num_attention_heads": 4, "max_position_embeddings": 64, "tie_word_embeddings": False}
_COMMON |= {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": None, "attention_dropout": 0.0}
_EXPERTS = {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
_EXPERTS |= {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "num_nextn_predict_layers": 1}
_DELTA = {"num_key_value_heads": 2, "head_dim": 8, "layer_types": ["linear_attention", "full_attention"]}
_DELTA |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 2}
TARGETS: dict[str, dict[str, Any]] = {
    "glm4_moe": {**_EXPERTS, "num_key_value_heads": 2, "head_dim": 8, "use_qk_norm": True, "attention_bias": True},
    "deepseek_v3": {
        **_EXPERTS,
        "num_key_value_heads": 4,
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 6,
        "v_head_dim": 8,
    },
    "qwen3_next": {
        **_DELTA,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 8,
        "shared_expert_intermediate_size": 8,
    },
    "qwen3_5_text": {
        **_DELTA,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
            "mrope_section": [1, 1, 0],
            "mrope_interleaved": True,
        },
    },
}
_ABOVE = {"mtp.fc.weight": (16, 32), "mtp.norm.weight": (16,)}
_ABOVE |= {"mtp.pre_fc_norm_hidden.weight": (16,), "mtp.pre_fc_norm_embedding.weight": (16,)}


def _random(shape: tuple[int, ...]) -> torch.Tensor:
    """A matrix that keeps the size of what it multiplies, or a vector near 1."""
    return torch.randn(shape) / shape[-1] ** 0.5 * 1.5 if len(shape) > 1 else 1 + torch.randn(shape) / 4


def _target(kind: str) -> Any:
    torch.manual_seed(sorted(TARGETS).index(kind))
    config = AutoConfig.for_model(kind, **{**_COMMON, **TARGETS[kind]})
    model: Any = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(_random(tuple(weight.shape)))
    return model.float().eval()


def _write(kind: str, extra: dict[str, torch.Tensor]) -> tuple[Any, Path]:
    """A target with more tensors in its file, each expert's apart as they are published; loaded, with its folder."""
    folder, model = FOLDER / kind, _target(kind)
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    weights = load_file(folder / "model.safetensors")
    save_file({**weights, **extra}, folder / "model.safetensors", metadata={"format": "pt"})
    settings = json.loads((folder / "config.json").read_text())
    settings.pop("transformers_version")
    (folder / "config.json").write_text(json.dumps(settings, indent=1) + "\n")
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return loaded.eval(), folder


def _layer_like(kind: str, prefix: str, source: str) -> dict[str, torch.Tensor]:
    """Random tensors for every one of a decoder layer of the saved model, under another prefix."""
    model = _target(kind)
    with tempfile.TemporaryDirectory() as scratch:
        model.save_pretrained(scratch)
        saved = load_file(Path(scratch) / "model.safetensors")
    return {
        prefix + name.removeprefix(source): _random(tuple(tensor.shape))
        for name, tensor in saved.items()
        if name.startswith(source)
    }


def _states(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """The last hidden states ``(T, H)`` after the final norm."""
    states: torch.Tensor = model(ids[None], output_hidden_states=True).hidden_states[-1][0]
    return states


def from_transformers(kind: str) -> None:
    from transformers.cache_utils import MtpCache
    from transformers.modeling_layers import MtpModel

    own = f"model.layers.{DEPTH}."
    torch.manual_seed(10)
    extra = _layer_like(kind, own, f"model.layers.{DEPTH - 1}.")
    torch.manual_seed(11)
    extra[f"{own}eh_proj.weight"] = _random((16, 32))
    extra |= {f"{own}{name}.weight": _random((16,)) for name in ("enorm", "hnorm", "shared_head.norm")}
    first, _ = _write(kind, extra)
    # Published shards hold the target's embeddings and output layer once more.
    weights = first.state_dict()
    extra[f"{own}embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
    extra[f"{own}shared_head.head.weight"] = weights["lm_head.weight"].clone()
    target, folder = _write(kind, extra)
    target._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{DEPTH}\."]
    mtp: Any = MtpModel.from_pretrained(target)
    mtp.eval()
    cache = MtpCache(config=target.config.get_mtp_config())
    torch.manual_seed(12)
    ids = torch.randint(1, 40, (PLACES + STEPS,))
    found = {"ids": ids, "states": _states(target, ids[:PLACES])}
    # Token x_p at position p with the state of place p - 1.
    rows = mtp.forward_layer(
        0, found["states"][None, :-1], torch.arange(1, PLACES)[None], cache, input_ids=ids[None, 1:PLACES]
    )
    found["logits"] = mtp._project_to_logits(rows)[0]
    for step in range(STEPS):
        place = torch.tensor([[PLACES + step]])
        rows = mtp.forward_layer(0, rows[:, -1:], place, cache, input_ids=ids[None, PLACES + step, None])
        found[f"step{step + 1}"] = mtp._project_to_logits(rows)[0]
    _record(folder, found)


def from_speculators(kind: str) -> None:
    converter = import_module("speculators.convert.mtp").MTPConverter()
    kinds = import_module("speculators.models.mtp")

    torch.manual_seed(20)
    extra = _layer_like(kind, "mtp.layers.0.", f"model.layers.{DEPTH - 1}.")
    torch.manual_seed(21)
    extra |= {name: _random(shape) for name, shape in _ABOVE.items()}
    target, folder = _write(kind, extra)
    alone = folder / "speculators"
    converter.convert(folder, alone, str(folder), num_speculative_steps=STEPS, validate=False)
    model = kinds.MTPDraftModel.from_pretrained(str(alone)).eval()
    torch.manual_seed(22)
    ids = torch.randint(1, 40, (PLACES,))
    found = {"ids": ids, "states": _states(target, ids)}
    logits, _, _ = model(input_ids=ids[None], hidden_states=found["states"][None])
    found |= {f"step{step}": step_logits[0] for step, step_logits in enumerate(logits)}
    (alone / "config.py").unlink()
    settings = json.loads((alone / "config.json").read_text())
    settings["speculators_config"]["verifier"]["name_or_path"] = kind
    (alone / "config.json").write_text(json.dumps(settings, indent=1) + "\n")
    _record(folder, found)


def _record(folder: Path, found: dict[str, torch.Tensor]) -> None:
    save_file({name: tensor.contiguous() for name, tensor in found.items()}, folder / "expected.safetensors")
    for path in sorted(folder.rglob("*.*")):
        print(path.relative_to(FOLDER), path.stat().st_size)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("reference", choices=["transformers", "speculators"])
    if parser.parse_args().reference == "transformers":
        kinds, record = ("glm4_moe", "deepseek_v3"), from_transformers
    else:
        kinds, record = ("qwen3_next", "qwen3_5_text"), from_speculators
    with torch.inference_mode():
        for kind in kinds:
            record(kind)


if __name__ == "__main__":
    main()
