#!/usr/bin/env bash
# onnxruntime 1.32.0, x86 CPU: GroupQueryAttention's input query_seqlens lets sequences with different numbers of new
# tokens share a call, but padding counts in the checks of lengths.
#
# With it, each sequence with 2 or more new tokens gets bit for bit what a call of its own gives, whatever it has in
# the cache. A lone token after cached ones differs from its own call by rounding, about 3e-7. Without it, several
# sequences with several new tokens each are rejected as soon as there is a past. total_sequence_length is described as
# an upper bound of the tokens in the cache, yet two calls that respect it are rejected: it has to be at least the
# padded number of new tokens, even if every sequence has fewer, and the padding of each sequence has to fit after its
# own tokens. (The operator's description mentions both far down.)
#
# Exits 0 if that is what happens, 1 if not.
set -eu
here=$(dirname "$0")
. "$here/environment.sh" numpy==2.4.6 onnx==1.23.2 onnxruntime==1.32.0
unset ORT_GQA_DISABLE_FLASH_ATTENTION
PYTHONPATH="$here" "$python" - <<'PYTHON'
import sys

import numpy as np
from attention import VERSIONS, session

HEADS, KEY_HEADS, SIZE = 4, 2, 64
print(VERSIONS)

counting, plain = session(HEADS, KEY_HEADS, SIZE, counted=True), session(HEADS, KEY_HEADS, SIZE)
chance = np.random.default_rng(0)


def tensors(rows, new, past):
    return {
        "query": chance.standard_normal((rows, new, HEADS * SIZE), np.float32),
        "key": chance.standard_normal((rows, new, KEY_HEADS * SIZE), np.float32),
        "value": chance.standard_normal((rows, new, KEY_HEADS * SIZE), np.float32),
        "past_key": chance.standard_normal((rows, KEY_HEADS, past, SIZE), np.float32),
        "past_value": chance.standard_normal((rows, KEY_HEADS, past, SIZE), np.float32),
    }


def attend(made, given, total, news, pasts):
    """The call's result, or the end of its error."""
    lengths = [new + past - 1 for new, past in zip(news, pasts)]
    given = given | {"lengths": np.array(lengths, np.int32), "total": np.array([total], np.int32)}
    if made is counting:
        given["counts"] = np.array(news, np.int32)
    try:
        return made.run(["mixed"], given)[0]
    except Exception as raised:
        return str(raised).partition("Status Message: ")[2]


def differences(news, pasts):
    """By sequence, how far the shared call is from one of its own."""
    given = tensors(len(news), max(news), max(pasts))
    shared = attend(counting, given, max(pasts) + max(news), news, pasts)
    apart = []
    for place, (new, past) in enumerate(zip(news, pasts)):
        own = {name: array[place : place + 1, :new] for name, array in given.items() if not name.startswith("past")}
        own |= {name: array[place : place + 1, :, :past] for name, array in given.items() if name.startswith("past")}
        apart.append(float(np.abs(attend(plain, own, new + past, [new], [past])[0] - shared[place, :new]).max()))
    print(f"{news} new tokens after {pasts}: differ from calls of their own by", *(f"{each:.1e}" for each in apart))
    return apart


as_described = differences([5, 2, 9], [7, 0, 12]) == differences([2, 3, 9], [30, 1, 5]) == [0, 0, 0]
several, lone = differences([9, 1], [12, 7])
as_described &= several == 0 < lone < 1e-5

error = attend(plain, tensors(2, 5, 4), 9, [5, 5], [4, 4])
print("without query_seqlens, 2 sequences with 5 tokens after 4:", error)
as_described &= isinstance(error, str)

given = tensors(2, 8, 0)  # tensors for 8 new tokens, as a caller with a fixed shape has them
error = attend(counting, given, 5, [5, 2], [0, 0])
print("5 and 2 of 8 tokens, total_sequence_length 5:", error)
as_described &= "total_sequence_length must be at least kv_sequence_length" in error
as_described &= isinstance(attend(counting, given, 8, [5, 2], [0, 0]), np.ndarray)

given = tensors(2, 9, 30)
error = attend(counting, given, 32, [2, 9], [30, 5])
print("2 tokens after 30 and 9 after 5, total_sequence_length 32:", error)
as_described &= "padded chunk of 9 tokens does not fit" in error
as_described &= isinstance(attend(counting, given, 39, [2, 9], [30, 5]), np.ndarray)

print("as described" if as_described else "THE BEHAVIOUR HAS CHANGED")
sys.exit(not as_described)
PYTHON
