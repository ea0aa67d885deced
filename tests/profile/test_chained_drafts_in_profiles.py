"""Chains of a lookup and a model in profiles and flags."""

import pytest

from specctl.errors import ProfileError
from specctl.profile import Profile, resolve
from specctl.profile.schema import LOOKUP, DraftTable

CHAIN = """
[target]
model = "big"
[draft]
model = ["prompt:lookup", "small"]
"""


@pytest.fixture
def resolved(write, environ):
    def resolved(*files, **more):
        for number, text in enumerate(files):
            write(f"p{number}", text)
        return resolve(f"p{len(files) - 1}", environ=environ, **more)

    return resolved


@pytest.mark.parametrize(
    "model",
    ['["prompt:lookup", "small"]', '["small", "prompt:lookup"]', '"prompt:lookup+small"', '"small"\nlookup = true'],
)
def test_a_chain_is_a_model_with_a_lookup(resolved, model):
    found = resolved(CHAIN.replace('["prompt:lookup", "small"]', model)).profile
    assert (found.draft.model, found.draft.lookup, found.draft.kind) == ("small", True, "auto")
    assert found.draft.setting.label == "svip(lookup)"
    assert found.draft.setting.table["lookup"] is True
    assert found == Profile.model_validate(found.model_dump())
    assert found.draft.stopped_by(found.draft.setting) == found.draft


def test_a_chain_of_flags_learns_when_to_stop(environ):
    draft = resolve(environ=environ, flags={"target.model": "big", "draft.model": f"{LOOKUP}+./a+b"}).profile.draft
    assert (draft.model, draft.lookup, draft.policy.name) == ("./a+b", True, "cost-optimal")


def test_a_model_that_is_named_alone_drafts_alone(resolved):
    assert not resolved(CHAIN, flags={"draft.model": "small"}).profile.draft.lookup
    assert resolved(CHAIN, flags={"draft.model": f"{LOOKUP}+other"}).profile.draft.lookup
    assert not resolved(CHAIN, overrides=["draft.lookup=false"]).profile.draft.lookup
    assert resolved(CHAIN, 'extends = "p0"\n[draft.policy]\nname = "constant"').profile.draft.lookup


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ('"small"\nearlier = 100', "is for a chain with a lookup"),
        ("[]", "names no draft; a chain is two sources"),
        ('["prompt:lookup"]', "names a lookup alone; without a model it is not a chain: model = 'prompt:lookup'"),
        ('["prompt:lookup", "prompt:lookup"]', "names prompt:lookup twice"),
        ('["small", "prompt:lookup", "small"]', "names small twice"),
        ('["small", "other"]', "a model that drafts for another is in a [draft.draft] table"),
        ('["prompt:lookup", 3]', "a chain is two sources"),
        ('"prompt:lookup+"', "names no model"),
        ('"prompt:lookup+prompt:lookup"', "names prompt:lookup twice"),
        ('"prompt:lookup+./small+prompt:lookup"', "names prompt:lookup twice"),
        ('["prompt:lookup", "./small+prompt:lookup"]', "a chain is two sources, a lookup and one model"),
        ('["prompt:lookup", "small"]\ntree = 8', "excludes tree"),
        ('["prompt:lookup", "small"]\npolicy.name = "constant"\nparallel = true', "excludes parallel"),
        ('"prompt:lookup"\nlookup = true', "does not apply to a draft that copies from the text"),
        ('"mid"\n[draft.draft]\nmodel = ["prompt:lookup", "small"]', "cannot be in a chain with a lookup"),
    ],
)
def test_mistakes(resolved, model, message):
    with pytest.raises(ProfileError) as caught:
        resolved(CHAIN.replace('["prompt:lookup", "small"]', model))
    assert message in caught.value.message
    assert "mistakes" not in caught.value.message


def test_earlier_answers_are_of_the_setting(resolved):
    draft = resolved(CHAIN + "earlier = 500").profile.draft
    assert draft.setting.label == "svip(lookup, earlier=500)"
    assert (draft.setting.table["earlier"], draft.stopped_by(draft.setting)) == (500, draft)
    assert resolved(CHAIN + "earlier = 500", flags={"draft.model": "small"}).profile.draft.earlier == 0


def test_a_table_of_a_program():
    assert DraftTable.model_validate({"model": f"{LOOKUP}+small"}).lookup
