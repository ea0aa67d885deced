"""Which policies stand for all in products of policies with something else."""

from conftest import OTHERS

from specctl.policies import POLICIES


def test_every_policy_stands_for_itself_or_is_stood_for() -> None:
    assert set(POLICIES) - set(OTHERS) == {"none", "constant", "svip", "cost-optimal"}
    assert set(OTHERS) < set(POLICIES)
