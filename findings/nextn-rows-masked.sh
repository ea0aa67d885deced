#!/usr/bin/env bash
# xllamacpp 2026.10.11549, CPU: in a context of a qwen35 file's MTP layer, llama_set_embeddings_nextn with masked = true
# gives the states of a call's first tokens, not of the wanted ones.
#
# The function makes later calls keep the states that MTP layers read; masked means only those of the tokens whose
# logits are wanted. llama_get_embeddings_nextn_ith takes the wanted tokens' numbers then, but what it finds are as many
# states from the call's beginning on. The logits are right, and so are the states in a context of the model's other
# layers. With masked = false all states are right. Both functions are C++'s, so their names are mangled.
#
# Exits 0 if that is what happens, 1 if not.
set -eu
here=$(dirname "$0")
. "$here/environment.sh" gguf==0.19.0 numpy==2.4.6 xllamacpp==2026.10.11549
PYTHONPATH="$here" "$python" - "$folder/tiny.gguf" <<'PYTHON'
import sys
from ctypes import POINTER, c_bool, c_float, c_int, c_void_p

import numpy as np
from llama import VERSIONS, WIDTH, WORDS, Context, lib, load

print(VERSIONS)
HEAD = WIDTH // 2
values = {
    "block_count": 3,  # the last one is the MTP layer
    "nextn_predict_layers": 1,
    "feed_forward_length": WIDTH,
    "attention.head_count": 2,
    "attention.head_count_kv": 1,
    "attention.key_length": HEAD,
    "attention.value_length": HEAD,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.dimension_count": HEAD,
    "rope.dimension_sections": [6, 5, 5, 0],
    "full_attention_interval": 2,  # the first layer is recurrent, the second is attention
    "ssm.conv_kernel": 4,
    "ssm.inner_size": WIDTH,
    "ssm.state_size": HEAD,
    "ssm.time_step_rank": 2,
    "ssm.group_count": 1,
}
shapes = {
    "token_embd.weight": (WORDS, WIDTH),
    "output_norm.weight": (WIDTH,),
    "blk.0.attn_qkv.weight": (2 * WIDTH, WIDTH),
    "blk.0.attn_gate.weight": (WIDTH, WIDTH),
    "blk.0.ssm_conv1d.weight": (2 * WIDTH, 4),
    "blk.0.ssm_dt.bias": (2,),
    "blk.0.ssm_a": (2,),
    "blk.0.ssm_beta.weight": (2, WIDTH),
    "blk.0.ssm_alpha.weight": (2, WIDTH),
    "blk.0.ssm_norm.weight": (HEAD,),
    "blk.0.ssm_out.weight": (WIDTH, WIDTH),
    "blk.2.nextn.eh_proj.weight": (WIDTH, 2 * WIDTH),
    **{f"blk.2.nextn.{name}.weight": (WIDTH,) for name in ("enorm", "hnorm", "shared_head_norm")},
}
for layer in range(3):
    parts = {f"{name}_norm": (WIDTH,) for name in ("attn", "post_attention")}
    parts |= {f"ffn_{name}": (WIDTH, WIDTH) for name in ("gate", "up", "down")}
    if layer:
        parts |= {"attn_q": (2 * WIDTH, WIDTH), "attn_output": (WIDTH, WIDTH)}
        parts |= {"attn_k": (HEAD, WIDTH), "attn_v": (HEAD, WIDTH), "attn_q_norm": (HEAD,), "attn_k_norm": (HEAD,)}
    shapes |= {f"blk.{layer}.{name}.weight": shape for name, shape in parts.items()}
model = load(sys.argv[1], "qwen35", values, shapes)
chance = np.random.default_rng(1)
text, before = chance.integers(0, WORDS, 8).tolist(), chance.standard_normal((8, WIDTH), np.float32)
keep = lib["_Z26llama_set_embeddings_nextnP13llama_contextbb"]
keep.restype, keep.argtypes = None, (c_void_p, c_bool, c_bool)
state_of = lib["_Z30llama_get_embeddings_nextn_ithP13llama_contexti"]
state_of.restype, state_of.argtypes = POINTER(c_float), (c_void_p, c_int)


def read(mtp, masked, wanted):
    """Logits and states of the wanted tokens."""
    context = Context(model, mtp=mtp)
    keep(context.handle, True, masked)
    logits = context.read((0, 0, text), wanted=wanted, states=before if mtp else None)
    return logits, np.array([state_of(context.handle, i)[:WIDTH] for i in wanted])


def found(mtp, masked, wanted):
    """The tokens whose states are given for the wanted ones."""
    right_logits, right = read(mtp, False, range(8))
    logits, states = read(mtp, masked, wanted)
    assert np.abs(logits - right_logits[wanted]).max() < 1e-4, "the logits are wrong"
    apart = np.abs(states[:, None] - right).max(axis=-1)
    given = [int(row.argmin()) if row.min() < 1e-4 else None for row in apart]
    layers = "MTP layer" if mtp else "other layers"
    print(f"{layers}, masked={masked}, tokens {wanted} of 8 are wanted: the states are those of {given}")
    return given


chosen = [[5, 6, 7], [2, 7]]
seen = [found(mtp, masked, wanted) for mtp in (False, True) for masked in (False, True) for wanted in chosen]
as_described = seen == 3 * chosen + [[0, 1, 2], [0, 1]]
print("as described" if as_described else "THE BEHAVIOUR HAS CHANGED")
sys.exit(not as_described)
PYTHON
