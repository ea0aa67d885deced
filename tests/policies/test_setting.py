"""A setting is one value wherever it comes from: profile, flag, table or results file."""

from dataclasses import fields, replace

import pytest

from specctl.errors import UsageError
from specctl.observing.results import Candidate, candidate_of, candidate_record
from specctl.policies import NONE, POLICIES, Setting, nested
from specctl.policies.setting import TreeSize, parse_tree
from specctl.profile import parse_policy, resolve
from specctl.profile.schema import PolicyTable

CHAIN = nested(
    [
        replace(Setting.of({"name": "constant", "draft_length": 9}), once=True),
        Setting.of({"name": "max-confidence", "adapt": False, "threshold": 0.123456789}),
    ]
)


def test_a_profile_a_flag_and_a_table_give_the_same_setting() -> None:
    text = "svip:threshold=0.4,max_draft=20"
    expected = Setting("svip", (("threshold", 0.4), ("max_draft", 20)))
    assert Setting.of(parse_policy(text)) == expected
    assert Setting.of({"max_draft": 20, "c": 0.15, "threshold": 0.4, "name": "svip"}) == expected
    assert PolicyTable(name="svip", threshold=0.4, max_draft=20).setting == expected
    overrides = ["policy.threshold=0.4", "policy.max_draft=20", "policy.name=svip"]
    draft = resolve("embedded", overrides=overrides, environ={}).profile.draft
    assert draft is not None
    assert draft.setting == expected
    assert expected.label == text


def test_a_label_says_values_so_that_the_flag_takes_them() -> None:
    for level in CHAIN.levels:
        assert Setting.of(parse_policy(replace(level, once=False, below=None).label)).values == level.values
    assert CHAIN.label_on(["mid", "draft"]) == (
        "constant:draft_length=9(once)@mid < max-confidence:threshold=0.123456789,adapt=false@draft"
    )


def test_settings_of_one_family_differ_in_values_alone() -> None:
    other = nested([replace(Setting("constant"), once=True), Setting("max-confidence")])
    assert CHAIN.family == other.family == "constant(once) < max-confidence"
    assert other.family != nested(list(map(Setting, ("constant", "max-confidence")))).family


@pytest.mark.parametrize("name", POLICIES)
def test_what_a_setting_says_of_its_policy_is_what_the_policy_does(name: str) -> None:
    """Signals, drafting and the longest draft are read off the setting, without building a policy."""
    setting = Setting(name)
    policy = setting.build()
    assert setting.signals == policy.signals
    assert setting.drafts == policy.drafts == (name != "none")
    assert setting.needs_predictor == (name in ("specdec++", "disco"))
    assert setting.longest_draft >= policy.draft_limit()
    own = {one.name: getattr(policy, one.name) for one in fields(policy) if one.init}  # type: ignore[arg-type]
    assert setting.all_values == own


def test_signals_follow_the_values() -> None:
    assert Setting.of({"name": "cost-optimal", "use_head": True}).needs_predictor
    assert not Setting("cost-optimal").needs_predictor


@pytest.mark.parametrize(
    "candidate",
    [
        Candidate("none"),
        Candidate("svip", Setting.of({"name": "svip", "threshold": 0.4})),
        Candidate("constant@draft", Setting("constant"), (1,)),
        Candidate("chain", CHAIN, (0, 1)),
        Candidate("head", Setting("specdec++", head="sweep/d1", head_label="d1")),
        Candidate("hf", None, peer="hf", peer_settings={"num_assistant_tokens": 5}),
    ],
    ids=lambda candidate: candidate.label,
)
def test_an_candidate_survives_a_results_file(candidate: Candidate) -> None:
    assert candidate_of(candidate_record(candidate)) == candidate


def test_a_policy_of_another_version_is_kept_as_it_was_written() -> None:
    record = {"label": "x", "kind": "policy", "name": "from-the-future", "settings": {"a": 1, "b": True}}
    found = candidate_of(record)
    assert candidate_record(found) == record
    assert found.setting is not None
    assert found.setting.label == "from-the-future:a=1,b=true"


def test_levels_at_and_below_one_that_never_drafts_are_left_out() -> None:
    top = replace(CHAIN, below=None)
    assert nested([top, NONE, Setting("svip")]) == replace(top, once=False)
    assert nested([NONE, Setting("svip")]) == NONE


@pytest.mark.parametrize(("size", "shown"), [(TreeSize(30), "tree=30"), (TreeSize(30, 4), "tree=30,tree_beams=4")])
def test_a_tree_is_a_part_of_a_setting(size: TreeSize, shown: str) -> None:
    plain = Setting.of({"name": "constant", "draft_length": 9})
    setting = replace(plain, tree=size)
    assert setting.label == f"constant:draft_length=9({shown})"
    assert setting != plain
    assert setting.family != plain.family
    assert (setting.table["tree"], setting.table["tree_beams"]) == (size.tokens, size.beams)
    one = Candidate(setting.label, setting)
    assert one.drafts_trees
    assert candidate_of(candidate_record(one)) == one


@pytest.mark.parametrize("text", ["1", "65", "ten", "-3", ""])
def test_a_tree_of_no_possible_size_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--tree"):
        parse_tree(text)
    assert parse_tree("60") == 60


@pytest.mark.parametrize(
    ("text", "never"),
    [
        ("svip:threshold=3", True),
        ("svip:threshold=1.5", True),
        ("svip:threshold=1.2", False),
        ("svip:threshold=3,c=1", False),
        ("svip:threshold=0", False),
        ("svip:threshold=3,max_draft=1", False),
        ("svip", False),
        ("max-confidence:threshold=0,adapt=false", True),
        ("max-confidence:threshold=0,eps=0", True),
        ("max-confidence:threshold=0", False),
        ("specdec++:threshold=1", True),
        ("disco:threshold=0", True),
        ("confidence:threshold=0", True),
        ("confidence:threshold=0.01", False),
        ("adaedl:threshold=0", False),
        ("constant:draft_length=9", False),
        ("cost-optimal", False),
        ("bandit", False),
    ],
)
def test_a_threshold_that_no_token_reaches_is_known(text: str, never: bool) -> None:
    assert Setting.of(parse_policy(text)).never_stops == never
