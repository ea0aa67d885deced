"""GGUF files with the weights of tiny Llamas of transformers."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import LlamaForCausalLM

from tests.support.checkpoints import llama_config, tiny_tokenizer
from tests.support.tiny_gguf import coded
from tools.real_draft.gguf_file import add_sizes, gguf_name, in_order


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
    add_sizes(writer, config)
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
        stored = gguf_name(name)
        if stored == "output.weight" and config.tie_word_embeddings:
            continue
        kind = next((kind for part, kind in (kinds or {}).items() if part in stored and weight.ndim == 2), "F32")
        writer.add_tensor(stored, *coded(in_order(name, weight, config).contiguous().numpy(), kind))
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
