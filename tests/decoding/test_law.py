"""Sampled output of the whole loop follows the target's exact law, whatever the policy."""

import pytest
from law_table import CASES, PLAIN, SAMPLINGS, Case, fit, sample
from toys import DropsWhatItSaw

NO_EOS: frozenset[int] = frozenset()


def last_of_each_policy() -> list[Case]:
    plain = {case.name: case for case in CASES if SAMPLINGS[case.sampling] == PLAIN}
    return list(plain.values())


@pytest.mark.parametrize("case", last_of_each_policy(), ids=str)
def test_output_follows_the_law_of_the_target(case: Case) -> None:
    found = fit(sample(case.policy(), PLAIN, 3000), PLAIN)
    assert found.p > 1e-3, found


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_output_follows_the_law_of_the_target_at_every_setting(case: Case) -> None:
    sampling = SAMPLINGS[case.sampling]
    found = fit(sample(case.policy(), sampling, 10_000), sampling)
    assert found.p > 1e-3, found


@pytest.mark.parametrize("case", [c for c in last_of_each_policy() if "keep_trigger" in c.settings], ids=str)
def test_dropping_the_trigger_is_lawful_where_nothing_ends_the_sequence(case: Case) -> None:
    found = fit(sample(case.policy(), PLAIN, 2000, eos=NO_EOS), PLAIN, eos=NO_EOS)
    assert found.p > 1e-3, found


def test_a_rule_that_drops_the_token_it_looked_at_is_caught() -> None:
    """Without this, the tests above might pass because they cannot see a bias."""
    found = fit(sample(DropsWhatItSaw(), PLAIN, 3000, eos=NO_EOS), PLAIN, eos=NO_EOS)
    assert found.p < 1e-6, found
