"""Which of the papers' policies a pair can run, and which of a benchmark's candidates are theirs."""

from collections.abc import Sequence

import pytest

from specctl.benchmark.papers import PAPERS, PEERS, RunnablePapers, left_out_lines, runnable_papers, sources
from specctl.errors import UsageError
from specctl.observing.candidates import candidates_of
from specctl.observing.results import Candidate
from specctl.peers.engines import parse_peer
from specctl.policies import Setting, nested
from specctl.profile import resolve

EVERY_LEVEL = "self-verify at every level"
TREES = {"constant:draft_length=6(tree=60)", "svip(tree=60)"}
FORESIGHT = {"confidence", "cost-optimal:use_foresight=true"}


def on(profile: str, *overrides: str, oracle: bool = False) -> RunnablePapers:
    return runnable_papers(resolve(profile, overrides=overrides, environ={}).profile, oracle=oracle)


@pytest.mark.parametrize(
    ("profile", "overrides", "left_out"),
    [
        ("embedded", [], {EVERY_LEVEL, "disco", *FORESIGHT}),
        ("embedded-disco", [], {EVERY_LEVEL, "specdec++", *FORESIGHT}),
        ("embedded-hsddw", [], {"specdec++", "disco", *FORESIGHT}),
        ("embedded-eagle3", [], {EVERY_LEVEL, "disco", *FORESIGHT, *PEERS}),
        ("embedded-dspark", [], {EVERY_LEVEL, "specdec++", "disco", *TREES, *PEERS}),
        ("embedded", ["deterministic=true"], {EVERY_LEVEL, "disco", *FORESIGHT, *TREES}),
        (
            "embedded-lookup",
            [],
            {EVERY_LEVEL, "max-confidence", "svip", "adaedl", "self-verify", "bandit", "cost-optimal", "specdec++"}
            | {"disco", *TREES, *PEERS},
        ),
    ],
)
@pytest.mark.representatives("embedded-hsddw", "embedded-eagle3", "embedded-lookup")
def test_what_a_pair_cannot_run_is_left_out(profile: str, overrides: Sequence[str], left_out: set[str]) -> None:
    found = on(profile, *overrides)
    assert set(found.left_out) == left_out
    assert len(found.tables) == len([one for one in PAPERS if one.label not in left_out])
    assert {peer.label for peer in found.peers} == set(PEERS) - left_out
    candidates = candidates_of(found.tables, found.peers)
    assert set(sources(candidates.all)) == {one.label for one in candidates.all} - {"none"}, "a row has no paper"


def test_bounds_are_for_chains() -> None:
    assert {*TREES} <= set(on("embedded", oracle=True).left_out)


def test_of_a_hierarchy_one_row_has_all_drafts() -> None:
    tables = on("embedded-hsddw").tables
    assert [len(table.levels) for table in tables].count(2) == 1
    (whole,) = (table for table in tables if table.draft is not None)
    assert whole.setting == nested([Setting("self-verify"), Setting("self-verify")])
    assert {table.model for table in tables} == {"embedded:mid"}


def test_a_hierarchy_over_a_lookup_has_no_entropy_below() -> None:
    found = on("embedded-constant", 'draft.draft={kind="lookup"}')
    assert found.left_out[EVERY_LEVEL] == "a lookup has no distribution"


def test_the_drafts_of_the_profile_keep_nothing_of_its_own_policy() -> None:
    tables = on("embedded", "draft.tree=9").tables
    assert {table.tree for table in tables} == {None, 60}


def test_a_target_alone_has_nothing_to_compare() -> None:
    with pytest.raises(UsageError, match="--papers has no draft to stop"):
        runnable_papers(resolve(flags={"target.model": "embedded:target"}, environ={}).profile)


def test_one_line_for_each_reason() -> None:
    lines = list(left_out_lines({"a": "it rains", "b": "it snows", "c": "it rains"}))
    assert lines == ["left out, because it rains: a, c", "left out, because it snows: b"]


def test_a_candidate_with_other_settings_is_no_papers() -> None:
    settings = [Setting("svip"), Setting.of({"name": "svip", "threshold": 0.5}), Setting("specdec++", head="mine")]
    settings.append(nested([Setting("self-verify"), Setting("svip")]))
    candidates = [Candidate(one.label, one) for one in settings]
    candidates += [Candidate("hf", None, peer="hf-constant"), Candidate("x", None, peer=parse_peer("openvino").peer)]
    assert list(sources(candidates)) == ["svip", "specdec++:head=mine", "hf"]
