#!/usr/bin/env bash
# xllamacpp 2026.10.11549, CPU: with several sequences of a model with recurrent layers, llama_memory_seq_rm says that
# one of them went back a few tokens, and its next rows are wrong.
#
# With n_rs_seq = 8 the states after the last tokens of a call are kept, so that a sequence can go back without reading
# its text again. Sequences get places in that memory in the order in which they begin, and a call for some of them
# moves states until theirs are neighbours. It seems that what is kept of a sequence is not moved with it: here sequences
# begin in the order 2, 0, 1, sequence 0 reads 5 tokens, a call reads 1 and 2, and sequence 0 goes back 4 tokens. Without
# that call, or where sequences begin in the order 0, 1, 2, its rows are right.
#
# Exits 0 if that is what happens, 1 if not.
set -eu
here=$(dirname "$0")
. "$here/environment.sh" gguf==0.19.0 numpy==2.4.6 xllamacpp==2026.10.11549
PYTHONPATH="$here" "$python" - "$folder/tiny.gguf" <<'PYTHON'
import sys

import numpy as np
from llama import VERSIONS, WIDTH, WORDS, Context, load

print(VERSIONS)
HEAD = WIDTH // 2
values = {
    "block_count": 2,
    "feed_forward_length": WIDTH,
    "attention.head_count": 2,
    "attention.head_count_kv": [0, 1],  # the first layer is a convolution with a state, the second is attention
    "attention.layer_norm_rms_epsilon": 1e-5,
    "shortconv.l_cache": 3,
}
shapes = {
    "token_embd.weight": (WORDS, WIDTH),
    "token_embd_norm.weight": (WIDTH,),
    "blk.0.shortconv.conv.weight": (WIDTH, 3),
    "blk.0.shortconv.in_proj.weight": (3 * WIDTH, WIDTH),
    "blk.0.shortconv.out_proj.weight": (WIDTH, WIDTH),
    "blk.1.attn_q.weight": (WIDTH, WIDTH),
    "blk.1.attn_k.weight": (HEAD, WIDTH),
    "blk.1.attn_v.weight": (HEAD, WIDTH),
    "blk.1.attn_output.weight": (WIDTH, WIDTH),
    "blk.1.attn_q_norm.weight": (HEAD,),
    "blk.1.attn_k_norm.weight": (HEAD,),
}
for layer in range(2):
    norms = {f"blk.{layer}.{name}_norm.weight": (WIDTH,) for name in ("attn", "ffn")}
    shapes |= norms | {f"blk.{layer}.ffn_{name}.weight": (WIDTH, WIDTH) for name in ("gate", "up", "down")}
model = load(sys.argv[1], "lfm2", values, shapes)
text, other = np.random.default_rng(1).integers(0, WORDS, (2, 30)).tolist()

alone = Context(model)
alone.read((0, 0, text[:21]))
right = alone.read((0, 21, text[21:24]))


def apart(order, between):
    """How far the rows after going back are from the right ones."""
    context = Context(model, sequences=3, kept=8)
    for sequence in order:
        context.read((sequence, 0, text[:20]))
    context.read((0, 20, [text[20], *other[:4]]))
    if between:
        context.read((1, 20, text[20:23]), (2, 20, text[20:23]))
    returned = context.remove(0, 21)
    rows = context.read((0, 21, text[21:24]))
    found = np.abs(rows - right).max()
    call = "with" if between else "without"
    print(f"begun in order {order}, {call} a call for 1 and 2: returned {returned}, rows differ by up to {found:.1e}")
    return returned, bool(found < 1e-4), bool(found > 0.1)


seen = [apart(order, between) for order in ((2, 0, 1), (0, 1, 2)) for between in (True, False)]
fine, wrong = (True, True, False), (True, False, True)
as_described = seen == [wrong, fine, fine, fine]
print("as described" if as_described else "THE BEHAVIOUR HAS CHANGED")
sys.exit(not as_described)
PYTHON
