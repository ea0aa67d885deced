"""Policies in a loop like vLLM's: each row ends its own draft, and what is drafted stays what it was."""

import pytest
import torch
from made_proposer import MadeProposer, Stopped

from specctl.policies import Setting
from specctl.records import DraftStep
from specctl_vllm.signals import read_step, signals_of

NAMES = ["a", "b", "c"]
SVIP = {"name": "svip", "threshold": 0.3, "max_draft": 6}


def made_logits(sure: list[int], steps: int = 6, vocab: int = 40) -> torch.Tensor:
    """Of each row so many steps with a likely token, and unlikely ones behind."""
    logits = torch.randn(steps, len(sure), vocab, generator=torch.Generator().manual_seed(3))
    for row, count in enumerate(sure):
        logits[:count, row] *= 20
        logits[count:, row] /= 20
    return logits


def started(policy: dict[str, object], sure: list[int], **options: bool) -> tuple[Stopped, list[list[int]]]:
    proposer = Stopped(policy, made_logits(sure), NAMES[: len(sure)], **options)
    return proposer, proposer.after([[1]] * len(sure), [0] * len(sure), 6)


def whole(sure: list[int]) -> list[list[int]]:
    found: list[list[int]] = MadeProposer(made_logits(sure)).propose(6).tolist()
    return found


@pytest.mark.parametrize(
    "policy",
    [SVIP, {"name": "adaedl", "max_draft": 6}, {"name": "max-confidence", "max_draft": 6}],
    ids=lambda policy: policy["name"],
)
@pytest.mark.parametrize("keep", [True, False])
def test_a_row_that_stops_is_drafted_less_and_others_go_on(policy: dict[str, object], keep: bool) -> None:
    sure = [1, 4, 2]
    proposer, drafts = started({**policy, "keep_trigger": keep}, sure)
    assert [len(draft) for draft in drafts] == [count + keep for count in sure]
    assert drafts == [full[: len(draft)] for full, draft in zip(whole(sure), drafts, strict=True)]
    assert proposer.passes == 5  # the longest draft's, with the token at which it stops


def test_each_row_ends_where_its_policy_alone_ends_it() -> None:
    sure = [0, 3, 6]
    _, drafts = started(SVIP, sure)
    for row, full in enumerate(whole(sure)):
        policy, length = Setting.of(SVIP).build(), 0
        for index, token in enumerate(full, start=1):
            (entropy, top), *_ = read_step(signals_of(made_logits(sure)[index - 1, row : row + 1]), torch.tensor([0]))[
                1
            ]
            length = index
            if policy.should_stop(DraftStep(index, token, entropy=entropy, top_prob=top)):
                break
        assert len(drafts[row]) == length


def test_without_a_stop_the_draft_is_the_whole_one() -> None:
    proposer, drafts = started({**SVIP, "threshold": 100.0}, [1, 4, 2])
    assert drafts == whole([1, 4, 2])
    assert proposer.passes == 6


def test_a_policy_shortens_the_loop_and_a_row_without_a_token_does_not_draft() -> None:
    proposer = Stopped({**SVIP, "max_draft": 3}, made_logits([6, 6, 6]), NAMES)
    drafts = proposer.after([[1], [], [1]], [0, -1, 0], 6)
    assert [len(draft) for draft in drafts] == [3, 0, 3]
    assert proposer.passes == 3
    assert not proposer.drafts.knows("b")


def test_laws_of_drawn_tokens_are_kept_as_far_as_was_drafted() -> None:
    proposer, drafts = started({**SVIP, "keep_trigger": False}, [1, 3], probs_kept=True)
    probs = proposer._last_draft_probs
    assert probs is not None
    assert probs.shape == (2, 4, 40)
    expected = (made_logits([1, 3])[:4] / 2).softmax(dim=-1).transpose(0, 1)
    assert torch.allclose(probs, expected)
    assert [len(draft) for draft in drafts] == [1, 3]


def test_outside_of_a_proposal_the_proposer_draws_as_it_does_alone() -> None:
    proposer, _ = started(SVIP, [1, 4, 2])
    tokens, _ = proposer._sample_draft_tokens(5, None)
    assert tokens.tolist() == [draft[5] for draft in whole([1, 4, 2])]
    assert proposer.drafts.counts.passes == 5


def test_verified_drafts_are_counted_and_observed() -> None:
    proposer, drafts = started({"name": "adaedl", "max_draft": 6, "threshold": 0.2, "eps": 0.1}, [2, 3])
    first, second = drafts
    thresholds = [request.policy.current_threshold for request in proposer.drafts._requests.values()]
    proposer.after([[first[0], 9], [*second, 9]], [len(first), len(second)], 6)
    counts = proposer.drafts.counts
    assert (counts.rounds, counts.drafted, counts.accepted) == (2, len(first) + len(second), 1 + len(second))
    moved = [request.policy.current_threshold for request in proposer.drafts._requests.values()]
    assert moved[0] > thresholds[0]  # few accepted
    assert moved[1] < thresholds[1]


def test_a_draft_that_was_cut_or_replaced_teaches_nothing_wrong() -> None:
    proposer, (draft,) = started(SVIP, [5])
    proposer.after([[*draft[:2], 9]], [2], 6)  # a grammar has cut it
    assert (proposer.drafts.counts.drafted, proposer.drafts.counts.accepted) == (2, 2)
    proposer.after([[draft[0] + 1, 9]], [6], 6)  # zeros of vLLM's own
    assert (proposer.drafts.counts.drafted, proposer.drafts.counts.accepted) == (2, 2)


def test_signals_are_those_of_temperature_1() -> None:
    logits = torch.tensor([[0.0, 0.0, float("-inf"), 0.0], [3.0, -1.0, 0.5, 0.25]])
    kept = logits.clone()
    tokens, signals = read_step(signals_of(logits), torch.tensor([2**31 - 1, 3], dtype=torch.int32))
    assert tokens == [2**31 - 1, 3]
    assert torch.equal(logits, kept)
    law = logits[1].double().softmax(dim=-1)
    assert signals[0] == pytest.approx((torch.tensor(3.0).log().item(), 1 / 3), rel=1e-6)
    assert signals[1] == pytest.approx((-(law * law.log()).sum().item(), law.max().item()), rel=1e-5)
