"""llama.cpp's own server, driven by lines of JSON: ``python -m tools.real.server_program MODEL.gguf THREADS``.

It runs with a Python that has xllamacpp, whose `Server` is llama.cpp's, asked without HTTP. Settings of speculation
belong to a server, so each setting has a server of its own in this process; one that is not asked waits.
"""

import json
import sys
from collections.abc import Sequence
from importlib import import_module
from time import perf_counter, process_time
from typing import Any

from tools.real.llama_program import resident, serve

CONTEXT = 1024  # Tokens of a text


class Program:
    """A server for each setting, made when it is first asked."""

    def __init__(self, path: str, threads: int) -> None:
        self._library: Any = import_module("xllamacpp")
        self._path, self._threads = path, threads
        self._servers: dict[tuple[str, str, int, float], Any] = {}

    def write(
        self,
        ids: Sequence[int],
        count: int,
        kind: str = "NONE",
        draft: str = "",
        length: int = 0,
        least: float = 0.0,
    ) -> dict[str, Any]:
        """A greedy text.

        Args:
            ids: the prompt.
            count: the most new tokens.
            kind: end of a name in ``common_speculative_type``, such as ``DRAFT_SIMPLE`` or ``NGRAM_SIMPLE``.
            draft: path of the draft model, for DRAFT_SIMPLE.
            length: the most tokens of a draft (``--spec-draft-n-max``), for DRAFT_SIMPLE.
            least: the least probability of a drafted token (``--spec-draft-p-min``), for DRAFT_SIMPLE.
        """
        setting = (kind, draft, length, least)
        if setting not in self._servers:
            self._servers[setting] = self._library.Server(self._parameters(*setting))
        pieces: list[str] = []
        clocks: list[tuple[float, float]] = []

        def arrived(chunk: Any) -> bool | None:
            clocks.append((perf_counter(), process_time()))
            pieces.append(chunk if isinstance(chunk, str) else json.dumps(chunk))
            return None

        question = {
            "prompt": list(ids),
            "n_predict": count,
            "temperature": 0.0,
            "stream": True,
            "cache_prompt": True,
        }
        start = perf_counter(), process_time()
        self._servers[setting].handle_completions(json.dumps(question), arrived)
        chunks = [json.loads(piece) for piece in pieces]
        (last,) = (one for one in chunks if "timings" in one)
        timings = last["timings"]
        spent = {
            name: {key: (end[place] - begin[place]) * 1e3 for place, key in enumerate(("wall", "processor"))}
            for name, begin, end in (("first", start, clocks[0]), ("rest", clocks[0], clocks[-1]))
        }
        return {
            "text": "".join(one["choices"][0]["text"] for one in chunks),
            **spent,
            "rest_tokens": last["usage"]["completion_tokens"] - 1,
            "drafted": timings.get("draft_n", 0),
            "accepted": timings.get("draft_n_accepted", 0),
        }

    def memory(self) -> dict[str, Any]:
        return {"memory": resident()}

    def _parameters(self, kind: str, draft: str, length: int, least: float) -> Any:
        found = self._library.CommonParams()
        found.model.path, found.n_ctx, found.n_parallel = self._path, CONTEXT, 1
        found.port, found.n_threads_http, found.verbosity = 0, 1, 0
        found.fit_params, found.cache_ram_mib, found.n_ctx_checkpoints = False, 0, 0
        speculative = found.speculative
        speculative.types = [getattr(self._library.common_speculative_type, f"COMMON_SPECULATIVE_TYPE_{kind}")]
        if draft:
            speculative.draft.mparams.path = draft
            speculative.draft.n_max, speculative.draft.p_min = length, least
        for one in (
            found.cpuparams,
            found.cpuparams_batch,
            speculative.draft.cpuparams,
            speculative.draft.cpuparams_batch,
        ):
            one.n_threads, one.poll = self._threads, 0
        return found


if __name__ == "__main__":
    serve(Program(sys.argv[1], int(sys.argv[2])))
