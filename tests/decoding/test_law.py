"""What the whole loop writes follows the target's law, whatever the policy: exactly, over all branches of chance."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from law_table import (
    CASES,
    DRAFT,
    ENDS,
    HIERARCHIES,
    LENGTH,
    MID,
    PLAIN,
    PROMPT,
    SAMPLINGS,
    SELF_VERIFY,
    Case,
    Enumeration,
    Hierarchy,
    enumerate_decode,
    error,
    expected_law,
    fit,
    sample,
)

from specctl.decoding import hierarchy
from specctl.decoding import round as one_round
from specctl.decoding.draft import Draft, Drafter
from specctl.decoding.drafters import ModelDrafter
from specctl.decoding.hierarchy import PreVerifiedDrafter
from specctl.decoding.logits.judging import judge
from specctl.decoding.logits.logits import Verdict
from specctl.decoding.logits.token_sampler import TokenSampler
from specctl.decoding.round import verified_round
from specctl.decoding.sampling import Sampling
from specctl.decoding.steps_ahead import Fed
from specctl.policies.published import Constant, SpecDecPlusPlus, Svip
from specctl.records import ExtraToken, Round
from tests.support.toys import DropsWhatItSaw, TableRunner, toy_head

pytestmark = [pytest.mark.crossed, pytest.mark.usefixtures("drafts_at_will")]

EXACT = 3e-7
"""Probabilities are float32 in the program: what is left are their roundings."""
BIASED = 1e-2
NO_EOS: frozenset[int] = frozenset()
EXTRAS = {ExtraToken.CORRECTION, ExtraToken.BONUS}


def enumerated(
    drafter: Callable[[], Drafter],
    sampling: Sampling = PLAIN,
    length: int = LENGTH,
    limit: int = LENGTH,
    eos: frozenset[int] = ENDS,
) -> tuple[Enumeration, float]:
    found = enumerate_decode(drafter, sampling, length, limit, eos)
    assert sum(found.law.values()) == pytest.approx(1)
    return found, error(found, expected_law(sampling, length, eos))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_output_has_the_law_of_the_target(case: Case) -> None:
    found, wrong = enumerated(case.drafter, SAMPLINGS[case.sampling])
    assert wrong < EXACT
    if not case.policy().drafts:
        assert found.extras == {ExtraToken.BONUS}
    elif SAMPLINGS[case.sampling].plain:
        assert found.stops >= {"eos", "budget", *case.stops.split()}
        assert found.extras == {None, *EXTRAS}
    else:
        assert found.extras >= EXTRAS


@pytest.mark.parametrize("case", HIERARCHIES, ids=str)
@pytest.mark.representatives("2 of 4", "pre-verify once", "both learn what pays", "M1 never drafts")
def test_output_of_a_hierarchy_has_the_law_of_the_target(case: Hierarchy) -> None:
    found, wrong = enumerated(case.drafter, SAMPLINGS[case.sampling], case.length, case.limit)
    assert wrong < EXACT
    stops, _, inner_stops = case.stops.partition("/")
    assert found.stops >= set(stops.split())
    assert found.inner_stops >= set(inner_stops.split())
    assert found.extras >= EXTRAS
    if len(case.levels) > 1:
        assert found.inner_extras >= (EXTRAS if case.levels[-1][0] != "none" else {ExtraToken.BONUS})


@pytest.mark.parametrize("reads_signals", [False, True])
@pytest.mark.representatives("True")
def test_a_head_at_the_middle_model_leaves_the_law_of_the_target(reads_signals: bool) -> None:
    head = toy_head(MID, 9, reads_signals=reads_signals)

    def drafter() -> Drafter:
        inner = ModelDrafter(TableRunner(DRAFT), Svip(c=1.0, threshold=0.87, max_draft=2))
        policy = SpecDecPlusPlus(threshold=0.6, min_draft=1, max_draft=3)
        return PreVerifiedDrafter(inner, TableRunner(MID), policy, predictor=head)

    found, wrong = enumerated(drafter, length=3, limit=4)
    assert wrong < EXACT
    assert found.stops >= {"policy", "max_draft", "eos"}
    assert found.inner_extras >= EXTRAS


def state(drafter: Drafter) -> str:
    """All that a drafter's policies remember."""
    assert isinstance(drafter, ModelDrafter | PreVerifiedDrafter)
    below = state(drafter.inner) if isinstance(drafter, PreVerifiedDrafter) else ""
    return f"{asdict(drafter.policy)} {below}"  # type: ignore[call-overload] # policies with a memory are dataclasses


REMEMBERING: list[Case | Hierarchy] = [
    *(case for case in CASES if case.policy().drafts and getattr(case.policy(), "carry_over", False)),
    Hierarchy("full, tight caps", (SELF_VERIFY, SELF_VERIFY)),
]


@pytest.mark.parametrize("case", REMEMBERING, ids=str)
@pytest.mark.representatives("cost-optimal: defaults; T=1]")
def test_what_is_carried_over_leaves_the_law_of_the_next_sequence(case: Case | Hierarchy) -> None:
    """Two sequences, one after the other: each is as probable as if it stood alone, whatever the other."""
    made: list[Drafter] = []
    states = set()

    def drafter() -> Drafter:
        if len(states) <= 3:
            states.update(map(state, made))
        made[:] = [case.drafter()]
        return made[0]

    sampling, sequences = SAMPLINGS[case.sampling], ((PROMPT, 1), (PROMPT[::-1], 2))
    found = enumerate_decode(drafter, sampling, limit=3, sequences=sequences)
    assert error(found, expected_law(sampling, sequences=sequences)) < EXACT
    assert len(states) > 3


@pytest.mark.parametrize("case", [c for c in CASES if "keep_trigger" in c.settings and c.sampling == "T=1"], ids=str)
def test_dropping_the_trigger_is_lawful_where_nothing_ends_the_sequence(case: Case) -> None:
    found, wrong = enumerated(case.drafter, length=3, limit=3, eos=NO_EOS)
    assert wrong < EXACT
    assert "policy" in found.stops


def test_a_rule_that_drops_the_token_it_looked_at_is_caught() -> None:
    """Without this, the tests above might pass because they cannot see a bias."""
    _, wrong = enumerated(lambda: ModelDrafter(TableRunner(DRAFT), DropsWhatItSaw()), length=2, limit=3, eos=NO_EOS)
    assert wrong > BIASED


def test_a_middle_model_that_drops_the_token_its_rule_looked_at_is_caught() -> None:
    def drafter() -> Drafter:
        return PreVerifiedDrafter(ModelDrafter(TableRunner(DRAFT), Constant(1)), TableRunner(MID), DropsWhatItSaw())

    _, wrong = enumerated(drafter, length=2, limit=3, eos=NO_EOS)
    assert wrong > BIASED


class DraftsTheBest(ModelDrafter):
    """Unlawful on purpose: its tokens are the most probable, and it says that they were drawn."""

    def _drawn(self, pending: Fed, index: int) -> tuple[TokenSampler, list[float], torch.Tensor]:  # noqa: ARG002 - the signature
        assert not isinstance(pending, torch.Tensor)
        logits = self.runner.extend(pending, keep=1).logits[0]  # (V,)
        return self._blind, [int(logits.argmax())], PLAIN.probs(logits)


def test_best_tokens_offered_with_the_law_of_drawn_ones_are_caught() -> None:
    _, wrong = enumerated(lambda: DraftsTheBest(TableRunner(DRAFT), Constant(2)), eos=NO_EOS)
    assert wrong > BIASED


class CutsInHindsight(ModelDrafter):
    """Unlawful on purpose: it draws a whole block, and then offers no token behind the most probable one."""

    def draft(self, sequence: Sequence[int], budget: int) -> Draft:
        whole = super().draft(sequence, budget)
        if whole.probs is None:
            return whole
        drawn = torch.as_tensor(whole.probs).gather(1, torch.tensor(whole.tokens)[:, None])[:, 0]  # (K,)
        count = int(drawn.argmax()) + 1
        return replace(whole, tokens=whole.tokens[:count], probs=whole.probs[:count], steps=whole.steps[:count])


def test_a_block_cut_after_its_later_tokens_were_seen_is_caught() -> None:
    _, wrong = enumerated(lambda: CutsInHindsight(TableRunner(DRAFT), Constant(3)), length=2, limit=3, eos=NO_EOS)
    assert wrong > BIASED


def draws_from_below(*args: Any, **settings: Any) -> Round:
    """Unlawful on purpose: what the middle model drew after a rejection goes up with the residual's law forgotten."""

    def bent(draft: Draft, *more: Any) -> tuple[Verdict, torch.Tensor | None]:
        verdict, probs = judge(draft, *more)
        if probs is not None and draft.probs is not None and verdict.accepted < len(draft.tokens):
            probs, below = torch.tensor(probs), torch.as_tensor(draft.probs)
            residual = (probs[verdict.accepted] - below[verdict.accepted]).clamp_min(0)
            probs[verdict.accepted] = residual / residual.sum()
        return verdict, probs

    with patch.object(one_round, "judge", bent):
        return verified_round(*args, **settings)


def test_a_correction_offered_with_the_residual_instead_of_the_middle_models_law_is_caught() -> None:
    def drafter() -> Drafter:
        return PreVerifiedDrafter(ModelDrafter(TableRunner(DRAFT), Constant(1)), TableRunner(MID), Constant(2))

    with patch.object(hierarchy, "verified_round", draws_from_below):
        _, wrong = enumerated(drafter, length=3, limit=3, eos=NO_EOS)
    assert wrong > BIASED


# The same once more through the program's own randomness: its coins, its race, one drafter for many sequences.

SEQUENCES = 1000


def last_of_each_policy() -> list[Case]:
    plain = {case.name: case for case in CASES if SAMPLINGS[case.sampling] == PLAIN}
    return list(plain.values())


@pytest.mark.parametrize("case", last_of_each_policy(), ids=str)
@pytest.mark.representatives("svip")
def test_sampled_output_follows_the_law_of_the_target(case: Case) -> None:
    found = fit(sample(case.drafter(), PLAIN, SEQUENCES), PLAIN)
    assert found.p > 1e-3, found


def test_sampled_output_of_a_hierarchy_follows_the_law_of_the_target() -> None:
    case = Hierarchy("full, tight caps", (SELF_VERIFY, SELF_VERIFY), limit=12)
    found = fit(sample(case.drafter(), PLAIN, SEQUENCES, limit=case.limit), PLAIN)
    assert found.p > 1e-3, found


def test_a_biased_rule_shows_in_as_many_samples() -> None:
    biased = ModelDrafter(TableRunner(DRAFT), DropsWhatItSaw())
    found = fit(sample(biased, PLAIN, SEQUENCES, eos=NO_EOS), PLAIN, eos=NO_EOS)
    assert found.p < 1e-6, found


SHAPED = {
    "typical_p": replace(PLAIN, typical_p=0.7),
    "epsilon_cutoff": replace(PLAIN, epsilon_cutoff=0.15),
    "eta_cutoff": replace(PLAIN, eta_cutoff=0.3),
    "top_h": replace(PLAIN, top_h=0.6),
    "all by block": replace(
        PLAIN, temperature=1.3, typical_p=0.9, epsilon_cutoff=0.02, eta_cutoff=0.1, top_h=0.9, verification="block"
    ),
}


@pytest.mark.parametrize("sampling", SHAPED.values(), ids=SHAPED)
def test_filters_by_entropy_and_probability_leave_the_law_of_the_target(sampling: Sampling) -> None:
    found = enumerate_decode(lambda: ModelDrafter(TableRunner(DRAFT), Constant(3)), sampling, LENGTH, 6)
    assert error(found, expected_law(sampling, LENGTH)) < EXACT
    assert error(found, expected_law(PLAIN, LENGTH)) > BIASED, "the filter leaves nothing out"
