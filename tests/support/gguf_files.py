"""GGUF files with the weights of tiny Llamas of transformers."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import LlamaForCausalLM

from tests.support.checkpoints import llama_config, tiny_tokenizer
from tests.support.tiny_gguf import coded

NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
"""Of a layer's tensors, as llama.cpp calls them."""


def rotated(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """A weight's rows in llama.cpp's order: the two halves of each head alternate."""
    return weight.view(heads, 2, -1, weight.shape[-1]).transpose(1, 2).reshape(weight.shape)


def write(
    path: Path,
    model: LlamaForCausalLM,
    tensors: dict[str, Any] | None = None,
    *,
    kinds: dict[str, str] | None = None,
    ends: dict[str, int] | None = None,
    template: str | None = None,
    **metadata: Any,
) -> Path:
    """A Llama as a GGUF file with a byte-level tokenizer.

    Args:
        path: of the file; its folder is made.
        model: has the weights.
        tensors: more tensors by name, float32.
        kinds: the types of weights by a part of their GGUF names, the first that is found; float32 for the others.
        ends: ids that end a text, by the part of their key before ``_token_id``.
        template: the chat template.
        metadata: values of ``rope.scaling``.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    for key, value in metadata.items():
        name = f"llama.rope.scaling.{key}"
        add = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}[type(value)]
        add(name, value)
    vocabulary = tiny_tokenizer().get_vocab()
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*sorted(vocabulary, key=vocabulary.__getitem__)[:-1], "ab"])
    writer.add_token_merges(["a b"])  # at least one is needed
    for name, token in (ends or {"eos": 0}).items():
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", token)
    if template is not None:
        writer.add_chat_template(template)
    for name, weight in model.state_dict().items():
        parts = name.removesuffix(".weight").split(".")
        if name == "model.embed_tokens.weight":
            stored = "token_embd.weight"
        elif name in ("model.norm.weight", "lm_head.weight"):
            stored = {"model.norm.weight": "output_norm.weight", "lm_head.weight": "output.weight"}[name]
        else:
            kind = ".".join(parts[3:])
            if kind == "self_attn.q_proj":
                weight = rotated(weight, config.num_attention_heads)
            elif kind == "self_attn.k_proj":
                weight = rotated(weight, config.num_key_value_heads)
            stored = f"blk.{parts[2]}.{NAMES[kind]}.weight"
        if stored == "output.weight" and config.tie_word_embeddings:
            continue
        kind = next((kind for part, kind in (kinds or {}).items() if part in stored and weight.ndim == 2), "F32")
        writer.add_tensor(stored, *coded(weight.contiguous().numpy(), kind))
    for name, values in (tensors or {}).items():
        writer.add_tensor(name, np.asarray(values, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def random_llama(**settings: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(llama_config(hidden_size=64, num_attention_heads=4, **settings))
