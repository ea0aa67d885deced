"""`[draft] parallel`: what a draft table may say, and what it comes to."""

import pytest

from specctl.errors import ProfileError
from specctl.profile import resolve
from specctl.profile.schema import DraftTable

PAIR = """
[target]
model = "big"
[draft]
model = "small"
parallel = true
[draft.policy]
name = "constant"
draft_length = 3
"""


@pytest.fixture
def resolved(write, environ):
    """The profile of a file and overrides."""

    def resolved(text=PAIR, **more):
        write("p", text)
        return resolve("p", environ=environ, **more).profile

    return resolved


def test_a_parallel_draft_has_a_constant_policy(resolved):
    setting = resolved().draft.setting
    assert (setting.parallel, setting.label) == (True, "constant:draft_length=3(parallel)")
    assert setting.table == {"name": "constant", "draft_length": 3, "parallel": True}
    forced = resolved(overrides=["draft.parallel=force"]).draft
    assert forced.setting.parallel == "force"
    assert forced.stopped_by(setting).setting == setting


def test_false_is_as_if_it_were_not_there(resolved):
    off, absent = resolved(overrides=["draft.parallel=false"]), resolved(PAIR.replace("parallel = true\n", ""))
    assert off == absent
    assert "parallel" not in off.model_dump(exclude_none=True)["draft"]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"draft.policy.name": "svip", "draft.policy.draft_length": None}, "there is nothing for svip to decide"),
        ({"draft.draft.model": "tiny"}, "needs a draft that no other model drafts for"),
        ({"draft.model": "prompt:lookup"}, "needs a draft model"),
        ({"draft.parallel": "yes"}, "parallel"),
    ],
)
def test_what_it_does_not_go_with_is_one_message_that_names_the_key(resolved, changes, why):
    text = PAIR.replace("draft_length = 3\n", "") if "draft.policy.name" in changes else PAIR
    overrides = [f"{key}={value}" for key, value in changes.items() if value is not None]
    with pytest.raises(ProfileError) as caught:
        resolved(text, overrides=overrides)
    assert "draft.parallel" in caught.value.message
    assert why in caught.value.message


def test_an_unknown_policy_has_its_own_message(resolved):
    with pytest.raises(ProfileError, match='"fixed" is not a policy'):
        resolved(overrides=["draft.policy.name=fixed"])


def test_a_draft_below_another_cannot():
    below = {"model": "b", "parallel": True, "policy": {"name": "constant"}}
    with pytest.raises(ValueError, match="only the draft that the target verifies"):
        DraftTable.model_validate({"model": "a", "draft": below})


def test_the_baseline_runs_with_it(resolved):
    """`--policy none` on such a profile drafts nothing, in parallel or not."""
    profile = resolved(PAIR.replace("draft_length = 3\n", ""), overrides=["draft.policy.name=none"])
    assert profile.draft.at_work() is None
