"""Which policies stand for all in products of policies with something else."""

from tiers import OTHERS, names_another

from specctl.policies import POLICIES


def test_every_policy_stands_for_itself_or_is_stood_for() -> None:
    assert set(POLICIES) - set(OTHERS) == {"none", "constant", "svip", "cost-optimal"}
    assert set(OTHERS) < set(POLICIES)


def test_names_of_cases_are_told_apart() -> None:
    assert names_another("test_x[llama-max-confidence-static]")
    assert names_another("test_x[specdec++]")
    assert not names_another("test_x[svip-cost-optimal-constant]")
