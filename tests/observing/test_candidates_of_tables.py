from dataclasses import replace

import pytest

from specctl.commands.flags import warn_unused
from specctl.errors import ProfileError, UsageError
from specctl.observing.candidates import candidates_of, competing_drafts, with_counterpart
from specctl.observing.results import Candidate, candidate_of, candidate_record
from specctl.peers.engines import parse_peer
from specctl.policies import Setting, nested
from specctl.policies.setting import TreeSize
from specctl.profile import ResolvedProfile
from specctl.profile.schema import LOOKUP, DraftTable, ModelTable, PolicyTable, Profile


def draft(*models: str, policy: str = "constant") -> DraftTable:
    """A chain of drafts, the target's own first."""
    first, *below = models
    return DraftTable.model_validate(
        {"model": first, "policy": {"name": policy}, **({"draft": draft(*below).model_dump()} if below else {})}
    )


def test_a_single_draft_is_told_by_its_policy_alone() -> None:
    candidates = candidates_of([draft("a"), draft("a", policy="svip"), draft("a")], [parse_peer("hf-constant")])
    candidates, drafts = candidates.all, candidates.drafts
    assert [candidate.label for candidate in candidates] == ["none", "constant", "svip", "hf-constant"]
    assert all(candidate.drafts == (0,) for candidate in candidates)
    assert [table.model for table in drafts] == ["a"]


def test_each_model_is_loaded_once_in_the_order_it_appears() -> None:
    candidates = candidates_of([draft("a"), draft("b", "a"), draft("x/b")], [])
    candidates, drafts = candidates.all, candidates.drafts
    assert [table.model for table in drafts] == ["a", "b", "x/b"]
    assert [candidate.drafts for candidate in candidates] == [(0,), (0,), (1, 0), (2,)]
    assert [candidate.label for candidate in candidates[:3]] == ["none", "constant@a", "constant@b < constant@a"]


def test_a_model_at_two_levels_is_loaded_twice() -> None:
    """They would spoil each other's cache."""
    candidates = candidates_of([draft("a", "b", "b"), draft("b")], [])
    candidates, drafts = candidates.all, candidates.drafts
    assert [table.model for table in drafts] == ["a", "b", "b"]
    assert [candidate.drafts for candidate in candidates[1:]] == [(0, 1, 2), (1,)]


def test_lookups_are_one_draft_whatever_their_tables_say() -> None:
    over = DraftTable.model_validate(
        {**draft("a").model_dump(), "draft": {**draft(LOOKUP).model_dump(), "device": "cpu"}}
    )
    candidates = candidates_of([draft(LOOKUP), over])
    assert [table.model for table in candidates.drafts] == [LOOKUP, "a"]
    assert [candidate.drafts for candidate in candidates.all[1:]] == [(0,), (1, 0)]
    with pytest.raises(ProfileError, match="svip reads signals that a lookup does not have"):
        candidates_of([draft("a"), draft(LOOKUP, policy="svip")])


def test_what_never_drafts_is_not_loaded() -> None:
    candidates = candidates_of([DraftTable.model_validate({**draft("a").model_dump(), "draft": idle()})], [])
    candidates, drafts = candidates.all, candidates.drafts
    assert [table.model for table in drafts] == ["a"]
    assert [candidate.label for candidate in candidates] == ["none", "constant"]


def idle() -> dict[str, object]:
    return draft("b", policy="none").model_dump()


def test_levels_carry_every_setting() -> None:
    table = draft("a", "b").model_copy(update={"pre_verify": "once"})
    _, candidate = candidates_of([table], []).all
    assert candidate.label == "constant(once) < constant"
    assert (candidate.setting, candidate.drafts) == (
        nested([Setting("constant", once=True), Setting("constant")]),
        (0, 1),
    )
    assert [level["settings"] for level in candidate_record(candidate)["levels"]] == [{"draft_length": 5}] * 2


def judged(head: str | None, policy: str = "specdec++") -> DraftTable:
    return draft("a", policy=policy).model_copy(update={"head": head})


def test_a_head_is_loaded_where_a_policy_reads_it() -> None:
    assert candidates_of([judged("h", "svip")], []).heads == [[]]
    assert candidates_of([judged(None, "svip"), judged("h")], []).heads == [["h"]]
    assert candidates_of([judged("h", "svip"), judged(None)], []).heads == [["h"]]
    below = draft("b").model_copy(update={"draft": judged("h")})
    assert candidates_of([below], []).heads == [[], ["h"]]


def test_several_heads_of_a_draft_are_told_apart() -> None:
    candidates = candidates_of([judged("sweep/d1/w3"), judged("sweep/d2/w3"), judged("sweep/d1/w3", "svip")], [])
    assert candidates.heads == [["sweep/d1/w3", "sweep/d2/w3"]]
    labels = ["none", "specdec++:head=d1/w3", "specdec++:head=d2/w3", "svip"]
    assert [candidate.label for candidate in candidates.all] == labels
    assert [candidate.setting.head for candidate in candidates.all] == [None, "sweep/d1/w3", "sweep/d2/w3", None]
    assert len({candidate.family for candidate in candidates.all}) == 4


@pytest.mark.parametrize(("heads", "message"), [((None,), "needs a head"), (("h", "i", None), "different heads")])
def test_a_policy_that_reads_a_head_must_know_which(heads: tuple[str | None, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        candidates_of(list(map(judged, heads)), [])


@pytest.mark.parametrize(
    ("one", "other", "names"),
    [
        ({}, {"quantize": "int4"}, "a, a in int4"),
        ({}, {"adapter": "x"}, "a, a with x"),
        ({"revision": "v1"}, {}, "a at v1, a"),
        ({"dtype": "float32"}, {"dtype": "bfloat16"}, "a in float32, a in bfloat16"),
    ],
)
def test_a_model_that_is_loaded_in_two_ways_is_two_targets(
    one: dict[str, str], other: dict[str, str], names: str
) -> None:
    profiles = [
        Profile(target=ModelTable.model_validate({"model": "a", **how}), draft=draft("b")) for how in (one, other)
    ]
    with pytest.raises(UsageError, match=rf"different models as target \({names}\)"):
        competing_drafts(profiles, [])


def test_a_target_whose_dtype_one_profile_leaves_open_is_one_target() -> None:
    tables = [ModelTable(model="a", dtype=dtype) for dtype in ("auto", "float32", "auto")]
    assert len(competing_drafts([Profile(target=table, draft=draft("b")) for table in tables], [])) == 6


def test_what_another_profile_says_of_the_run_is_told_and_not_used(capsys: pytest.CaptureFixture[str]) -> None:
    first = Profile(target=ModelTable(model="a", dtype="float32"), draft=draft("b"))
    other = Profile.model_validate(
        {
            "target": {"model": "a"},
            "draft": draft("c").model_dump(),
            "engine": "eager",
            "sampling": {"temperature": 0.5, "seed": 0},
            "description": "another",
        }
    )
    everything = {"engine": "y.toml:3", "target.dtype": "y.toml:4", "sampling.temperature": "--set"}
    assert ResolvedProfile("y", None, other, everything).unused(first) == [
        "engine",
        "target.dtype",
        "sampling.temperature",
    ]
    assert ResolvedProfile("x", None, first, everything).unused(first) == []
    found = ResolvedProfile("y", None, other, {"engine": "y.toml:3", "threads": "default"}).under(first, "--against")
    assert (found.profile.draft, found.profile.description) == (other.draft, "another")
    assert replace(found, origins=everything).unused(first) == []
    assert found.origins == {"threads": "default"} | dict.fromkeys(everything, "flag --against")
    said = {**everything, "target.dtype": "default"}
    warn_unused([ResolvedProfile("x", None, first, {}), ResolvedProfile("y", None, other, said)])
    assert capsys.readouterr().err == (
        "warning: y: engine and sampling.temperature are not used: the first profile, x, decides for the run\n"
    )
    warn_unused([ResolvedProfile("x", None, first, {}), ResolvedProfile("z", None, first, {"engine": "z.toml:3"})])
    assert not capsys.readouterr().err


def test_a_draft_quantised_in_two_ways_is_loaded_twice() -> None:
    candidates = candidates_of([draft("a"), draft("a").model_copy(update={"quantize": "int8"})], [])
    assert [table.quantize for table in candidates.drafts] == [None, "int8"]


@pytest.mark.parametrize(
    ("more", "names"),
    [
        ([{"quantize": "int8"}, {"quantize": "int4"}], ["a", "a-int8", "a-int4"]),
        ([{"dtype": "float16"}], ["a-auto", "a-float16"]),
        ([{"model": "x/a"}, {"model": "y/a"}], ["a", "x/a", "y/a"]),
        ([{"tokens": 7}, {"tokens": 7, "quantize": "int8"}], ["a", "a-7", "a-7-int8"]),
        ([{"trust_remote_code": True}], ["a-trust_remote_code=False", "a-trust_remote_code=True"]),
    ],
)
def test_no_draft_takes_the_name_of_another(more: list[dict[str, object]], names: list[str]) -> None:
    """Who had no name of its own would not run, and nobody would hear of it."""
    tables = [DraftTable.model_validate({**draft("a").model_dump(), **each}) for each in ({}, *more)]
    found = candidates_of(tables)
    assert found.names == names
    assert [one.label for one in found.all[1:]] == [f"constant@{name}" for name in names]


def test_every_candidate_competes_with_trees_too() -> None:
    profile = Profile(target=ModelTable(model="t"), draft=draft("a"))
    candidates = candidates_of(competing_drafts([profile], [PolicyTable(name="svip")], [60, 8]))
    labels = [one.label for one in candidates.all]
    assert labels == ["none", "svip", "svip(tree=60)", "svip(tree=8)"]
    assert candidates.tree == TreeSize(60)
    assert candidates_of(competing_drafts([profile], [PolicyTable(name="svip")])).tree is None
    with_tree = Profile(target=ModelTable(model="t"), draft=draft("a").model_copy(update={"tree": 9}))
    shapes = [one.label for one in candidates_of(competing_drafts([with_tree], [PolicyTable(name="svip")], [5])).all]
    assert shapes == ["none", "svip(tree=9)", "svip(tree=5)"]


def in_parallel() -> DraftTable:
    return DraftTable(model="a", policy=PolicyTable(name="constant"), parallel=True)


def test_a_draft_in_parallel_is_compared_with_simple_policies_in_turns() -> None:
    profile = Profile(target=ModelTable(model="big"), draft=in_parallel())
    candidates = candidates_of(competing_drafts([profile], []))
    assert [one.label for one in candidates.all] == [
        "none",
        "constant(parallel)",
        "constant",
        "heuristic",
        "cost-optimal",
    ]
    assert [one.parallel for one in candidates.all] == [False, True, False, False, False]
    assert [table.model for table in candidates.drafts] == ["a"]


def test_a_lookup_is_compared_with_policies_that_read_what_it_has() -> None:
    table = DraftTable(model="prompt:lookup", policy=PolicyTable(name="constant", draft_length=2))  # type: ignore[call-arg]
    candidates = candidates_of(competing_drafts([Profile(target=ModelTable(model="big"), draft=table)], []))
    assert [one.label for one in candidates.all] == [
        "none",
        "constant:draft_length=2",
        "constant",
        "heuristic",
        "cost-optimal:use_foresight=true",
    ]


def test_a_hierarchy_is_compared_with_each_of_its_drafts_alone() -> None:
    table = draft("a").model_copy(update={"draft": draft("b"), "pre_verify": "loop"})
    candidates = candidates_of(competing_drafts([Profile(target=ModelTable(model="big"), draft=table)], []))
    assert [one.label for one in candidates.all][2:] == [
        "constant@a",
        "cost-optimal@a",
        "constant@b",
        "cost-optimal@b",
    ]


def test_of_the_policies_named_only_those_of_fixed_length_stay_parallel() -> None:
    profile = Profile(target=ModelTable(model="big"), draft=in_parallel())
    policies = [PolicyTable(name="constant", draft_length=2), PolicyTable(name="svip")]  # type: ignore[call-arg]
    candidates = candidates_of(competing_drafts([profile], policies))
    assert [one.label for one in candidates.all] == ["none", "constant:draft_length=2(parallel)", "svip"]


@pytest.mark.parametrize("parallel", [True, "force"])
def test_a_results_file_knows_who_was_parallel(parallel: bool | str) -> None:
    table = in_parallel().model_copy(update={"parallel": parallel})
    (_, found) = candidates_of([table]).all
    assert candidate_of(candidate_record(found)) == found
    assert found.setting is not None
    assert found.setting.parallel == parallel


def test_ours_runs_eagerly_too_beside_transformers_own_loop() -> None:
    plain = candidates_of([draft("a", policy="svip"), draft("a")], [parse_peer("openvino")])
    assert with_counterpart(plain) is plain
    candidates = with_counterpart(
        candidates_of([draft("a", policy="svip"), draft("a")], [*map(parse_peer, ("openvino", "hf-constant"))])
    )
    assert [one.label for one in candidates.all] == [
        "none",
        "svip",
        "constant",
        "openvino:constant:5",
        "svip (eager)",
        "hf-constant",
    ]
    eager = candidates.all[4]
    assert (eager.setting, eager.engine) == (candidates.all[1].setting, "eager")
    assert candidate_of(candidate_record(eager)) == eager
    assert eager.family != candidates.all[1].family, "files are not compared across engines"
    assert not eager.takes_turns_in_chains, "its passes take other times than those that were measured"
    nested_alone = candidates_of([draft("a", "b")], [parse_peer("hf-constant")])
    assert with_counterpart(nested_alone) is nested_alone, "transformers drafts with one model"


def test_the_second_of_two_drafts_is_no_level_of_the_first() -> None:
    engines = {"target": "onnx (why)", "draft": "onnx", "draft.draft": "eager"}
    one, two = Candidate("a", Setting("constant"), (1,)), Candidate("b", Setting("constant"), (1, 0))
    assert one.ran_on(engines) == "target onnx, draft eager"
    assert two.ran_on(engines) == "target onnx, draft eager, draft.draft onnx"
    assert Candidate("c", Setting("constant"), (0,)).ran_on(engines) == "onnx"
