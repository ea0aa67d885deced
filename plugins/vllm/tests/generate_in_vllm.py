"""Greedy texts of the embedded pair in vLLM, as JSON on the last line; run by test_in_vllm.py in its own process."""

import json
import sys
from dataclasses import asdict
from typing import Any

from vllm import LLM, SamplingParams

from specctl.profile.schema import model_path

LONGEST = 8
PROMPTS = ["Once upon a time", "The little dog", "Question: what is 3 plus 4?", "One day, Tim", "The sun was"]


def generated(policy: dict[str, Any] | None) -> dict[str, Any]:
    """Token ids of each prompt, and what was drafted; None for the target alone."""
    options: dict[str, Any] = {}
    if policy is not None:
        draft = {"method": "draft_model", "model": str(model_path("draft")), "num_speculative_tokens": LONGEST}
        options = {
            "speculative_config": draft,
            "additional_config": {"specctl": policy},
            "async_scheduling": False,
            "worker_cls": "specctl_vllm.worker.Worker",
        }
    llm = LLM(
        str(model_path("target")),
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=len(PROMPTS) - 1,  # the last one begins when another has ended
        gpu_memory_utilization=0.05,
        disable_log_stats=False,
        **options,
    )
    answers = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=40), use_tqdm=False)
    found: dict[str, Any] = {"tokens": [list(answer.outputs[0].token_ids) for answer in answers]}
    if policy is not None:
        runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
        found["counts"] = asdict(runner.drafter.drafts.counts)
        found["vllm"] = {each.name: each.value for each in llm.get_metrics() if hasattr(each, "value")}
    return found


if __name__ == "__main__":
    print(json.dumps(generated(json.loads(sys.argv[1]))))
