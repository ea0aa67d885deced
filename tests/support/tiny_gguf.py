"""Tiny GGUF files with random weights for many architectures and types, split and damaged ones; needs only numpy."""

import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np

SCALES = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
"""Where a block of a type that gguf cannot write has its numbers of 16 bits."""
ARCHITECTURES = ("llama", "qwen3", "gemma3", "lfm2", "qwen35", "mamba2", "falcon-h1", "granitehybrid")
KINDS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_K", "Q6_K")
STATEFUL = ARCHITECTURES[3:]
SNAPSHOTS = ("lfm2", "qwen35")
"""Of the stateful architectures those whose states llama.cpp keeps for a rollback."""
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")
"""Control tokens with the ids from 0 on: the declared end and beginning, a turn's beginning and end, padding."""
MERGES = ("t h", "th e", "i n", "Ġ a", "Ġ the", "e r", "o n", "a n", "an d", "Ġ and", "r e", "Ġ in", "Ġ s", "in g")


def coded(weight: Any, kind: str) -> tuple[Any, None, Any]:
    """A weight ``(..., K)`` in a type of GGUF, as arguments of ``add_tensor``; in one that gguf cannot write, random
    numbers of about the same size.
    """
    known = gguf.GGMLQuantizationType[kind]
    if kind not in SCALES:
        return gguf.quantize(weight, known), None, known
    size, width = gguf.GGML_QUANT_SIZES[known]
    draws = np.random.default_rng(zlib.crc32(weight.tobytes()))
    blocks = draws.integers(0, 256, (*weight.shape[:-1], weight.shape[-1] // size, width), dtype=np.uint8)
    for place, factor in zip(SCALES[kind], (1, 7.5), strict=False):  # the second takes the mean away
        halves = draws.uniform(0.5, 1, blocks.shape[:-1]) * weight.std() * factor / 600
        blocks[..., place : place + 2] = halves.astype(np.float16)[..., None].view(np.uint8)
    return blocks.reshape(*weight.shape[:-1], -1), None, known


def byte_pieces() -> list[str]:
    """The characters that stand for the 256 bytes in a byte-level vocabulary, by byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte if byte in plain else next(others)) for byte in range(256)]


def write(
    path: Path,
    architecture: str = "llama",
    kind: str = "F32",
    *,
    layers: int = 2,
    context: int = 1024,
    window: int = 16,
    experts: int = 0,
    mtp: int = 0,
    words: int = 320,
    sentencepiece: bool = False,
    pre: str = "",
    tied: bool = False,
    template: str | None = TEMPLATE,
    pieces: Mapping[int, str] | None = None,
    added: Mapping[int, str] | None = None,
    seed: int = 0,
    noise: float = 0,
    split: int = 0,
    **metadata: Any,
) -> Path:
    """Write a model with random weights.

    Args:
        path: of the file; its folder is made.
        architecture: one of `ARCHITECTURES`, or another name for a Llama that no program knows.
        kind: the type of matrices; float32 for vectors, convolutions and routers.
        layers: number of layers without MTP layers; odd ones of a hybrid are attention.
        context: trained context.
        window: of attention in even layers (gemma3).
        experts: number of experts of a llama, of which two are used; 0 for a dense one.
        mtp: number of MTP layers of a qwen35, at most one.
        words: size of the vocabulary, at least 320.
        sentencepiece: whether the vocabulary is SentencePiece's instead of byte-level BPE.
        pre: how llama.cpp splits a text into words, by its own names; "" for GPT-2's way.
        tied: whether the embeddings are the output matrix.
        template: chat template, None for none.
        pieces: other texts of tokens, by id; control tokens if they have the form ``<...>``, unused with ``[PAD...]``.
        added: texts of tokens that users defined, by id.
        seed: of the weights.
        noise: a random change of every weight, relative to its size. A draft that often agrees with the target has the
            target's seed and a noise of 0.1.
        split: most tensors of a part; 0 for a single file.
        metadata: further values by their keys with underscores for points, such as ``tokenizer_ggml_eot_token_id``.

    Returns:
        The file, or the first part.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    width = 256 if kind in SCALES else 64
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=split)
    writer.add_name(f"tiny {architecture}")
    _describe(writer, architecture, layers, width, context, window, experts, mtp)
    _add_vocabulary(writer, words, sentencepiece, pieces or {}, added or {}, pre)
    if template is not None:
        writer.add_chat_template(template)
    for name, value in metadata.items():
        key = name.replace("_", ".", 2) if name.startswith("tokenizer") else name.replace("_", ".", 1)
        add = {str: writer.add_string, float: writer.add_float32, bool: writer.add_bool, int: writer.add_uint32}
        add[type(value)](key, value)
    changes = np.random.default_rng(seed + 1)
    for name, weight in _weights(architecture, layers, width, experts, mtp, words, tied, seed):
        if noise:
            weight = weight + noise * np.std(weight) * changes.standard_normal(weight.shape, np.float32)
        matrix = weight.ndim > 1 and not any(part in name for part in ("norm", "conv1d", ".conv.", "gate_inp", "ssm_"))
        matrix |= any(part in name for part in ("ssm_in", "ssm_out", "ssm_alpha", "ssm_beta"))
        writer.add_tensor(name, *coded(weight, kind if matrix else "F32"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path if not split else next(iter(sorted(path.parent.glob(f"{path.stem}-00001-of-*.gguf"))))


def parts(first: Path) -> list[Path]:
    """All parts of a split model."""
    return sorted(first.parent.glob(first.name.replace("-00001-of-", "-*-of-")))


def damaged(file: Path, how: str) -> Path:
    """A file that cannot be loaded, beside the whole one.

    Args:
        file: the whole one.
        how: "short" by one byte, "header" for half a header, "empty", or "text" for another format.
    """
    whole = file.read_bytes()
    content = {"short": whole[:-1], "header": whole[:100], "empty": b"", "text": b"not a model\n" * 100}[how]
    found = file.with_name(f"{file.stem}-{how}.gguf")
    found.write_bytes(content)
    return found


def _describe(
    writer: gguf.GGUFWriter,
    architecture: str,
    layers: int,
    width: int,
    context: int,
    window: int,
    experts: int,
    mtp: int,
) -> None:
    heads = 2
    writer.add_context_length(context)
    writer.add_embedding_length(width)
    writer.add_block_count(layers + mtp)
    writer.add_feed_forward_length(2 * width)
    writer.add_layer_norm_rms_eps(1e-5)
    if architecture == "mamba2":
        writer.add_head_count(0)
    else:
        writer.add_head_count(heads)
        mixed = architecture in ("lfm2", "granitehybrid")
        writer.add_head_count_kv([layer % 2 for layer in range(layers)] if mixed else 1)
        writer.add_key_length(width // heads)
        writer.add_value_length(width // heads)
        writer.add_rope_dimension_count(width // heads)
        writer.add_rope_freq_base(10000.0)
    if architecture == "gemma3":
        writer.add_sliding_window(window)
        writer.add_sliding_window_pattern([layer % 2 == 0 for layer in range(layers)])
    if architecture == "lfm2":
        writer.add_shortconv_l_cache(3)
    if architecture == "qwen35":
        writer.add_rope_dimension_sections([width // heads // 2 - 10, 5, 5, 0])
        writer.add_full_attention_interval(2)
        if mtp:
            writer.add_nextn_predict_layers(mtp)
    if architecture in STATEFUL[1:]:
        inner, rank = _inner(architecture, width)
        writer.add_ssm_conv_kernel(4)
        writer.add_ssm_inner_size(inner)
        writer.add_ssm_state_size(inner // rank if architecture == "qwen35" else 16)
        writer.add_ssm_time_step_rank(rank)
        writer.add_ssm_group_count(1)
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(2)


def _inner(architecture: str, width: int) -> tuple[int, int]:
    """Width of a recurrent layer, and its number of heads."""
    return (width, 2) if architecture == "qwen35" else (2 * width, 4)


def _add_vocabulary(
    writer: gguf.GGUFWriter,
    words: int,
    sentencepiece: bool,
    pieces: Mapping[int, str],
    added: Mapping[int, str],
    pre: str,
) -> None:
    normal, unknown, control, defined, unused, byte = 1, 2, 3, 4, 5, 6  # llama.cpp's types of tokens
    if sentencepiece:
        letters = ["▁", *(chr(letter) for letter in range(97, 123)), "th", "the", "▁the", "in", "▁a", "▁s"]
        tokens = ["<unk>", "<s>", "</s>", *(f"<0x{number:02X}>" for number in range(256)), *letters]
        types = [unknown, control, control, *[byte] * 256, *[normal] * len(letters)]
    else:
        tokens = [*SPECIAL, *byte_pieces(), *("".join(merge.split()) for merge in MERGES)]
        types = [control] * len(SPECIAL) + [normal] * (len(tokens) - len(SPECIAL))
    rest = range(len(tokens), words)
    tokens += [f"<extra_{token}>" for token in rest]
    types += [unused] * len(rest)
    for token, text in pieces.items():
        tokens[token] = text
        types[token] = control if text.startswith("<") and text.endswith(">") else normal
        types[token] = unused if text.startswith("[PAD") else types[token]
    for token, text in added.items():
        tokens[token], types[token] = text, defined
    writer.add_vocab_size(words)
    writer.add_tokenizer_model("llama" if sentencepiece else "gpt2")
    writer.add_tokenizer_pre(pre or ("default" if sentencepiece else "gpt-2"))
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    if sentencepiece:
        writer.add_token_scores([float(-token) for token in range(len(tokens))])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_unk_token_id(0)
    else:
        writer.add_token_merges(list(MERGES))
        writer.add_bos_token_id(0)
        writer.add_eos_token_id(0)
        writer.add_eot_token_id(2)
        writer.add_pad_token_id(3)
        writer.add_add_bos_token(False)


def _weights(
    architecture: str, layers: int, width: int, experts: int, mtp: int, words: int, tied: bool, seed: int
) -> Iterator[tuple[str, Any]]:
    """Name and values of every tensor, float32."""
    draws = np.random.default_rng(seed)

    def matrix(*shape: int, scale: float = 1.5) -> Any:
        return (draws.standard_normal(shape, np.float32) * scale / np.sqrt(shape[-1])).astype(np.float32)

    def vector(size: int) -> Any:
        return draws.uniform(0.5, 1.5, size).astype(np.float32)

    yield "token_embd.weight", matrix(words, width, scale=0.3 if architecture == "gemma3" else width**0.5)
    yield ("token_embd_norm.weight" if architecture == "lfm2" else "output_norm.weight"), vector(width)
    if not tied:
        yield "output.weight", matrix(words, width, scale=2)
    for layer in range(layers + mtp):
        ahead = layer >= layers
        parts = _layer(architecture, width, experts, matrix, vector, attention=ahead or layer % 2 == 1)
        for name, weight in (parts | (_mtp(width, matrix, vector) if ahead else {})).items():
            yield f"blk.{layer}.{name}", weight


def _mtp(width: int, matrix: Any, vector: Any) -> dict[str, Any]:
    return {
        "nextn.eh_proj.weight": matrix(width, 2 * width),
        "nextn.enorm.weight": vector(width),
        "nextn.hnorm.weight": vector(width),
        "nextn.shared_head_norm.weight": vector(width),
    }


def _layer(architecture: str, width: int, experts: int, matrix: Any, vector: Any, *, attention: bool) -> dict[str, Any]:
    """The tensors of a layer; ``attention`` says which kind it is in a hybrid of two kinds."""
    head = width // 2
    found = {"attn_norm.weight": vector(width)}
    if architecture not in STATEFUL or architecture == "falcon-h1" or (attention and architecture != "mamba2"):
        found |= {
            "attn_q.weight": matrix(2 * width if architecture == "qwen35" else width, width),
            "attn_k.weight": matrix(head, width),
            "attn_v.weight": matrix(head, width),
            "attn_output.weight": matrix(width, width),
        }
        if architecture in ("qwen3", "gemma3", "lfm2", "qwen35"):
            found |= {"attn_q_norm.weight": 2 * vector(head), "attn_k_norm.weight": 2 * vector(head)}
    elif architecture == "lfm2":
        found |= {
            "shortconv.conv.weight": matrix(width, 3),
            "shortconv.in_proj.weight": matrix(3 * width, width),
            "shortconv.out_proj.weight": matrix(width, width),
        }
    elif architecture == "qwen35":
        found |= _delta(width, matrix, vector)
    if architecture in ("mamba2", "falcon-h1") or (architecture == "granitehybrid" and not attention):
        found |= _mamba(width, matrix, vector)
    if architecture == "mamba2":
        return found
    if architecture in ("gemma3", "qwen35"):
        found["post_attention_norm.weight"] = vector(width)
    if architecture == "gemma3":
        found["post_ffw_norm.weight"] = vector(width)
    if architecture != "qwen35":
        found["ffn_norm" if architecture == "falcon-h1" else "ffn_norm.weight"] = vector(width)
    many: Sequence[int] = (experts,) if experts else ()
    kind = "_exps" if experts else ""
    if experts:
        found["ffn_gate_inp.weight"] = matrix(experts, width)
    return found | {
        f"ffn_gate{kind}.weight": matrix(*many, 2 * width, width),
        f"ffn_up{kind}.weight": matrix(*many, 2 * width, width),
        f"ffn_down{kind}.weight": matrix(*many, width, 2 * width),
    }


def _mamba(width: int, matrix: Any, vector: Any) -> dict[str, Any]:
    inner, heads = _inner("mamba2", width)
    state, groups = 16, 1
    convolved = inner + 2 * groups * state
    return {
        "ssm_in.weight": matrix(inner + convolved + heads, width),
        "ssm_conv1d.weight": matrix(convolved, 4),
        "ssm_conv1d.bias": vector(convolved) - 1,
        "ssm_dt.bias": vector(heads) - 1,
        "ssm_a": -vector(heads)[:, None],
        "ssm_d": vector(heads)[:, None],
        "ssm_norm.weight": vector(inner)[None],
        "ssm_out.weight": matrix(width, inner),
    }


def _delta(width: int, matrix: Any, vector: Any) -> dict[str, Any]:
    inner, heads = _inner("qwen35", width)
    key = inner // heads
    return {
        "attn_qkv.weight": matrix(2 * key + inner, width),
        "attn_gate.weight": matrix(inner, width),
        "ssm_conv1d.weight": matrix(2 * key + inner, 4),
        "ssm_dt.bias": vector(heads) - 1,
        "ssm_a": -vector(heads),
        "ssm_beta.weight": matrix(heads, width),
        "ssm_alpha.weight": matrix(heads, width),
        "ssm_norm.weight": vector(key),
        "ssm_out.weight": matrix(width, inner),
    }
