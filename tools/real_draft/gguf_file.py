"""Write a Llama folder as a GGUF file: ``python -m tools.real_draft.gguf_file FOLDER MODEL.gguf DRAFT.gguf``.

Tokenizer, template and special tokens come from MODEL.gguf, the target's file, so that llama.cpp takes the two as a
pair. Matrices get the type ``--type``, vectors stay float32.
"""

import argparse
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file
from transformers import LlamaConfig

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
"""Parts of a Llama's weights and their names in GGUF."""


def gguf_name(name: str) -> str:
    """The name in GGUF of a Llama's weight: ``blk.2.attn_q.weight`` for ``model.layers.2.self_attn.q_proj.weight``."""
    stem = name.removesuffix(".weight")
    if stem in NAMES:
        return f"{NAMES[stem]}.weight"
    layer, _, part = stem.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{NAMES[part]}.weight"


def in_order(name: str, weight: Any, config: Any) -> Any:
    """A Llama's weight in GGUF's order: in matrices of queries and keys the two rows of a rotation are neighbours.

    Args:
        name: as transformers calls it.
        weight: ``(heads * D, W)`` for queries and keys; others are returned as they are.
        config: of the Llama.
    """
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    if (found := heads.get(name.removesuffix(".weight").rpartition(".")[2])) is None:
        return weight
    rows, width = weight.shape
    return weight.reshape(found, 2, rows // found // 2, width).swapaxes(1, 2).reshape(rows, width)


def add_sizes(writer: gguf.GGUFWriter, config: Any) -> None:
    """Add the metadata of a Llama's sizes."""
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)


def copy_tokenizer(writer: gguf.GGUFWriter, model: Path) -> None:
    """Copy every metadata field of a file's tokenizer."""
    for name, field in gguf.GGUFReader(model).fields.items():
        if name.startswith("tokenizer."):
            kind, item = field.types[0], field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), kind, sub_type=item)


def write_gguf(folder: Path, model: Path, path: Path, kind: str = "Q8_0") -> None:
    """Write the Llama in ``folder`` to ``path`` with the tokenizer of the file ``model``."""
    config: Any = LlamaConfig.from_pretrained(folder)
    known = gguf.GGMLQuantizationType[kind]
    partial = path.with_name(f"{path.name}.part")
    writer = gguf.GGUFWriter(partial, "llama")
    writer.add_name(folder.name)
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{kind}" if kind != "F32" else "ALL_F32"])
    add_sizes(writer, config)
    copy_tokenizer(writer, model)
    for name, weight in load_file(folder / "model.safetensors").items():
        values = in_order(name, weight.astype(np.float32), config)
        if values.ndim == 1:
            writer.add_tensor(gguf_name(name), values)
        else:
            writer.add_tensor(gguf_name(name), gguf.quantize(values, known), raw_dtype=known)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.replace(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("folder", type=Path, help="float32 safetensors")
    parser.add_argument("model", type=Path, help="the target's GGUF file")
    parser.add_argument("draft", type=Path, help="the file to write")
    parser.add_argument("--type", default="Q8_0", choices=["F32", "F16", "Q8_0"])
    args = parser.parse_args()
    write_gguf(args.folder, args.model, args.draft, args.type)


if __name__ == "__main__":
    main()
