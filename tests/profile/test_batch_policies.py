"""Policies for several texts in profiles: what keeps them, what excludes them, and what they keep of their draft."""

import pytest

from specctl.errors import ProfileError
from specctl.profile import parse_policy, resolve

SEVERAL = """
[target]
model = "big"
[draft]
model = ["prompt:lookup", "small"]
earlier = 500
batch_policies = { 4 = "constant:draft_length=2", 16 = "none" }
[draft.policy]
name = "svip"
"""


@pytest.fixture
def resolved(write, environ):
    def resolved(text=SEVERAL, **more):
        write("several", text)
        return resolve("several", environ=environ, **more)

    return resolved


def test_a_setting_alone_leaves_them_and_another_policy_takes_their_place(resolved):
    draft = resolved(overrides=["policy.threshold=0.4"]).profile.draft
    assert draft.policy.setting.label == "svip:threshold=0.4"
    assert draft.batch_policies == {"4": "constant:draft_length=2", "16": "none"}
    assert resolved(overrides=["policy.name=svip"]).profile.draft.batch_policies is None
    assert resolved(flags={"draft.policy": parse_policy("adaedl")}).profile.draft.batch_policies is None


def test_a_chain_with_a_lookup_is_the_same_for_several_texts(resolved):
    setting = resolved().profile.draft.setting
    assert [setting.at(rows).label for rows in (1, 4, 16)] == [
        "svip(lookup, earlier=500)",
        "constant:draft_length=2(lookup, earlier=500)",
        "none",
    ]


@pytest.mark.parametrize("value", ["tree = 8", "parallel = true"])
def test_they_exclude_what_is_for_one_text_at_a_time(resolved, value):
    model = '["prompt:lookup", "small"]\nearlier = 500'
    shaped = SEVERAL.replace(model, f'"small"\n{value}').replace("svip", "constant")
    with pytest.raises(ProfileError, match=f"several texts at once, and with {value.split()[0]} they are written one"):
        resolved(shaped)
    assert resolved(shaped, flags={"draft.policy": parse_policy("constant")}).profile.draft.batch_policies is None
