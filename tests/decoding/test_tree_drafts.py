"""Dynamic trees change how many tokens a round brings, and never which."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate, count
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from law_table import (
    DRAFT,
    ENDS,
    FEW,
    HEAD,
    LENGTH,
    PROMPT,
    SAMPLINGS,
    TARGET,
    enumerate_decode,
    error,
    expected_law,
    fit,
    sample,
)
from scripted_rounds import scripted_rounds
from transformers import GenerationConfig

from specctl.decoding import trees
from specctl.decoding.composition import Stage, build_drafter, compose
from specctl.decoding.draft import Draft, Drafter
from specctl.decoding.drafters import ModelDrafter
from specctl.decoding.draws import host_numbers
from specctl.decoding.logits import host
from specctl.decoding.logits.device import DeviceLogits
from specctl.decoding.logits.host import HostLogits
from specctl.decoding.loop import decode
from specctl.decoding.round import prefill, verified_round
from specctl.decoding.sampling import Sampling
from specctl.decoding.trees import IMPOSSIBLE, ROOT, BeamTree, DraftTree, TreeDrafter, verify_tree
from specctl.decoding.warming import warm_up
from specctl.errors import ProfileError, RecordError
from specctl.models.passes.forward import Forward
from specctl.models.passes.tree_sight import LARGEST_TREE, WIDEST
from specctl.models.running.config_rules import TokenRules
from specctl.models.running.eager import EagerPasses
from specctl.models.running.graph import GraphPasses
from specctl.models.running.pair import Pair
from specctl.models.running.ruled import RuledPasses
from specctl.models.running.slot import Slot
from specctl.models.running.static import StaticPasses
from specctl.models.running.transforms import FixedWidthPasses
from specctl.policies import POLICIES, Setting
from specctl.policies.base import SIGNALS
from specctl.policies.published import Constant
from specctl.policies.setting import TreeSize
from specctl.profile.schema import SamplingTable
from specctl.records import DraftStep, ExtraToken, Round, StopReason
from tests.support.enumeration import steady_clocks
from tests.support.toys import (
    LAYER,
    NUMBERS,
    STOPPING,
    WITHOUT_FORESIGHT,
    Replays,
    Script,
    StateTable,
    TableRunner,
    ToyDraftHead,
    assert_raw_signals,
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
    "disco": ("disco", {"threshold": 0.55}),
    "bandit": ("bandit", {"arms": ("svip:c=1.0,threshold=0.8", "constant:draft_length=1"), "max_draft": 3}),
}


def drafter(policy: str = "constant", size: TreeSize = SMALL) -> TreeDrafter:
    name, values = POLICIES_TESTED[policy]
    rule = POLICIES[name](**values)
    return TreeDrafter(TableRunner(DRAFT), rule, size, predictor=head_for(rule, HEAD))


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


# Wrong on purpose: what the tests above must be able to see. A tree of drawn tokens is not among it: the verifier draws
# for itself, so that its law does not depend on how a tree came about.


class OfferedAsDrawn(TreeDrafter):
    """The likeliest tokens, verified as if they had been drawn from the whole law."""

    def draft(self, sequence: Sequence[int], budget: int) -> Draft:
        draft = super().draft(sequence, min(budget, 1))
        if not draft.steps:
            return draft
        law = self.runner.table[sequence[-2], sequence[-1]].softmax(-1)  # type: ignore[attr-defined]
        return replace(draft, tokens=[int(law.argmax())], probs=law[None], parents=None)


def test_the_likeliest_token_in_the_place_of_a_drawn_one_is_caught() -> None:
    found = enumerate_decode(lambda: OfferedAsDrawn(TableRunner(DRAFT), Constant(1), SMALL), PLAIN)
    assert error(found, expected_law(PLAIN)) > BIASED


def test_draws_from_raw_logits_are_caught() -> None:
    drawn = trees._drawn

    def raw(tree: DraftTree, forward: Forward, sampling: Sampling, generator: Any) -> Any:  # noqa: ARG001 - the signature
        return drawn(tree, forward, PLAIN, generator)

    with patch.object(trees, "_drawn", raw):
        assert wrong_by(drafter, FILTERED) > BIASED


def test_the_token_after_a_path_from_raw_logits_is_caught() -> None:
    """EAGLE's bonus token, as its first version drew it to the end."""
    drawn = trees._drawn

    def bonus_raw(tree: DraftTree, forward: Forward, sampling: Sampling, generator: Any) -> Any:
        processed, raw = drawn(tree, forward, sampling, generator), drawn(tree, forward, PLAIN, generator)
        return lambda number: (processed if tree.children[number] else raw)(number)

    with patch.object(trees, "_drawn", bonus_raw):
        found = enumerate_decode(drafter, FILTERED)
    assert error(found, expected_law(FILTERED)) > BIASED


def test_a_draw_in_the_row_of_another_token_is_caught() -> None:
    drawn = trees._drawn

    def beside(*given: Any) -> Any:
        look, tree = drawn(*given), given[0]
        return lambda number: look(max(0, number - 1))._replace(chance=0.0) if number else look(len(tree.tokens) - 1)

    with patch.object(trees, "_drawn", beside):
        assert wrong_by(drafter) > BIASED


@pytest.mark.parametrize("shared", [False, True], ids=["a number for each depth", "one for all"])
@pytest.mark.representatives("one for all")
def test_tokens_of_a_path_are_independent(shared: bool) -> None:
    """What no enumeration sees, which draws by itself: the same number at every depth."""

    def once(count: int, generator: Any) -> list[float]:
        return host_numbers(1 if shared else count, generator) * (count if shared else 1)

    with patch.object(host, "host_numbers", once):
        found = fit(sample(drafter("constant", TreeSize(64, 3)), PLAIN, 1500), PLAIN)
    assert (found.p < 1e-9) if shared else (found.p > 1e-3)


# The verdict.


def tree_of(parents: Sequence[int], tokens: Sequence[int], root: int = 0) -> DraftTree:
    steps = (DraftStep(1, tokens[0]),)
    return DraftTree(root, Draft(list(tokens), None, steps, StopReason.POLICY, parents=tuple(parents)))


TREE = tree_of([-1, -1, 0, 0, 2, 1], [3, 1, 2, 4, 3, 3])


def test_the_numbers_of_a_tree() -> None:
    assert TREE.tokens == [0, 3, 1, 2, 4, 3, 3]
    assert TREE.parents == [0, 0, 1, 1, 3, 2]
    assert TREE.children == [{3: 1, 1: 2}, {2: 3, 4: 4}, {3: 6}, {3: 5}, {}, {}, {}]
    assert TREE.depths == [0, 1, 1, 2, 2, 3, 2]
    assert TREE.levels(4) == (2, 3, 1, 0)


@pytest.mark.parametrize(
    ("choices", "path", "extra", "kind"),
    [
        ({0: 3, 1: 2, 3: 3, 5: 1}, [0, 1, 3, 5], 1, ExtraToken.BONUS),
        ({0: 1, 2: 2}, [0, 2], 2, ExtraToken.CORRECTION),
        ({0: 2}, [0], 2, ExtraToken.CORRECTION),
        ({0: 3, 1: 4, 4: 0}, [0, 1, 4], 0, ExtraToken.BONUS),
    ],
)
def test_greedy_keeps_the_longest_path_of_the_targets_choices(
    choices: dict[int, int], path: list[int], extra: int, kind: ExtraToken
) -> None:
    logits = torch.zeros(7, 5)
    for row, token in choices.items():
        logits[row, token] = 1
    verdict, kept = verify_tree(TREE, 3, Forward(logits), Sampling(), NOTHING_ENDS, None)
    assert (kept, verdict.extra, verdict.kind) == (path, extra, kind)
    assert verdict.chances is None
    assert verdict.accepted == len(path) - 1


def test_nothing_comes_after_an_end_of_sequence() -> None:
    logits = torch.full((7, 5), -1e9)
    logits[0, 3] = logits[1, 2] = logits[3, 3] = 0
    for sampling in (Sampling(), PLAIN):
        verdict, kept = verify_tree(TREE, 3, Forward(logits), sampling, frozenset({2}), seeded(1))
        assert (kept, verdict.accepted) == ([0, 1, 3], 2)
        assert verdict.chances in (None, (1.0, 1.0))


@pytest.mark.parametrize("sampling", [Sampling(), PLAIN], ids=["greedy", "T=1"])
def test_logits_that_are_no_numbers_are_refused(sampling: Sampling) -> None:
    with pytest.raises(RecordError, match="NaN"):
        verify_tree(TREE, 3, Forward(torch.full((7, 5), torch.nan)), sampling, NOTHING_ENDS, seeded(1))


@pytest.mark.parametrize("seed", range(8))
def test_host_and_device_draw_alike(seed: int) -> None:
    logits = 2 * torch.randn(7, 5, generator=seeded(seed))
    for sampling in (PLAIN, FILTERED):
        here, there = (
            rows.look(TREE, sampling, seeded(seed)) for rows in (HostLogits(logits.numpy()), DeviceLogits(logits))
        )
        for number in range(7):
            assert here(number).token == there(number).token
            assert here(number).chance == pytest.approx(there(number).chance, abs=1e-6)
        expected = sampling.probs(logits)[1, [2, 4]].sum()
        assert here(1).chance == pytest.approx(float(expected), abs=1e-6)


def test_chances_are_those_of_the_path_going_on() -> None:
    """As many rounds as expected end at each length."""
    ends, expected = [0.0] * 4, [0.0] * 4
    logits = torch.randn(7, 5, generator=seeded(3))
    generator = seeded(4)
    for _ in range(2000):
        verdict, path = verify_tree(TREE, 4, Forward(logits), PLAIN, NOTHING_ENDS, generator)
        assert verdict.chances is not None
        assert len(verdict.chances) == len(path)
        assert (verdict.chances[-1] == 0) == (not TREE.children[path[-1]])
        for place, chance in enumerate(verdict.chances):
            expected[place] += chance
            ends[place] += place < verdict.accepted
    assert ends == pytest.approx(expected, abs=80)
    assert verify_tree(TREE, 1, Forward(logits), PLAIN, NOTHING_ENDS, generator)[0].chances == (verdict.chances[0],)


# The beams.


def test_a_tree_by_hand() -> None:
    """Two beams; the likelihood of each path is the product of its probabilities."""
    tree = BeamTree()
    tree.grow([ROOT], [[5, 6]], [[-0.1, -0.3]])
    assert tree.beams(2, NOTHING_ENDS) == [0, 1]
    assert tree.beams(2, {5}) == [1]
    tree.grow([0, 1], [[1, 2], [1, 7]], [[-0.5, -2.0], [-0.1, -3.0]])
    assert tree.scores == pytest.approx([-0.1, -0.3, -0.6, -2.1, -0.4, -3.3])
    assert tree.beams(2, NOTHING_ENDS) == [4, 2]
    assert tree.pruned(3, 2) == [0, 1, 4]
    assert tree.pruned(4, 2) == [0, 1, 2, 4]
    assert tree.pruned(4, 1) == [0, 1]
    assert [tree.child(ROOT, 6), tree.child(1, 7), tree.child(0, 7)] == [1, 5, None]
    assert tree.prob(4) == pytest.approx(0.904837, abs=1e-6)
    assert tree.depth == 2


@given(
    st.lists(st.lists(st.sampled_from([0.0, -0.1, -1.0, 1e-9, IMPOSSIBLE]), min_size=9, max_size=9), max_size=4),
    st.integers(1, 30),
)
@settings(deadline=None, derandomize=True)
def test_with_each_token_its_ancestors_are_kept(levels: list[list[float]], count: int) -> None:
    """Also where a token is certain, so that it is as likely as its parent."""
    tree, beams = BeamTree(), [ROOT]
    for logs in levels:
        tree.grow(beams, [[1, 2, 3]] * len(beams), [logs[3 * place : 3 * place + 3] for place in range(len(beams))])
        beams = tree.beams(3, NOTHING_ENDS)
        assert beams
    kept = tree.pruned(count, len(levels))
    assert len(kept) <= count
    assert all(tree.parents[token] in {ROOT, *kept} for token in kept)
    assert not any(tree.scores[token] <= IMPOSSIBLE for token in kept)


# Rounds, caches and records.


def rounds_of(make: Drafter, sampling: Sampling, target: Slot, limit: int = 40) -> list[Round]:
    with torch.inference_mode(), steady_clocks():
        prefill(target, make, PROMPT)
        rounds = list(decode(target, make, PROMPT, limit, sampling, NOTHING_ENDS, seeded(4)))
    return [
        replace(
            one,
            steps=tuple(map(rounded, one.steps)),
            threshold=one.threshold and round(one.threshold, 5),
            draft_seconds=0,
            verify_seconds=0,
            total_seconds=0,
            tree=(),
            path=(),
        )
        for one in rounds
    ]


def rounded(step: DraftStep) -> DraftStep:
    """Both compute the same numbers, each in its own way."""
    signals = {name: getattr(step, name) for name in SIGNALS}
    return replace(step, **{name: value and round(value, 5) for name, value in signals.items()})


@pytest.mark.parametrize("policy", POLICIES_TESTED)
def test_a_tree_of_one_beam_is_the_chain(policy: str) -> None:
    name, values = POLICIES_TESTED[policy]
    rule = POLICIES[name](**values)
    chain = ModelDrafter(TableRunner(DRAFT), rule, predictor=head_for(rule, HEAD))
    expected = rounds_of(chain, Sampling(), TableRunner(TARGET))
    assert rounds_of(drafter(policy, TreeSize(64, 1)), Sampling(), TableRunner(TARGET)) == expected
    assert any(round_.drafted for round_ in expected)


@scripted_rounds(ends=4, size=st.builds(TreeSize, st.integers(2, 40), st.integers(1, 4)))
def test_rounds_add_up(
    lengths: list[int],
    size: TreeSize,
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
    one = TreeDrafter(draft, Script(*lengths), size)
    if prefilled:
        prefill(target, one, prompt)
    for round_ in decode(target, one, prompt, limit, sampling, eos, seeded(seed)):
        before = len(sequence)
        sequence.extend(round_.emitted)
        for runner in (target, draft):
            assert runner.tokens == sequence[: runner.length], "the cache holds refused tokens"
        assert target.length == len(sequence) - (round_.extra is not None)
        assert len(round_.tree) == round_.drafted
        assert round_.accepted_tokens == round_.path == tuple(sequence[before : before + round_.accepted])
        assert round_.nodes <= size.tokens - 1
        assert all(width <= size.beams ** (depth + 1) for depth, width in enumerate(round_.tree))
        assert round_.summary.nodes == round_.nodes
        assert round_.summary.accepted == round_.accepted <= round_.drafted
        if round_.chances is not None:
            assert round_.accepted <= len(round_.chances) <= min(round_.accepted + 1, round_.drafted)
        if round_.drafted > 1 and round_.extra is not None:
            assert draft.length >= before, "a path that was read is read again"
    text = sequence[len(prompt) :]
    assert len(text) == limit or text[-1] in eos
    assert len(text) <= limit
    assert not eos & set(text[:-1])


def test_a_draft_head_is_shown_the_states_of_what_stays() -> None:
    head, target = ToyDraftHead(DRAFT, 3), StateTable(TARGET)
    target.watch((LAYER,))
    one = TreeDrafter(head, Constant(3), TreeSize(8, 2))
    prefill(target, one, PROMPT)
    sequence, elsewhere = list(PROMPT), 0
    for round_ in decode(target, one, PROMPT, 60, PLAIN, NOTHING_ENDS, seeded(3)):
        sequence += round_.emitted
        elsewhere += round_.path != tuple(step.token for step in round_.steps[: round_.accepted])
        states = list(accumulate(sequence, lambda state, token: (5 * state + 3 * token + 1) % NUMBERS, initial=1))[1:]
        assert head._states == states[: len(sequence) - 1]
    assert elsewhere > 3


def test_a_verifier_that_lacks_a_part_of_the_text_reads_it_first() -> None:
    target, one = TableRunner(TARGET), drafter()
    round_ = verified_round(target, one, [1, 2, 1, 0, 2], 3, Sampling(), NOTHING_ENDS, None, index=0)
    assert target.extended == [4, 1 + round_.nodes]


def test_the_prompt_has_its_share_of_the_first_level(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that each look moves on by a second, also before and after the text's first level."""
    clock = count()
    for module in ("round", "drafters"):
        monkeypatch.setattr(f"specctl.decoding.{module}.working_seconds", lambda: float(next(clock)))
    one = TreeDrafter(TableRunner(DRAFT), Constant(2), SMALL)
    rounds = list(decode(TableRunner(TARGET), one, [1, 2, 1, 2], 8, Sampling(), NOTHING_ENDS))
    assert [round_.draft_seconds for round_ in rounds] == [3.0 - 3 / 4, *[1.0] * (len(rounds) - 1)]


def test_the_policy_is_asked_about_the_law_at_the_best_beam() -> None:
    asked: list[DraftStep] = []

    class Noting(Constant):
        reads = frozenset({"entropy", "top_prob", "token_prob"})

        def should_stop(self, step: DraftStep) -> bool:
            asked.append(step)
            return False

    one = TreeDrafter(TableRunner(DRAFT), Noting(3), TreeSize(20, 3))
    draft = one.draft(PROMPT, 9)
    assert draft.steps == tuple(asked)
    laws = DRAFT.softmax(-1)
    paths = [((PROMPT[-2], PROMPT[-1]), 1.0)]  # the last two tokens of each beam, and its probability
    for step in asked:
        (before, last), _ = paths[0]
        assert_raw_signals(step, DRAFT[before, last])
        assert step.token == int(DRAFT[before, last].argmax())
        grown = [((b, x), chance * float(laws[a, b, x])) for (a, b), chance in paths for x in range(3)]
        paths = sorted(grown, key=lambda pair: -pair[1])[:3]


def test_a_draft_without_numbers_drafts_no_tokens() -> None:
    broken = TableRunner(torch.full_like(DRAFT, torch.nan))
    rounds = list(decode(TableRunner(TARGET), TreeDrafter(broken, Constant(3), SMALL), PROMPT, 6, PLAIN, NOTHING_ENDS))
    assert {(round_.nodes, round_.accepted) for round_ in rounds} == {(0, 0)}
    assert rounds[0].drafted == 3


def test_trees_fit_the_widest_pass_and_the_cache() -> None:
    wide = table(seed=21, vocabulary=70)
    target, draft = TableRunner(wide), TableRunner(wide)
    one = TreeDrafter(draft, Constant(60), TreeSize(64, 32))
    first = next(decode(target, one, [1, 2], 80, Sampling(), NOTHING_ENDS))
    assert first.nodes == WIDEST - 1
    assert first.drafted == 1 + (LARGEST_TREE - 1) // 32
    draft.context = 40
    one.rollback(0)
    first = next(decode(TableRunner(wide), one, [1, 2], 80, Sampling(), NOTHING_ENDS))
    assert first.drafted == 1 + 38 // 32


# Real architectures.

LENGTH_OF_TEXT = 40
SHORT, LONG = (1, 5, 9), tuple(torch.randint(1, 64, (19,), generator=seeded(5)).tolist())
ENGINES: dict[str, Callable[[Any], Any]] = {
    "eager": lambda model: Slot(EagerPasses(model, 64)),
    "static": lambda model: Slot(StaticPasses(model, 64)),
    "graph": lambda model: Slot(GraphPasses(model, 64, Replays())),
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt-neox"])
@pytest.mark.representatives("llama-graph", "gpt-neox-static", slow=("qwen3-eager", "llama-static"))
def test_tokens_are_those_of_generate(family: str, engine: str) -> None:
    elsewhere = 0
    for name in WITHOUT_FORESIGHT if engine == "eager" else ("svip", "cost-optimal"):
        policy = POLICIES[name](**STOPPING.get(name, {}))
        target = ENGINES[engine](random_model(family))
        draft, head = ENGINES[engine](noisy_copy(family, 0.05)), head_for(policy, random_predictor(32))
        one = TreeDrafter(draft, policy, TreeSize(24, 4), predictor=head)
        with torch.inference_mode():
            for prompt in (SHORT, LONG):
                target.rollback(0)
                one.rollback(0)
                prefill(target, one, prompt)
                rounds = list(decode(target, one, prompt, LENGTH_OF_TEXT, Sampling()))
                expected = generated(random_model(family), prompt, LENGTH_OF_TEXT)
                assert [token for round_ in rounds for token in round_.emitted] == expected
                elsewhere += sum(
                    round_.path != tuple(step.token for step in round_.steps[: round_.accepted]) for round_ in rounds
                )
    assert elsewhere > 3


@pytest.mark.parametrize("engine", ENGINES)
def test_what_a_draft_keeps_of_a_path_is_what_it_would_read(engine: str) -> None:
    """Every round drafts what a draft with an empty cache drafts there."""
    target = ENGINES[engine](random_model("llama"))
    one = TreeDrafter(ENGINES[engine](noisy_copy("llama", 0.05)), Constant(4), TreeSize(24, 3))
    sequence, kept = list(LONG), 0
    with torch.inference_mode():
        prefill(target, one, sequence)
        for _ in range(12):
            round_ = verified_round(target, one, sequence, 4, Sampling(), NOTHING_ENDS, None, index=0)
            again = TreeDrafter(ENGINES[engine](noisy_copy("llama", 0.05)), Constant(4), TreeSize(24, 3))
            assert tuple(again.draft(sequence, 4).steps) == round_.steps
            kept += one.runner.length - len(sequence)
            sequence += round_.emitted
    assert kept > 5


def test_tokens_are_those_of_generate_under_token_rules() -> None:
    rules = {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2}
    model: Any = random_model("llama")
    target, draft = (
        Slot(RuledPasses(runner, TokenRules.of(GenerationConfig(**rules), frozenset(), 64, runner.device)))  # type: ignore[no-untyped-call]
        for runner in (Slot(EagerPasses(model, 64)), Slot(EagerPasses(noisy_copy("llama", 0.05), 64)))
    )
    one = TreeDrafter(draft, Constant(4), TreeSize(24, 4))
    with torch.inference_mode():
        prefill(target, one, SHORT)
        rounds = list(decode(target, one, SHORT, LENGTH_OF_TEXT, Sampling()))
    assert [token for round_ in rounds for token in round_.emitted] == generated(model, SHORT, LENGTH_OF_TEXT, **rules)
    assert sum(round_.accepted for round_ in rounds) > 5


# What a setting becomes.


def test_a_setting_with_a_tree_drafts_trees_where_both_models_read_them() -> None:
    model: Any = random_model("llama")
    target: Slot = Slot(EagerPasses(model, 64))
    pair = Pair(target, (Slot(EagerPasses(model, 64)),), None, frozenset(), 256, (), ({},))  # type: ignore[arg-type]
    setting = replace(Setting("constant"), tree=TreeSize(30, 4))
    made = build_drafter(pair, setting)
    assert isinstance(made, TreeDrafter)
    assert made.size == TreeSize(30, 4)
    windows = Slot(EagerPasses(random_model("mistral"), 64))
    for chains in (replace(pair, target=Slot(FixedWidthPasses(target))), replace(pair, drafts=(windows,))):
        assert type(build_drafter(chains, setting)) is ModelDrafter


def test_a_hierarchy_drafts_no_trees() -> None:
    stages = [Stage(TableRunner(TARGET), Constant(3)), Stage(TableRunner(DRAFT), Constant(2))]
    with pytest.raises(ProfileError, match="drafted by one model"):
        compose(stages, tree=SMALL)


def test_a_tree_is_not_stopped_by_what_a_draft_foresees() -> None:
    with pytest.raises(ValueError, match="makes no prediction for its next token"):
        TreeDrafter(TableRunner(DRAFT), POLICIES["confidence"](), SMALL)


def test_passes_of_trees_are_prepared_before_a_request() -> None:
    capture = Replays()
    target, draft = (Slot(GraphPasses(random_model("llama"), 64, capture)) for _ in range(2))
    pair = Pair(target, (draft,), None, frozenset(), 256, (), ({},))  # type: ignore[arg-type]
    warm_up(pair, SamplingTable(), tree=TreeSize(30, 4))
    prepared = capture.captured
    assert target.length == draft.length == 0
    with torch.inference_mode():
        draft.extend([1, 2, 3], keep=1)
        draft.extend_tree([4, 5, 6, 7], [0, 0, 0, 0], before=1)
    assert capture.captured == prepared, "and the beginning of a text is not captured"


def test_laws_are_read_alike_on_another_device() -> None:
    rows = Forward(torch.randn(3, 9, generator=seeded(2)))
    for signals in (frozenset(), frozenset({"entropy", "token_prob"})):
        one = TreeDrafter(TableRunner(DRAFT), Constant(2), TreeSize(9, 3), record=signals)
        here = one._beams_of(rows, 3)
        there = DeviceLogits(rows.logits).beams(3, slice(1), signals, tops=False)
        assert here.ids == there.ids
        assert np.array(here.logs) == pytest.approx(np.array(there.logs), abs=1e-6)
        assert here.signals.keys() == there.signals.keys() == signals
        for name, values in here.signals.items():
            assert values == pytest.approx(there.signals[name], abs=1e-6)
