"""Every rule against numbers worked out by hand."""

from dataclasses import MISSING, fields, replace
from math import log

import pytest

from specctl.policies import POLICIES, StoppingPolicy
from specctl.policies.published import (
    AdaEdl,
    AdaptiveThreshold,
    ConfidentPrefix,
    Constant,
    Disco,
    Heuristic,
    MaxConfidence,
    NoDraft,
    SelfVerify,
    SpecDecPlusPlus,
    Svip,
    implied_threshold,
)
from specctl.records import DraftStep
from tests.support.toys import round_of

ALL_SIGNALS = {
    "entropy": 1.0,
    "top_prob": 0.6,
    "token_prob": 0.5,
    "accept_prob": 0.8,
    "next_accept_prob": 0.4,
    "own_accept_prob": 0.3,
    "agreement": -0.75,
}
STEP = DraftStep(1, token=3, **ALL_SIGNALS)
ADAPTIVE = {"max-confidence": MaxConfidence, "adaedl": AdaEdl}


def settings_of(policy: type[StoppingPolicy]) -> dict[str, object]:
    """A policy's public settings with their defaults."""
    found = {}
    for field in fields(policy):  # type: ignore[arg-type]
        if field.init:
            assert field.default is not MISSING, f"{field.name} has no default"
            found[field.name] = field.default
    return found


@pytest.mark.parametrize(
    ("name", "defaults"),
    [
        ("none", {}),
        ("constant", {"draft_length": 5}),
        ("heuristic", {"draft_length": 5, "max_draft": 40}),
        ("max-confidence", {"threshold": 0.4}),
        ("svip", {"threshold": 0.3, "c": 0.15, "max_draft": 40}),
        (
            "adaedl",
            {"threshold": 0.4, "gamma": 0.2, "alpha": 0.9, "eps": 0.01, "beta1": 0.5, "beta2": 0.9, "max_draft": 7},
        ),
        ("self-verify", {"max_draft": 10}),
        ("specdec++", {"threshold": 0.7, "min_draft": 2, "max_draft": 20}),
        ("confidence", {"threshold": 0.5, "max_draft": 40}),
    ],
)
def test_defaults_are_those_of_the_papers(name: str, defaults: dict[str, object]) -> None:
    settings = settings_of(POLICIES[name])
    assert {key: settings.get(key) for key in defaults} == defaults
    assert settings.get("keep_trigger", True) is True
    assert settings.get("carry_over", False) is False


def adapted(policy: StoppingPolicy) -> StoppingPolicy:
    """The policy after a rejection whose entropy it saw, which moves every threshold and length that can move."""
    policy.observe(round_of(0, 2, entropies=[0.5, 0.7]))
    return policy


# In a round of a bandit one of its arms reads signals, and another one may read others.
@pytest.mark.parametrize("name", [name for name in POLICIES if name != "bandit"])
def test_the_signals_declared_are_the_signals_read(name: str) -> None:
    policy = POLICIES[name]()
    declared = {key: value for key, value in ALL_SIGNALS.items() if key in policy.signals}
    assert POLICIES[name]().should_stop(DraftStep(1, 3, **declared)) == policy.should_stop(STEP)
    enough = round_of(1, 3)
    policy.observe(replace(enough, steps=tuple(DraftStep(step.index, 3, **declared) for step in enough.steps)))
    for signal in policy.signals:
        with pytest.raises(ValueError, match="did not compute a signal"):
            policy.should_stop(replace(STEP, **{signal: None}))


@pytest.mark.parametrize("name", POLICIES)
def test_a_new_sequence_starts_as_the_first_did(name: str) -> None:
    fresh = {"carry_over": False} if "carry_over" in settings_of(POLICIES[name]) else {}
    policy = adapted(POLICIES[name](**fresh))
    policy.reset()
    assert policy == POLICIES[name](**fresh)


@pytest.mark.parametrize("name", [name for name in POLICIES if "carry_over" in settings_of(POLICIES[name])])
def test_what_was_learned_is_carried_over_if_wanted(name: str) -> None:
    policy = adapted(POLICIES[name](carry_over=True))
    learned = (policy.current_threshold, policy.draft_limit())
    assert policy != POLICIES[name](carry_over=True)
    policy.reset()
    assert (policy.current_threshold, policy.draft_limit()) == learned
    policy.observe(round_of(0, 2, entropies=[0.9, 0.7]))
    assert policy != adapted(POLICIES[name](carry_over=True))


def test_constant_never_stops_before_its_length() -> None:
    policy = Constant(draft_length=3)
    assert not policy.should_stop(STEP)
    policy.observe(round_of(0, 3))
    assert (policy.draft_limit(), policy.current_threshold) == (3, None)


def test_none_drafts_nothing() -> None:
    assert NoDraft().draft_limit() == 0


def test_heuristic_schedule() -> None:
    """K = 2: all accepted + 2 = 4; all accepted 6, capped at 5; then one rejection each: 4, 3, 2, 1, and never 0."""
    policy = Heuristic(draft_length=2, max_draft=5)
    lengths = [policy.draft_limit()]
    for accepted, drafted in [(2, 2), (4, 4), (1, 5), (0, 4), (2, 3), (0, 2), (0, 1), (1, 1)]:
        policy.observe(round_of(accepted, drafted))
        lengths.append(policy.draft_limit())
    assert lengths == [2, 4, 5, 4, 3, 2, 1, 1, 3]


def test_heuristic_caps_its_first_length() -> None:
    assert Heuristic(draft_length=9, max_draft=4).draft_limit() == 4


def test_heuristic_learns_nothing_from_a_round_without_drafts() -> None:
    policy = Heuristic(draft_length=5)
    policy.observe(round_of(0, 0))
    assert policy.draft_limit() == 5


@pytest.mark.parametrize(
    ("entropy", "stops"),
    [
        (0.0, False),
        (0.59, False),  # sqrt(0.15 * 0.59) = 0.2975
        (0.61, True),  # sqrt(0.15 * 0.61) = 0.3025
        (log(32000), True),
    ],
)
def test_svip_at_its_default(entropy: float, stops: bool) -> None:
    assert Svip().should_stop(DraftStep(1, 0, entropy=entropy)) is stops


@pytest.mark.parametrize(("entropy", "stops"), [(1.0, False), (1.0 + 1e-9, True)])
def test_svip_stops_only_beyond_its_threshold(entropy: float, stops: bool) -> None:
    """sqrt(0.25 * 1) = 0.5 exactly, which is not more than 0.5."""
    assert Svip(threshold=0.5, c=0.25).should_stop(DraftStep(1, 0, entropy=entropy)) is stops


@pytest.mark.parametrize(
    ("entropy", "stops"),
    [
        (0.0, False),
        (1.79, False),  # 1 - sqrt(0.2 * 1.79) = 0.40167
        (1.81, True),  # 1 - sqrt(0.2 * 1.81) = 0.39834
        (9.0, True),  # the bound is negative
    ],
)
def test_adaedl_at_its_default(entropy: float, stops: bool) -> None:
    assert AdaEdl().should_stop(DraftStep(1, 0, entropy=entropy)) is stops


@pytest.mark.parametrize(("top_prob", "stops"), [(0.39, True), (0.4, False), (0.41, False)])
@pytest.mark.parametrize("adapt", [True, False])
def test_max_confidence_at_its_default(top_prob: float, stops: bool, adapt: bool) -> None:
    assert MaxConfidence(adapt=adapt).should_stop(DraftStep(1, 0, top_prob=top_prob)) is stops


@pytest.mark.parametrize("policy", ADAPTIVE.values(), ids=ADAPTIVE.keys())
def test_the_adaptive_threshold_round_by_round(policy: type[AdaptiveThreshold]) -> None:
    """AdaEDL's update with alpha 0.9, eps 0.01, beta1 0.5, beta2 0.9, cap 7, from lambda 0.4.

    Round 1, 4 of 4: AR = 1 (its own rate), not below 0.9, 4 is not 7: lambda' = 0.39,
        lambda = 0.9 * 0.4 + 0.1 * 0.39 = 0.399.
    Round 2, 2 of 4: AR = 0.5 * 1 + 0.5 * 0.5 = 0.75 < 0.9: lambda' = 0.409,
        lambda = 0.9 * 0.399 + 0.1 * 0.409 = 0.4.
    Round 3, 7 of 7: AR = 0.5 * 0.75 + 0.5 * 1 = 0.875 < 0.9: lambda' = 0.41, lambda = 0.36 + 0.041 = 0.401.
    Round 4, 7 of 7: AR = 0.9375, not below 0.9, and 7 is the cap: lambda' = lambda, which stays 0.401.
    Round 5, 0 of 0: nothing to learn from.
    Round 6, 3 of 3: AR = 0.96875: lambda' = 0.391, lambda = 0.3609 + 0.0391 = 0.4.
    """
    rule = policy()
    seen = []
    for accepted, drafted in [(4, 4), (2, 4), (7, 7), (7, 7), (0, 0), (3, 3)]:
        rule.observe(round_of(accepted, drafted))
        seen.append(rule.current_threshold)
    assert seen == pytest.approx([0.399, 0.4, 0.401, 0.401, 0.401, 0.4], abs=1e-12)


@pytest.mark.parametrize("policy", ADAPTIVE.values(), ids=ADAPTIVE.keys())
def test_the_acceptance_rate_is_smoothed_not_remembered(policy: type[AdaptiveThreshold]) -> None:
    """beta1 0.25, beta2 0.5, eps 0.2, alpha 0.6, from lambda 0.5.

    Round 1, 1 of 4: AR = 0.25 < 0.6: lambda' = 0.7, lambda = 0.5 * 0.5 + 0.5 * 0.7 = 0.6.
    Round 2, 3 of 4: AR = 0.25 * 0.25 + 0.75 * 0.75 = 0.625, not below: lambda' = 0.4, lambda = 0.5.
    """
    rule = policy(threshold=0.5, alpha=0.6, eps=0.2, beta1=0.25, beta2=0.5)
    rule.observe(round_of(1, 4))
    assert rule.current_threshold == pytest.approx(0.6)
    rule.observe(round_of(3, 4))
    assert rule.current_threshold == pytest.approx(0.5)


@pytest.mark.parametrize("policy", ADAPTIVE.values(), ids=ADAPTIVE.keys())
def test_stopping_follows_the_moved_threshold(policy: type[AdaptiveThreshold]) -> None:
    """The bound 1 - sqrt(0.2 * 0.8) = 0.6 and the top probability 0.6 lie between lambda 0.5 and, after a round of
    rejections with eps 0.5 and beta2 0.5, lambda 0.5 * 0.5 + 0.5 * 1 = 0.75."""
    rule = policy(threshold=0.5, eps=0.5, beta2=0.5)
    step = DraftStep(1, 0, entropy=0.8, top_prob=0.6)
    assert not rule.should_stop(step)
    rule.observe(round_of(0, 3))
    assert rule.should_stop(step)


def test_max_confidence_can_stay_where_it_is() -> None:
    rule = MaxConfidence(adapt=False, threshold=0.7)
    for accepted in (0, 4):
        rule.observe(round_of(accepted, 4))
    assert rule.current_threshold == 0.7


def test_self_verify_learns_from_rejected_tokens_alone() -> None:
    """tau 0; the rejected 0.6 makes it 0.6; a full round changes nothing; the rejected 1.2 makes the mean 0.9.

    The tokens after a rejected one (entropy 5) were never verified and do not count.
    """
    rule = SelfVerify()
    seen = [rule.current_threshold]
    for accepted, entropies in [(1, [0.1, 0.6, 5.0]), (2, [3.0, 3.0]), (0, [1.2, 5.0])]:
        rule.observe(round_of(accepted, len(entropies), entropies=entropies))
        seen.append(rule.current_threshold)
    assert seen == pytest.approx([0, 0.6, 0.6, 0.9])


@pytest.mark.parametrize(("entropy", "stops"), [(0.6, False), (0.6 + 1e-9, True), (0.0, False)])
def test_self_verify_stops_beyond_tau(entropy: float, stops: bool) -> None:
    rule = SelfVerify()
    rule.observe(round_of(0, 1, entropies=[0.6]))
    assert rule.should_stop(DraftStep(1, 0, entropy=entropy)) is stops


def test_self_verify_drafts_one_token_before_the_first_rejection() -> None:
    assert SelfVerify().should_stop(DraftStep(1, 0, entropy=1e-9))


def stops(policy: Disco, predictions: list[float]) -> list[bool]:
    return [policy.should_stop(DraftStep(n, 3, own_accept_prob=c)) for n, c in enumerate(predictions, start=1)]


def test_it_stops_behind_the_first_token_below_the_threshold() -> None:
    assert stops(Disco(threshold=0.5), [0.9, 0.6, 0.5, 0.499]) == [False, False, False, True]
    # Doubts of one token say nothing about the next: specdec++ would have stopped by 0.6 * 0.6 < 0.4.
    assert stops(Disco(threshold=0.4), [0.6, 0.6, 0.6]) == [False] * 3
    assert stops(Disco(threshold=0.0), [0.0]) == [False]


def test_its_limit_and_its_threshold_are_its_settings() -> None:
    policy = Disco(threshold=0.3, max_draft=7)
    assert (policy.draft_limit(), policy.current_threshold, policy.signals) == (7, 0.3, {"own_accept_prob"})


def test_a_prediction_that_was_not_made_is_an_error() -> None:
    with pytest.raises(ValueError, match="did not compute"):
        Disco().should_stop(DraftStep(1, 3, accept_prob=0.5))


def prefix_stops(policy: ConfidentPrefix, *confidences: float) -> list[bool]:
    steps = (DraftStep(index, 0, next_accept_prob=c) for index, c in enumerate(confidences, start=1))
    return [policy.should_stop(step) for step in steps]


def test_it_stops_where_the_product_falls_below_the_threshold() -> None:
    # Products 0.9, 0.72, 0.504, 0.4536: alone, none of the four is below 0.5.
    assert prefix_stops(ConfidentPrefix(threshold=0.5), 0.9, 0.8, 0.7, 0.9) == [False, False, False, True]
    assert prefix_stops(ConfidentPrefix(threshold=0.75), 0.9, 0.8) == [False, True]


def test_every_round_begins_anew() -> None:
    policy = ConfidentPrefix(threshold=0.5)
    assert prefix_stops(policy, 0.6, 0.6) == [False, True]
    assert prefix_stops(policy, 0.6, 0.9) == [False, False]


def test_a_threshold_of_zero_never_stops() -> None:
    policy = ConfidentPrefix(threshold=0.0, max_draft=7)
    assert prefix_stops(policy, 0.0, 0.0) == [False, False]
    assert policy.draft_limit() == 7


def test_a_missing_prediction_is_an_error() -> None:
    with pytest.raises(ValueError, match="did not compute"):
        ConfidentPrefix().should_stop(DraftStep(1, 0))


def specdec_stops(policy: SpecDecPlusPlus, *accept_probs: float) -> list[bool]:
    return [policy.should_stop(DraftStep(index, 0, accept_prob=p)) for index, p in enumerate(accept_probs, start=1)]


def test_it_stops_when_a_rejection_is_likelier_than_the_threshold() -> None:
    # 1, 0.9, 0.63, 0.504, 0.2520: the last is the first whose complement passes 0.7.
    assert specdec_stops(SpecDecPlusPlus(), 1.0, 0.9, 0.7, 0.8, 0.5) == [False, False, False, False, True]


def test_the_threshold_itself_is_not_beyond_it() -> None:
    assert specdec_stops(SpecDecPlusPlus(threshold=0.5), 1.0, 0.5) == [False, False]
    assert specdec_stops(SpecDecPlusPlus(threshold=0.5), 1.0, 0.499) == [False, True]


def test_a_round_has_its_least_length() -> None:
    assert specdec_stops(SpecDecPlusPlus(min_draft=3), 1.0, 0.1, 0.9) == [False, False, True]


def test_the_product_restarts_each_round() -> None:
    policy = SpecDecPlusPlus()
    assert specdec_stops(policy, 1.0, 0.2) == [False, True]
    assert specdec_stops(policy, 1.0, 0.9) == [False, False]


def test_a_signal_left_out_is_noticed() -> None:
    with pytest.raises(ValueError, match="signal"):
        SpecDecPlusPlus().should_stop(DraftStep(1, 0))


def test_the_least_length_cannot_be_more_than_the_most() -> None:
    with pytest.raises(ValueError, match="min_draft = 5"):
        SpecDecPlusPlus(min_draft=5, max_draft=4)


@pytest.mark.parametrize(("draft", "target", "threshold"), [(1.0, 10.0, 0.9), (2.0, 3.0, 1 / 3), (5.0, 4.0, 0.0)])
def test_the_threshold_of_the_theorem(draft: float, target: float, threshold: float) -> None:
    assert implied_threshold(draft, target) == pytest.approx(threshold)
