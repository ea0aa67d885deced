"""What may be asked for in vLLM's options, and why not."""

from types import SimpleNamespace
from typing import Any

import pytest

from specctl.errors import ProfileError, UsageError
from specctl_vllm.asked_policy import POLICIES, asked_policy


def config(policy: Any, **changed: Any) -> SimpleNamespace:
    """Of vLLM, with some options of its parts changed."""

    def part(**values: Any) -> SimpleNamespace:
        return SimpleNamespace(**{name: changed.get(name, value) for name, value in values.items()})

    return SimpleNamespace(
        additional_config={"specctl": policy} if policy is not None else {},
        use_v2_model_runner=changed.get("use_v2_model_runner", False),
        scheduler_config=part(async_scheduling=False),
        parallel_config=part(pipeline_parallel_size=1, data_parallel_size=1, tensor_parallel_size=1),
        speculative_config=part(
            method="draft_model",
            num_speculative_tokens=6,
            disable_padded_drafter_batch=False,
            rejection_sample_method="standard",
            use_heterogeneous_vocab=False,
            parallel_drafting=False,
        ),
    )


@pytest.mark.parametrize("name", POLICIES)
def test_the_longest_draft_is_vllms(name: str) -> None:
    setting = asked_policy(config({"name": name}))
    assert setting.policy == name
    assert setting.longest_draft == 6
    assert asked_policy(config({"name": name, "max_draft": 4})).longest_draft == 4


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"rejection_sample_method": "fly"}, "keeps tokens that the target would not have written"),
        ({"rejection_sample_method": "synthetic"}, "at a given rate"),
        ({"rejection_sample_method": "block"}, "only Model Slot V2"),
        ({"rejection_sample_method": "new"}, "not known to be exact"),
        ({"async_scheduling": True}, "add --no-async-scheduling"),
        ({"use_v2_model_runner": True}, "VLLM_USE_V2_MODEL_RUNNER=0"),
        ({"method": "eagle3"}, "a draft model alone"),
        ({"disable_padded_drafter_batch": True}, "disable_padded_drafter_batch"),
        ({"use_heterogeneous_vocab": True}, "the target's tokenizer"),
        ({"parallel_drafting": True}, "one token after another"),
        ({"data_parallel_size": 2}, "may end early"),
        ({"pipeline_parallel_size": 2}, "may end early"),
        ({"num_speculative_tokens": 3}, "max_draft = 4 is more than num_speculative_tokens = 3"),
    ],
    ids=str,
)
def test_options_under_which_it_would_be_wrong_are_errors(changed: dict[str, Any], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        asked_policy(config({"name": "svip", "max_draft": 4}, **changed))


@pytest.mark.parametrize(
    ("policy", "changed", "reason"),
    [
        (None, {}, "no policy is given"),
        ("svip", {}, "not a policy table"),
        ({}, {}, "name is None; here it may be svip"),
        ({"name": "bandit"}, {}, "name is 'bandit'; here"),
        ({"name": "cost-optimal"}, {"tensor_parallel_size": 2}, "reads clocks"),
        ({"name": "cost-optimal", "carry_over": False}, {}, "each request alone"),
        ({"name": "cost-optimal", "use_head": True}, {}, "no acceptance head"),
    ],
    ids=str,
)
def test_policies_that_would_mislead_are_errors(policy: Any, changed: dict[str, Any], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        asked_policy(config(policy, **changed))


def test_a_policys_settings_are_checked() -> None:
    with pytest.raises(ProfileError, match="treshold"):
        asked_policy(config({"name": "svip", "treshold": 0.5}))
    assert asked_policy(config({"name": "svip"}, tensor_parallel_size=2)).policy == "svip"
