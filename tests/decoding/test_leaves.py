"""Leaves beside a draft's tokens change how many tokens a round brings, and never which."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import strategies as st
from law_table import DRAFT, ENDS, FEW, LENGTH, MID, PROMPT, SAMPLINGS, TARGET, enumerate_decode, error, expected_law
from scripted_rounds import scripted_rounds
from transformers import GenerationConfig

from specctl.decoding import round as one_round
from specctl.decoding.composition import Stage, build_drafter, compose
from specctl.decoding.drafters import ModelDrafter
from specctl.decoding.hierarchy import PreVerifiedDrafter
from specctl.decoding.leaves import LeafDrafter, LeafTree
from specctl.decoding.loop import decode
from specctl.decoding.round import NOTHING, prefill, verified_round
from specctl.decoding.rows import device_rows
from specctl.decoding.rows.device_rows import DeviceRows
from specctl.decoding.rows.draft import Draft, Drafter
from specctl.decoding.rows.rows_of import rows_over
from specctl.decoding.sampling import Sampling
from specctl.models.passes.tree_sight import WIDEST
from specctl.models.running.eager import EagerRunner
from specctl.models.running.fixed_width import FixedWidthRunner
from specctl.models.running.pair import Pair
from specctl.models.running.rules.ruled import RuledRunner
from specctl.models.running.rules.token_rules import TokenRules
from specctl.models.running.runner import Forward, Runner
from specctl.models.running.static import StaticRunner
from specctl.policies import POLICIES, Setting
from specctl.policies.leaf_rule import ConfidenceLeaves, ConstantLeaves, CostLeaves, LeafRule, Leaves, Place, leaf_rule
from specctl.policies.rules.constant import Constant
from specctl.policies.rules.self_verify import SelfVerify
from specctl.records import DraftStep, ExtraToken, Round
from tests.support.toys import (
    LAYER,
    NUMBERS,
    STOPPING,
    WITHOUT_FORESIGHT,
    Script,
    StateTable,
    TableRunner,
    ToyDraftHead,
    generated,
    head_for,
    noisy_copy,
    random_model,
    random_predictor,
    related_table,
    seeded,
    table,
)

EXACT, BIASED = 3e-7, 1e-2
PLAIN, FILTERED = SAMPLINGS["T=1"], SAMPLINGS[FEW]
NOTHING_ENDS: frozenset[int] = frozenset()

POLICIES_TESTED: dict[str, tuple[str, dict[str, object]]] = {
    "constant": ("constant", {"draft_length": 3}),
    "heuristic": ("heuristic", {"draft_length": 1, "carry_over": True}),
    "svip": ("svip", {"threshold": 0.37}),
    "svip drops its trigger": ("svip", {"c": 1.0, "threshold": 0.87, "keep_trigger": False}),
    "max-confidence": ("max-confidence", {"threshold": 0.55, "eps": 0.3, "beta2": 0.0, "carry_over": True}),
    "adaedl": ("adaedl", {"threshold": 0.6, "eps": 0.3, "beta2": 0.0, "carry_over": True}),
    "self-verify": ("self-verify", {"carry_over": True}),
    "cost-optimal": ("cost-optimal", {"max_draft": 2}),
}
LEAVES: tuple[Leaves, ...] = (1, 2, "confidence", "cost")


def drafter(policy: str = "constant", leaves: Leaves = 1) -> Drafter:
    name, values = POLICIES_TESTED[policy]
    return LeafDrafter(ModelDrafter(TableRunner(DRAFT), POLICIES[name](**values), laws=True), leaf_rule(leaves))


def wrong_by(make: Callable[[], Drafter], sampling: Sampling = PLAIN, **more: Any) -> float:
    """The largest error of the law, once it is sure that leaves were accepted."""
    found = enumerate_decode(make, sampling, **more)
    assert sum(found.law.values()) == pytest.approx(1)
    assert found.leaves >= {True, False}
    assert found.extras >= {ExtraToken.CORRECTION, ExtraToken.BONUS}
    return error(found, expected_law(sampling, more.get("length", LENGTH), more.get("eos", ENDS)))


@pytest.mark.parametrize(
    ("policy", "leaves"), [*((name, 1) for name in POLICIES_TESTED), *(("constant", leaves) for leaves in LEAVES[1:])]
)
@pytest.mark.representatives(
    "svip drops its trigger-1", "cost-optimal-1", "constant-2", "constant-confidence", "constant-cost"
)
def test_output_has_the_law_of_the_target(policy: str, leaves: Leaves) -> None:
    """At the end of a sequence and at the limit too: all sequences of up to four tokens are looked at."""
    assert wrong_by(lambda: drafter(policy, leaves)) < EXACT


@pytest.mark.parametrize("policy", ["constant", "svip"])
def test_filtered_output_has_the_law_of_the_target(policy: str) -> None:
    assert wrong_by(lambda: drafter(policy, 2), FILTERED) < EXACT


@pytest.mark.parametrize("policy", ["constant", "svip"])
def test_leaves_go_with_block_verification(policy: str) -> None:
    """Whatever the verdict on the chain, its own token follows the target's law, and so does the token after it."""
    assert wrong_by(lambda: drafter(policy, 2), replace(PLAIN, verification="block")) < EXACT


@pytest.mark.parametrize("length", [2, 3])
@pytest.mark.slow
def test_output_of_a_hierarchy_has_the_law_of_the_target(length: int) -> None:
    def middle() -> Drafter:
        below = ModelDrafter(TableRunner(DRAFT), Constant(1))
        return LeafDrafter(
            PreVerifiedDrafter(below, TableRunner(MID), SelfVerify(max_draft=3), laws=True), ConstantLeaves(1)
        )

    assert wrong_by(middle, length=length, limit=5) < EXACT


def test_output_of_a_draft_head_has_the_law_of_the_target() -> None:
    def head() -> Drafter:
        return LeafDrafter(ModelDrafter(ToyDraftHead(DRAFT, 3), Constant(2), laws=True), ConstantLeaves(1))

    assert wrong_by(head, length=3, limit=4, layers=(LAYER,)) < EXACT


def test_what_the_cost_rule_carries_over_leaves_the_law_of_the_next_sequence() -> None:
    sequences = ((PROMPT, 1), (PROMPT[::-1], 1))
    found = enumerate_decode(lambda: drafter("constant", "cost"), PLAIN, limit=3, sequences=sequences)
    assert True in found.leaves
    assert error(found, expected_law(PLAIN, sequences=sequences)) < EXACT


# Wrong on purpose: what the tests above must be able to see.


class RerankedSiblings(ModelDrafter):
    """Draws two tokens, offers the likelier one as drawn from the whole law, and the other one as its leaf."""

    def draft(self, sequence: Sequence[int], budget: int) -> Draft:
        draft = super().draft(sequence, min(budget, 1))
        if draft.probs is None:
            return draft
        (first,), law = draft.tokens, torch.as_tensor(draft.probs[0])
        second = int(device_rows.pick(law.index_fill(0, torch.tensor(first), 0), law))
        best, other = (first, second) if law[first] >= law[second] else (second, first)
        return replace(draft, tokens=[best], steps=(DraftStep(1, best),), leaves=((other,),))


def test_drawn_siblings_in_another_order_than_drawn_are_caught() -> None:
    assert wrong_by(lambda: RerankedSiblings(TableRunner(DRAFT), Constant(1)), length=3, eos=NOTHING_ENDS) > BIASED


def test_a_token_after_a_leaf_from_raw_logits_is_caught() -> None:
    judge = one_round.judge

    def raw(draft: Draft, forward: Forward, sampling: Sampling, generator: Any) -> Any:
        return judge(draft, forward, PLAIN if draft is NOTHING else sampling, generator)

    with patch.object(one_round, "judge", raw):
        assert wrong_by(lambda: drafter("constant", 2), FILTERED) > BIASED


def test_a_token_after_a_leaf_from_the_row_of_the_rejected_token_is_caught() -> None:
    class Beside(LeafTree):
        def leaf(self, place: int, token: int) -> int | None:
            return None if super().leaf(place, token) is None else place + 1

    # The table looks at two tokens, so both rows differ.
    with patch.object(one_round, "LeafTree", Beside):
        assert wrong_by(lambda: drafter("constant", 2)) > BIASED


# Rounds, caches and records.


class NoLeaves:
    most = 2

    def widths(self, places: Sequence[Place], room: int) -> list[int]:  # noqa: ARG002 - the signature
        return [0] * len(places)

    def observe(self, round_: Round) -> None: ...


def rounds_of(make: Drafter, sampling: Sampling, target: Runner, limit: int = 40) -> list[Round]:
    with torch.inference_mode():
        prefill(target, make, PROMPT)
        rounds = list(decode(target, make, PROMPT, limit, sampling, NOTHING_ENDS, seeded(4)))
    return [replace(one, draft_seconds=0, verify_seconds=0, total_seconds=0, leaves=()) for one in rounds]


@pytest.mark.parametrize("sampling", [Sampling(), PLAIN, FILTERED], ids=["greedy", "T=1", "filtered"])
@pytest.mark.parametrize("policy", POLICIES_TESTED)
@pytest.mark.representatives("constant-greedy", "svip drops its trigger", "cost-optimal-T=1", "self-verify-filtered")
def test_a_tree_without_leaves_is_the_chain(policy: str, sampling: Sampling) -> None:
    name, values = POLICIES_TESTED[policy]
    if name == "cost-optimal":
        pytest.skip("it stops by the clock")
    chain = ModelDrafter(TableRunner(DRAFT), POLICIES[name](**values))
    tree = LeafDrafter(ModelDrafter(TableRunner(DRAFT), POLICIES[name](**values), laws=True), NoLeaves())
    expected = rounds_of(chain, sampling, TableRunner(TARGET))
    assert rounds_of(tree, sampling, TableRunner(TARGET)) == expected


@scripted_rounds(widths=st.integers(1, 5))
def test_rounds_add_up(
    lengths: list[int],
    widths: int,
    limit: int,
    sampling: Sampling,
    eos: frozenset[int],
    prompt: list[int],
    seed: int,
    prefilled: bool,
) -> None:
    """Whatever is drafted: the limit holds, the sequence ends at its first EOS, and the caches hold what stays."""
    sequence = list(prompt)
    logits = table(seed=21)
    target, draft = TableRunner(logits, sequence), TableRunner(related_table(logits, seed=22), sequence)
    one = LeafDrafter(ModelDrafter(draft, Script(*lengths), laws=True), ConstantLeaves(widths))
    if prefilled:
        prefill(target, one, prompt)
    for round_ in decode(target, one, prompt, limit, sampling, eos, seeded(seed)):
        sequence.extend(round_.emitted)
        for runner in (target, draft):
            assert runner.tokens == sequence[: runner.length], "the cache holds refused tokens"
        assert target.length == len(sequence) - (round_.extra is not None)
        assert len(round_.leaves) in (0, round_.drafted)
        for step, leaves in zip(round_.steps, round_.leaves, strict=bool(round_.leaves)):
            assert len({step.token, *leaves}) == 1 + len(leaves), "a token twice in one place"
        if round_.leaf is not None:
            assert round_.leaf in round_.leaves[round_.accepted]
            assert round_.leaf not in eos
            assert round_.extra_kind is ExtraToken.BONUS
        assert round_.summary.nodes == round_.nodes == round_.drafted + sum(map(len, round_.leaves))
        assert round_.summary.kept == len(round_.kept_tokens)
    text = sequence[len(prompt) :]
    assert len(text) == limit or text[-1] in eos
    assert len(text) <= limit
    assert not eos & set(text[:-1])


def test_a_draft_head_is_shown_the_states_of_what_stays() -> None:
    head, target = ToyDraftHead(DRAFT, 3), StateTable(TARGET)
    target.watch((LAYER,))
    one = LeafDrafter(ModelDrafter(head, Constant(3), laws=True), ConstantLeaves(1))
    prefill(target, one, PROMPT)
    sequence, leaves = list(PROMPT), 0
    for round_ in decode(target, one, PROMPT, 60, PLAIN, NOTHING_ENDS, seeded(3)):
        sequence += round_.emitted
        leaves += round_.leaf is not None
        states = list(accumulate(sequence, lambda state, token: (5 * state + 3 * token + 1) % NUMBERS, initial=1))[1:]
        assert head._states == states[: len(sequence) - 1]
    assert leaves > 3


def test_a_verifier_that_lacks_a_part_of_the_text_reads_it_first() -> None:
    """A tree has one root, the newest token."""
    target, one = TableRunner(TARGET), drafter("constant", 2)
    round_ = verified_round(target, one, [1, 2, 1, 0, 2], 3, Sampling(), NOTHING_ENDS, None, index=0)
    assert round_.leaves
    assert target.extended == [4, 1 + round_.nodes]


def test_leaves_are_the_likeliest_others_in_falling_order() -> None:
    laws = torch.tensor([[0.1, 0.5, 0.2, 0.2, 0.0], [0.0, 0.0, 0.7, 0.3, 0.0], [0.0, 1.0, 0.0, 0.0, 0.0]])
    first, second, third = rows_over(laws).others([0, 2, 1], 2)
    assert first.prob == pytest.approx(0.1)
    assert first.others[0] == (1, pytest.approx(0.5))
    assert first.others[1][1] == pytest.approx(0.2)
    assert second.others == [(3, pytest.approx(0.3))]
    assert third.others == []
    assert DeviceRows(laws).others([0, 2, 1], 2) == [first, second, third]


def test_the_numbers_of_a_tree() -> None:
    tree = LeafTree(9, Draft([1, 2], None, (), None, leaves=((5, 6), (7,))))
    assert tree.tokens == [9, 1, 2, 5, 6, 7]
    assert tree.parents == [0, 1, 0, 0, 1]
    assert [tree.leaf(0, 5), tree.leaf(0, 6), tree.leaf(1, 7)] == [3, 4, 5]
    assert tree.leaf(0, 7) is tree.leaf(1, 5) is tree.leaf(2, 7) is None


def test_a_tree_is_never_wider_than_a_pass() -> None:
    wide = table(seed=21, vocabulary=40)
    target = TableRunner(wide)
    one = LeafDrafter(ModelDrafter(TableRunner(wide), Constant(30), laws=True), ConstantLeaves(7))
    rounds = list(decode(target, one, [1, 2], 80, Sampling(), NOTHING_ENDS))
    assert max(round_.nodes for round_ in rounds) == WIDEST - 1
    one = LeafDrafter(ModelDrafter(TableRunner(wide), Constant(70), laws=True), ConstantLeaves(7))
    first = next(decode(TableRunner(wide), one, [1, 2], 80, Sampling(), NOTHING_ENDS))
    assert (first.drafted, first.leaves) == (70, ())


# Real architectures.

LENGTH_OF_TEXT = 40
SHORT, LONG = (1, 5, 9), tuple(torch.randint(1, 64, (19,), generator=seeded(5)).tolist())
ENGINES: dict[str, Callable[[Any], Runner]] = {
    "eager": lambda model: EagerRunner(model, 64),
    "static": lambda model: StaticRunner(model, 64),
}


@pytest.mark.parametrize(
    "rule", [ConstantLeaves(4), ConfidenceLeaves(), CostLeaves()], ids=lambda one: type(one).__name__
)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt-neox"])
@pytest.mark.representatives(
    "gpt-neox-eager-ConstantLeaves",
    "qwen3-static-CostLeaves",
    slow=("llama-eager-ConfidenceLeaves", "qwen3-static-ConstantLeaves", "gpt-neox-static-CostLeaves"),
)
def test_tokens_are_those_of_generate(family: str, engine: str, rule: LeafRule) -> None:
    leaves = 0
    for name in WITHOUT_FORESIGHT if (engine, family) == ("eager", "llama") else ("svip", "cost-optimal"):
        policy = POLICIES[name](**STOPPING.get(name, {}))
        target = ENGINES[engine](random_model(family))
        chain = ModelDrafter(
            ENGINES[engine](noisy_copy(family, 0.05)),
            policy,
            predictor=head_for(policy, random_predictor(32)),
            laws=True,
        )
        one = LeafDrafter(chain, rule)
        with torch.inference_mode():
            for prompt in (SHORT, LONG):
                target.rollback(0)
                one.rollback(0)
                prefill(target, one, prompt)
                rounds = list(decode(target, one, prompt, LENGTH_OF_TEXT, Sampling()))
                expected = generated(random_model(family), prompt, LENGTH_OF_TEXT)
                assert [token for round_ in rounds for token in round_.emitted] == expected
                leaves += sum(round_.leaf is not None for round_ in rounds)
    assert leaves > 10


def test_tokens_are_those_of_generate_under_token_rules() -> None:
    rules = {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2}
    model: Any = random_model("llama")
    target, draft = (
        RuledRunner(runner, TokenRules.of(GenerationConfig(**rules), frozenset(), 64, runner.device))  # type: ignore[no-untyped-call]
        for runner in (EagerRunner(model, 64), EagerRunner(noisy_copy("llama", 0.05), 64))
    )
    one = LeafDrafter(ModelDrafter(draft, Constant(4), laws=True), ConstantLeaves(4))
    with torch.inference_mode():
        prefill(target, one, SHORT)
        rounds = list(decode(target, one, SHORT, LENGTH_OF_TEXT, Sampling()))
    assert [token for round_ in rounds for token in round_.emitted] == generated(model, SHORT, LENGTH_OF_TEXT, **rules)
    assert any(round_.leaf is not None for round_ in rounds)


# What a setting becomes.


def test_a_setting_with_leaves_makes_drafts_with_leaves_where_the_target_reads_trees() -> None:
    model: Any = random_model("llama")
    target: Runner = EagerRunner(model, 64)
    pair = Pair(target, (EagerRunner(model, 64),), None, frozenset(), 256, (), ({},))  # type: ignore[arg-type]
    made = build_drafter(pair, replace(Setting("constant"), leaves=2))
    assert isinstance(made, LeafDrafter)
    assert made.rule == ConstantLeaves(2)
    assert isinstance(build_drafter(pair, Setting("constant")), ModelDrafter)
    chains = replace(pair, target=FixedWidthRunner(target))
    assert isinstance(build_drafter(chains, replace(Setting("constant"), leaves=2)), ModelDrafter)


def test_only_the_outermost_draft_has_leaves() -> None:
    stages = [Stage(TableRunner(MID), Constant(3)), Stage(TableRunner(DRAFT), Constant(2))]
    made = compose(stages, leaves="confidence")
    assert isinstance(made, LeafDrafter)
    assert isinstance(made.inner, PreVerifiedDrafter)
    assert isinstance(made.inner.inner, ModelDrafter)
    rounds = list(decode(TableRunner(TARGET), made, PROMPT, 30, Sampling(), NOTHING_ENDS))
    assert any(round_.leaves for round_ in rounds)
    assert not any(inner.leaves for round_ in rounds for inner in round_.inner)
