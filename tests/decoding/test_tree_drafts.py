"""Dynamic trees change how many tokens a round brings, and never which."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from law_table import DRAFT, ENDS, FEW, HEAD, LENGTH, PROMPT, SAMPLINGS, TARGET, enumerate_decode, error, expected_law
from toys import (
    LAYER,
    NUMBERS,
    STOPPING,
    WITHOUT_FORESIGHT,
    Script,
    StateTable,
    TableRunner,
    ToyDraftHead,
    noisy_copy,
    random_head,
    random_model,
    related_table,
    seeded,
    table,
)
from transformers import GenerationConfig

from specctl.decoding import tree_verification
from specctl.decoding.beams import IMPOSSIBLE, ROOT, BeamTree
from specctl.decoding.drafters import Draft, Drafter, ModelDrafter
from specctl.decoding.loop import decode
from specctl.decoding.round import prefill, verified_round
from specctl.decoding.sampling import Sampling, draw, uniforms

from specctl.decoding.tree_drafter import TreeDrafter
from specctl.decoding.tree_verification import DraftTree, verify_tree
from specctl.errors import RecordError
from specctl.models.loading.pair import Pair
from specctl.models.running.fixed_width import FixedWidthRunner
from specctl.models.running.masks import LARGEST_TREE, WIDEST
from specctl.models.running.runner import EagerRunner, Forward, Runner
from specctl.models.running.static import StaticRunner
from specctl.models.running.token_rules import RuledRunner, TokenRules
from specctl.policies import POLICIES, Setting
from specctl.policies.constant import Constant
from specctl.policies.trees import TreeSize
from specctl.records import DraftStep, ExtraToken, Round, StopReason

EXACT, BIASED = 3e-7, 1e-2
PLAIN, FILTERED = SAMPLINGS["T=1"], SAMPLINGS[FEW]
NOTHING_ENDS: frozenset[int] = frozenset()
SMALL = TreeSize(4, 2)

POLICIES_TESTED: dict[str, tuple[str, dict[str, object]]] = {
    "constant": ("constant", {"draft_length": 3}),
    "heuristic": ("heuristic", {"draft_length": 1, "carry_over": True}),
    "svip": ("svip", {"threshold": 0.37}),
    "svip drops its trigger": ("svip", {"c": 1.0, "threshold": 0.87, "keep_trigger": False}),
    "max-confidence": ("max-confidence", {"threshold": 0.55, "eps": 0.3, "beta2": 0.0, "carry_over": True}),
    "adaedl": ("adaedl", {"threshold": 0.6, "eps": 0.3, "beta2": 0.0, "carry_over": True}),
    "self-verify": ("self-verify", {"carry_over": True}),
    "specdec++": ("specdec++", {"threshold": 0.45}),
    "cost-optimal": ("cost-optimal", {"max_draft": 2}),
    "cost-optimal by a head": ("cost-optimal", {"use_head": True, "cost_ratio": 0.5}),
}


def drafter(policy: str = "constant", size: TreeSize = SMALL) -> TreeDrafter:
    name, values = POLICIES_TESTED[policy]
    return TreeDrafter(TableRunner(DRAFT), POLICIES[name](**values), size, head=HEAD)


def wrong_by(make: Callable[[], Drafter], sampling: Sampling = PLAIN, **more: Any) -> float:
    """The largest error of the law, once it is sure that paths were accepted which are not the steps'."""
    found = enumerate_decode(make, sampling, **more)
    assert sum(found.law.values()) == pytest.approx(1)
    assert found.paths >= {True, False}
    return error(found, expected_law(sampling, more.get("length", LENGTH), more.get("eos", ENDS)))


@pytest.mark.parametrize("policy", POLICIES_TESTED)
def test_output_has_the_law_of_the_target(policy: str) -> None:
    """At the end of a sequence and at the limit too: all sequences of up to four tokens are looked at."""
    assert wrong_by(lambda: drafter(policy)) < EXACT


@pytest.mark.parametrize("size", [TreeSize(2, 2), TreeSize(6, 2), TreeSize(64, 3)], ids=str)
@pytest.mark.parametrize("sampling", [PLAIN, FILTERED, replace(PLAIN, verification="block")], ids=str)
def test_output_of_every_size_has_the_law_of_the_target(size: TreeSize, sampling: Sampling) -> None:
    found = enumerate_decode(lambda: drafter("constant", size), sampling)
    assert True in found.paths
    assert error(found, expected_law(sampling)) < EXACT


def test_output_of_a_draft_head_has_the_law_of_the_target() -> None:
    def head() -> Drafter:
        return TreeDrafter(ToyDraftHead(DRAFT, 3), Constant(2), SMALL)

    assert wrong_by(head, length=3, limit=4, layers=(LAYER,)) < EXACT


def test_what_a_policy_carries_over_leaves_the_law_of_the_next_sequence() -> None:
    sequences = ((PROMPT, 1), (PROMPT[::-1], 2))
    found = enumerate_decode(lambda: drafter("cost-optimal"), PLAIN, limit=3, sequences=sequences)
    assert error(found, expected_law(PLAIN, sequences=sequences)) < EXACT


# Wrong on purpose: what the tests above must be able to see.


class DrawnSiblings(TreeDrafter):
    """Two tokens are drawn, and the likelier one is offered: the tree no longer follows from the text."""

    def draft(self, sequence: Sequence[int], budget: int) -> Draft:
        draft = super().draft(sequence, min(budget, 1))
        if not draft.steps:
            return draft
        law = self.runner.table[sequence[-2], sequence[-1]].softmax(-1)  # type: ignore[attr-defined]
        drawn = [int(tree_verification.picked(law.numpy(), 0.0)) for _ in range(2)]
        return replace(draft, tokens=[max(drawn, key=lambda token: float(law[token]))], parents=(-1,))
