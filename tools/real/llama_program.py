"""llama.cpp, driven by lines of JSON: ``python -m tools.real.llama_program MODEL.gguf THREADS``.

With a prompt as a further argument it writes one token after it and ends.

It runs with the Python that has llama-cpp-python 0.3.36, so it imports nothing of specctl. All loops call llama.cpp's C
functions directly, because `Llama.generate` adds a copy of the logits to every token.
"""

import json
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from time import perf_counter, process_time
from typing import Any

import numpy as np

CONTEXT, TEXTS = 2048, 8  # Tokens of a text, and the number of texts that are written at once
BATCH = 512  # The most tokens of a pass


class Program:
    """A model with a context for one text, and one for several texts."""

    def __init__(self, path: str, threads: int) -> None:
        llama_cpp: Any = import_module("llama_cpp")
        self._api = llama_cpp
        self._log = llama_cpp.llama_log_callback(lambda *_: None)  # kept, because llama.cpp calls it
        llama_cpp.llama_log_set(self._log, None)
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(path.encode("utf-8"), llama_cpp.llama_model_default_params())
        if not self._model:
            sys.exit(f"llama.cpp cannot read {path}")
        vocab = llama_cpp.llama_model_get_vocab(self._model)
        self._vocabulary = llama_cpp.llama_vocab_n_tokens(vocab)
        self._vocab = vocab
        self._threads = threads
        self._batch = llama_cpp.llama_batch_init(BATCH, 0, 1)
        self._contexts: dict[int, Any] = {}
        self._prompt: list[int] = []  # of the last `write`, which the context of one text holds

    def _ends(self, token: int) -> bool:
        """Whether a token ends a text."""
        return bool(self._api.llama_vocab_is_eog(self._vocab, token))

    def _context(self, texts: int) -> Any:
        """The context of as many texts, its caches emptied."""
        api = self._api
        if texts not in self._contexts:
            wanted = api.llama_context_default_params()
            wanted.n_ctx, wanted.n_seq_max, wanted.n_batch, wanted.n_ubatch = CONTEXT * texts, texts, BATCH, BATCH
            wanted.n_threads = wanted.n_threads_batch = self._threads
            self._contexts[texts] = api.llama_init_from_model(self._model, wanted)
        context = self._contexts[texts]
        self._prompt = []
        api.llama_memory_clear(api.llama_get_memory(context), True)
        return context

    def _after_prompt(self, ids: Sequence[int]) -> tuple[Any, int]:
        """The context of one text with a prompt, of which the last one's is kept, and the first token after it."""
        prompt = list(ids)
        if prompt != self._prompt:
            context = self._context(1)
            first = self._prefill(context, prompt)
        else:
            context, last = self._contexts[1], len(prompt) - 1
            self._api.llama_memory_seq_rm(self._api.llama_get_memory(context), 0, last, -1)
            (first,) = self._read(context, [(prompt[last], last, 0)], 1)
        self._prompt = prompt
        return context, first

    def _read(self, context: Any, tokens: Sequence[tuple[int, int, int]], keep: int) -> list[int]:
        """A pass over (token, position, text); returns the likeliest token after each of the last ``keep``."""
        batch = self._batch
        batch.n_tokens = len(tokens)
        for place, (token, position, text) in enumerate(tokens):
            batch.token[place], batch.pos[place] = token, position
            batch.n_seq_id[place], batch.seq_id[place][0] = 1, text
            batch.logits[place] = place >= len(tokens) - keep
        if self._api.llama_decode(context, batch):
            raise RuntimeError("llama_decode failed")
        best = []
        for place in range(len(tokens) - keep, len(tokens)):
            logits = self._api.llama_get_logits_ith(context, place)
            best.append(int(np.ctypeslib.as_array(logits, shape=(self._vocabulary,)).argmax()))
        return best

    def _prefill(self, context: Any, ids: Sequence[int], text: int = 0) -> int:
        """Read a prompt; returns the first token after it."""
        for start in range(0, len(ids), BATCH):
            part = [(token, start + place, text) for place, token in enumerate(ids[start : start + BATCH])]
            found = self._read(context, part, int(start + BATCH >= len(ids)))
        return found[0]

    def passes(self, widths: Sequence[int], context: int) -> dict[str, Any]:
        """Milliseconds of a pass of each width after ``context`` tokens, logits of all its tokens wanted."""
        own = self._context(1)
        self._prefill(own, [10 + place % 100 for place in range(context)])
        memory, found = self._api.llama_get_memory(own), {}
        for width in [widths[0], *widths]:  # the first pass only warms up
            tokens = [(10 + place, context + place, 0) for place in range(width)]
            clocks = Clocks()
            self._read(own, tokens, width)
            found[str(width)] = clocks.read()
            self._api.llama_memory_seq_rm(memory, 0, context, -1)
        return {"passes": found}

    def write(self, ids: Sequence[int], count: int, lookup: int = 0) -> dict[str, Any]:
        """A greedy text, with llama-cpp-python's own prompt lookup of ``lookup`` tokens if that is not 0."""
        api = self._api
        draft: Any = None
        if lookup:
            draft = import_module("llama_cpp.llama_speculative").LlamaPromptLookupDecoding(num_pred_tokens=lookup)
        whole = Clocks()
        context, token = self._after_prompt(ids)
        memory, written = api.llama_get_memory(context), [token]
        first, rest = whole.read(), Clocks()
        while len(written) < count and not self._ends(written[-1]):
            start, drafted = len(ids) + len(written) - 1, []
            if draft is not None:
                drafted = draft(np.array([*ids, *written], dtype=np.intc)).tolist()[: count - len(written) - 1]
            tokens = [written[-1], *drafted]
            best = self._read(context, [(token, start + place, 0) for place, token in enumerate(tokens)], len(tokens))
            right = next((n for n, token in enumerate(drafted) if token != best[n]), len(drafted))
            for token in best[: right + 1]:
                written.append(token)
                if self._ends(token):
                    break
            api.llama_memory_seq_rm(memory, 0, start + right + 1, -1)
        return {"ids": written, "first": first, "rest": rest.read(), "rest_tokens": len(written) - 1}

    def write_many(self, prompts: Sequence[Sequence[int]], count: int) -> dict[str, Any]:
        """Greedy texts, all of them in each pass."""
        context, whole = self._context(TEXTS), Clocks()
        written = [[self._prefill(context, ids, text)] for text, ids in enumerate(prompts)]
        while going := [text for text, ids in enumerate(written) if len(ids) < count and not self._ends(ids[-1])]:
            tokens = [(written[text][-1], len(prompts[text]) + len(written[text]) - 1, text) for text in going]
            for text, token in zip(going, self._read(context, tokens, len(tokens)), strict=True):
                written[text].append(token)
        return {"ids": written, "whole": whole.read()}

    def first(self, prompt: str) -> int:
        """The first token after a text."""
        text = prompt.encode("utf-8")
        ids = (self._api.llama_token * (len(text) + 8))()
        count = self._api.llama_tokenize(self._vocab, text, len(text), ids, len(ids), True, True)
        return self._prefill(self._context(1), ids[:count])

    def memory(self) -> dict[str, Any]:
        return {"memory": resident()}


class Clocks:
    """Wall and processor time since its making."""

    def __init__(self) -> None:
        self._wall, self._processor = perf_counter(), process_time()

    def read(self) -> dict[str, float]:
        """Milliseconds."""
        return {
            "wall": (perf_counter() - self._wall) * 1e3,
            "processor": (process_time() - self._processor) * 1e3,
        }


def resident() -> dict[str, int]:
    """The resident bytes of this process now, and the most so far."""
    with open("/proc/self/status", encoding="utf-8") as status:
        found = dict(line.split(":", 1) for line in status)
    return {key: 1024 * int(found[name].split()[0]) for key, name in (("now", "VmRSS"), ("most", "VmHWM"))}


def serve(program: Any) -> None:
    """Answer questions, one a line, until there are no more: ``{"do": METHOD, ...}`` with its arguments."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print does not belong to the answers
    print(json.dumps({"ready": True}), file=out, flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        print(json.dumps(getattr(program, question.pop("do"))(**question)), file=out, flush=True)


if __name__ == "__main__":
    program = Program(sys.argv[1], int(sys.argv[2]))
    if len(sys.argv) > 3:
        print(program.first(sys.argv[3]))
    else:
        serve(program)
