"""Policies of requests that come and go, and the one that decides for all of them."""

import pytest

from specctl.policies import Setting
from specctl_vllm.batch_drafts import BatchDrafts, Verdict

SURE, UNSURE = (0.001, 0.999), (3.0, 0.1)


def drafted(drafts: BatchDrafts, names: list[str], sure: list[int], longest: int = 8) -> list[int]:
    """Lengths of drafts whose rows are sure of so many tokens."""
    if drafts.begin(names, longest):
        for place in range(longest):
            if not drafts.step([5] * len(names), [SURE if place < count else UNSURE for count in sure]):
                break
    return [len(tokens) for tokens in drafts.tokens]


def verdicts(lengths: list[int], accepted: list[int]) -> list[Verdict]:
    return [Verdict((5,) * kept + (7,), length) for length, kept in zip(lengths, accepted, strict=True)]


def test_a_policy_object_goes_from_a_request_that_ended_to_the_next() -> None:
    drafts = BatchDrafts(Setting.of({"name": "adaedl", "carry_over": True, "eps": 0.1}))
    lengths = drafted(drafts, ["a"], [3])
    drafts.observe(["a"], verdicts(lengths, [0]), {"a"})
    policy = drafts._requests["a"].policy
    moved = policy.current_threshold
    drafts.observe(["b"], [Verdict((7,), 0)], {"b"})
    drafted(drafts, ["b"], [3])
    assert drafts._requests.keys() == {"b"}
    assert drafts._requests["b"].policy is policy
    assert policy.current_threshold == moved
    assert drafts.counts.rounds == 1


def test_without_carry_over_the_next_request_begins_anew() -> None:
    drafts = BatchDrafts(Setting.of({"name": "adaedl", "eps": 0.1}))
    lengths = drafted(drafts, ["a"], [3])
    drafts.observe(["a"], verdicts(lengths, [0]), {"a"})
    drafts.observe([], [], ())
    drafted(drafts, ["b"], [3])
    assert drafts._requests["b"].policy.current_threshold == 0.4


def rounds(drafts: BatchDrafts, names: list[str], sure: list[int], step_seconds: float, count: int = 40) -> list[int]:
    """Lengths of the last drafts, where all that rows are sure of is accepted and a draft step takes so long."""
    lengths: list[int] = []
    for _ in range(count):
        before = drafts.counts.passes
        lengths = drafted(drafts, names, sure)
        seconds = step_seconds * (drafts.counts.passes - before), 1.0
        drafts.observe(names, verdicts(lengths, list(map(min, lengths, sure))), names, seconds)
    return lengths


def test_cost_optimal_decides_for_all_requests_together() -> None:
    """A pass takes its time whoever takes part, so what does not pay for one request pays for four."""
    names = ["a", "b", "c", "d"]
    longest = {}
    for count in (1, 4):
        drafts = BatchDrafts(Setting.of({"name": "cost-optimal", "max_draft": 8}))
        longest[count] = max(rounds(drafts, names[:count], [8] * count, 0.05))
    assert longest[4] == 8
    dear = BatchDrafts(Setting.of({"name": "cost-optimal", "max_draft": 8}))
    assert max(rounds(dear, names, [8, 0, 0, 0], 2.0)) < 8


def test_cost_optimal_asks_once_a_step_for_all_that_draft() -> None:
    drafts = BatchDrafts(Setting.of({"name": "cost-optimal", "max_draft": 8}))
    rounds(drafts, ["a", "b", "c"], [8, 8, 8], 0.01)
    joint = drafts._joint
    assert joint is not None
    asked = []
    run = joint.run

    def watched(rows: list[object]) -> list[int]:
        asked.append(len(rows))
        return run(rows)

    joint.run = watched  # type: ignore[method-assign]
    lengths = drafted(drafts, ["a", "b", "c"], [8, 8, 8], longest=3)
    assert lengths == [3, 3, 3]
    assert asked[0] == 3
    assert set(asked) == {3}


@pytest.mark.parametrize("name", ["svip", "cost-optimal"])
def test_a_request_that_comes_and_one_that_goes_leave_the_others_alone(name: str) -> None:
    drafts = BatchDrafts(Setting.of({"name": name, "max_draft": 4}))
    lengths = drafted(drafts, ["a", "b"], [4, 4])
    drafts.observe(["b", "c"], [*verdicts(lengths[1:], [0]), Verdict((9,), 0)], {"b", "c"})
    lengths = drafted(drafts, ["b", "c"], [4, 4])
    assert len(lengths) == 2
    assert drafts.counts.rounds == 1
    drafts.observe(["b", "c"], verdicts(lengths, lengths), {"b", "c"})
    assert drafts.counts.rounds == 3
