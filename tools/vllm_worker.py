"""vLLM as a worker of `specctl.peers`, run by path with the Python that has it: ``PYTHON vllm_worker.py TARGET DRAFT``.

It takes checkpoints as they are, so that nothing is converted, and lengths of drafts alone.
"""

import os
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_V2_MODEL_RUNNER": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
sys.path.insert(0, str(Path(__file__).parents[1]))

from specctl.peers.programs.worker import Answer, serve


def version() -> str:
    import vllm

    return str(vllm.__version__)


class Pair:
    """The models that the command line names."""

    def __init__(self, question: dict[str, Any]) -> None:
        from vllm import LLM, SamplingParams

        draft = {"method": "draft_model", "model": sys.argv[2], "num_speculative_tokens": question["tokens"]}
        self._sampling, self._stop = SamplingParams, question["stop"]
        self._drafts = self._drafted = 0.0
        self._model = LLM(
            sys.argv[1],
            dtype="float32",
            enforce_eager=True,
            max_model_len=question["context"],
            max_num_seqs=1,
            enable_prefix_caching=False,
            gpu_memory_utilization=0.05,
            disable_log_stats=False,
            speculative_config=draft,
        )

    def run(self, batch: list[list[int]], most: int) -> list[Answer]:
        sampling = self._sampling(temperature=0, max_tokens=most, stop_token_ids=self._stop, detokenize=False)
        began = perf_counter()
        (found,) = self._model.generate([{"prompt_token_ids": batch[0]}], sampling, use_tqdm=False)
        seconds = perf_counter() - began
        counts = {each.name: each.value for each in self._model.get_metrics() if hasattr(each, "value")}
        drafts = counts["vllm:spec_decode_num_drafts"] - self._drafts
        drafted = counts["vllm:spec_decode_num_draft_tokens"] - self._drafted
        self._drafts, self._drafted = self._drafts + drafts, self._drafted + drafted
        return [Answer([*found.outputs[0].token_ids], seconds, seconds, int(drafts), int(drafted))]


if __name__ == "__main__":
    serve(version, Pair)
