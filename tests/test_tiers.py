"""Which cases stand for others, and what the first tier may cost."""

import pytest
from durations import ENOUGH, LEAST, budgets, too_dear
from tiers import LOST, OTHERS, named

from specctl.policies import POLICIES


def test_every_policy_stands_for_itself_or_is_stood_for() -> None:
    assert set(POLICIES) - set(OTHERS) == {"none", "constant", "svip", "cost-optimal"}
    assert set(OTHERS) < set(POLICIES)


def test_names_of_cases_are_told_apart() -> None:
    assert named("test_x[llama-max-confidence-static]", OTHERS) == {"max-confidence", "confidence"}
    assert named("test_x[specdec++]", OTHERS) == {"specdec++"}
    assert not named("test_x[svip-cost-optimal-constant]", OTHERS)
    assert named("llama-svip-2", ("llama", "svip-2", "svip")) == {"llama", "svip-2", "svip"}
    assert not named("llama2-svip-24", ("llama", "svip-2"))


def test_representatives_are_cases(request: pytest.FixtureRequest) -> None:
    """Of the modules that were collected; a test that was asked for by its name may lack its other cases."""
    if not any("::" in argument for argument in request.config.args):
        assert not request.config.stash[LOST]


SECONDS = 300
"""Of CPU: what two cores have in three minutes, but for starting."""


def test_the_first_tier_fits_into_its_minutes_of_two_cores() -> None:
    assert sum(budgets().values()) < SECONDS


ALLOWED = {f"test_{number}": 4.0 for number in range(ENOUGH)}


@pytest.mark.parametrize("slowness", [1.0, 3.0])
def test_a_module_is_too_dear_whatever_the_machine(slowness: float) -> None:
    taken = {module: slowness * seconds for module, seconds in ALLOWED.items()}
    assert not too_dear(taken, ALLOWED)
    taken |= {"test_0": slowness * 5.9, "test_1": slowness * 6.1, "new": slowness * 1.4 * LEAST}
    assert too_dear(taken, ALLOWED) == {"test_1": pytest.approx(6.1)}


def test_a_few_modules_tell_nothing_of_the_machine() -> None:
    assert not too_dear({"test_0": 100.0}, ALLOWED)
