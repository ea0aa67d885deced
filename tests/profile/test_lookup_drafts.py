"""`kind = "lookup"`: what a draft table without a model may say, and what happens where profiles are laid over it."""

import pytest

from specctl.errors import ProfileError, UsageError
from specctl.profile import Profile, resolve
from specctl.profile.schema import LOOKUP, DraftTable, PolicyTable
from specctl.profile.validation import require_models, require_offered

PAIR = """
[target]
model = "big"
[draft]
model = "small"
revision = "v2"
[draft.policy]
name = "constant"
"""
LOOKUP_FILE = """
[target]
model = "big"
[draft]
kind = "lookup"
"""


@pytest.fixture
def resolved(write, environ):
    """The profile of files and overrides; the last file is the profile."""

    def resolved(*files, **more):
        for number, text in enumerate(files):
            write(f"p{number}", text)
        return resolve(f"p{len(files) - 1}", environ=environ, **more)

    return resolved


def mistake(resolved, *files, **more):
    with pytest.raises(ProfileError) as caught:
        resolved(*files, **more)
    return caught.value.message


def test_a_lookup_needs_no_model_and_has_a_policy_that_fits(resolved):
    draft = resolved(LOOKUP_FILE).profile.draft
    assert (draft.kind, draft.model, draft.is_lookup) == ("lookup", LOOKUP, True)
    assert draft.policy.setting.label == "cost-optimal:use_foresight=true"


def test_other_drafts_are_what_their_files_say(resolved):
    draft = resolved(PAIR).profile.draft
    assert (draft.kind, draft.is_lookup) == ("auto", False)


def test_a_lookup_replaces_the_model_of_the_file_below(resolved):
    found = resolved(PAIR, 'extends = "p0"\n[draft]\nkind = "lookup"')
    draft = found.profile.draft
    assert (draft.model, draft.revision, draft.policy.name) == (LOOKUP, None, "constant")
    assert found.origins["draft.kind"].endswith("p1.toml:3")


def test_a_model_replaces_the_lookup_of_the_file_below(resolved):
    draft = resolved(LOOKUP_FILE, 'extends = "p0"\n[draft]\nmodel = "small"\npolicy.name = "svip"').profile.draft
    assert (draft.kind, draft.model) == ("auto", "small")


@pytest.mark.parametrize("more", [{"overrides": ["draft.kind=lookup"]}, {"flags": {"draft.model": LOOKUP}}])
def test_overrides_replace_a_model_too(resolved, more):
    found = resolved(PAIR, **more)
    assert found.profile.draft.is_lookup
    assert found.profile.draft.kind == "lookup"
    assert any("revision" in sentence for sentence in found.outdated)


def test_a_pair_of_flags(environ):
    draft = resolve(environ=environ, flags={"target.model": "big", "draft.model": LOOKUP}).profile.draft
    assert draft.policy.setting.label == "cost-optimal:use_foresight=true"


def test_a_lookup_is_the_lowest_draft(resolved):
    found = resolved(PAIR + '[draft.draft]\nkind = "lookup"')
    assert [level.model for level in found.profile.draft.levels] == ["small", LOOKUP]
    assert found.profile == Profile.model_validate(found.profile.model_dump())
    above = 'kind = "lookup"\n[draft.draft]\nmodel = "small"\npolicy.name = "constant"'
    assert "draft.draft: " in mistake(resolved, LOOKUP_FILE.replace('kind = "lookup"', above))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('model = "small"', "does not fit model = 'small'; a lookup has no model"),
        ('head = "h"', "draft.head: "),
        ('policy.name = "svip"', "svip reads signals that a lookup does not have; choose constant, heuristic, conf"),
        ('policy.name = "cost-optimal"', "choose constant, heuristic, confidence or cost-optimal:use_foresight=true"),
        ('policy.name = "specdec++"', "specdec++ reads signals"),
        ('policy = {name = "cost-optimal", use_head = true, use_foresight = true}', "exclude each other"),
    ],
)
def test_mistakes(resolved, line, message):
    assert message in mistake(resolved, f"{LOOKUP_FILE}{line}\n")


def test_a_kind_that_does_not_exist(resolved):
    assert "did you mean 'lookup'?" in mistake(resolved, PAIR.replace("[draft]\n", '[draft]\nkind = "lokup"\n'))


def test_a_target_is_no_lookup(resolved):
    assert "give it in [draft]" in mistake(resolved, f'[target]\nmodel = "{LOOKUP}"')


def test_a_policy_of_a_flag_is_checked_as_one_in_a_file_is():
    table = DraftTable.model_validate({"kind": "lookup", "model": LOOKUP, "policy": {"name": "constant"}})
    require_offered(table.policy.setting)
    with pytest.raises(ProfileError, match="svip reads signals"):
        require_offered(PolicyTable(name="svip").setting)
    require_models([], "analyze", "")
    with pytest.raises(UsageError, match="analyze reads a draft's distributions, and a lookup has none"):
        require_models([table], "analyze", "")


def test_a_lookup_alone_drafts_for_the_embedded_target(environ):
    found = resolve(environ=environ, flags={"draft.model": LOOKUP})
    assert found.profile.target.model == "embedded:target"
    assert found.profile.draft.policy.setting.label == "cost-optimal:use_foresight=true"
    assert found.profile.prompt.chat is False
    assert (found.name, found.origins["target.model"]) == (f"--draft {LOOKUP}", "default")
    named = resolve(environ={**environ, "SPECCTL_PROFILE": "embedded-constant"}, flags={"draft.model": LOOKUP})
    assert (named.name, named.profile.draft.policy.name) == ("embedded-constant", "constant")
