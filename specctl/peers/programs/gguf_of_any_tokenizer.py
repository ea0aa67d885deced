"""llama.cpp's converter for a model with an unknown pre-tokenizer; run by path.

    python gguf_of_any_tokenizer.py LLAMA_CPP_SOURCE ARGUMENTS_OF_ITS_CONVERTER...

The pre-tokenizer does not matter, because a peer receives its prompts as ids.
"""

import importlib
import runpy
import sys
from pathlib import Path
from typing import Any


def convert(source: Path, arguments: list[str]) -> None:
    sys.path[:0] = [str(source), str(source / "gguf-py")]
    model: Any = importlib.import_module("conversion.base").TextModel
    known = model.get_vocab_base_pre

    def name(self: object, tokenizer: object) -> str:
        try:
            return str(known(self, tokenizer))
        except NotImplementedError:
            return "default"

    model.get_vocab_base_pre = name
    script = source / "convert_hf_to_gguf.py"
    sys.argv = [str(script), *arguments]
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    convert(Path(sys.argv[1]), sys.argv[2:])
