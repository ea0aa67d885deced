"""Which tests run always, which in the second tier (`slow`), and which in the third one only (`exhaustive`)."""

import re

import pytest

OTHERS = ("heuristic", "max-confidence", "adaedl", "self-verify", "specdec++", "disco", "confidence", "bandit")
"""Policies that do not run in every product of policies with something else. A policy reads numbers, whatever they
come from, so that one that reads nothing (constant), one that may drop the token that made it stop (svip) and one that
learns (cost-optimal) stand for all. All run in `test_greedy_identity`, `test_embedded` and `tests/policies`."""


def named(case: str, names: tuple[str, ...]) -> set[str]:
    """Those of some names that stand, whole, in a test's name with its parameters."""
    return {name for name in names if re.search(rf"(?<!\w){re.escape(name)}(?!\w)", case)}


def sort_into_tiers(items: list[pytest.Item], *, whole: bool) -> None:
    """Mark cases by the markers of their tests; ``whole`` says that all cases of each test are there.

    ``crossed``: cases with a policy of `OTHERS` are ``exhaustive``. ``representatives(*names)``: cases with none of
    these names in their parameters are ``slow``.

    Raises:
        pytest.UsageError: no case of a whole test has the name of one of its representatives.
    """
    missing = dict[str, set[str]]()
    for item in items:
        test, _, case = item.nodeid.partition("[")
        if item.get_closest_marker("crossed") and named(item.name, OTHERS):
            item.add_marker("exhaustive")
        if marker := item.get_closest_marker("representatives"):
            found = named(case, marker.args)
            missing[test] = missing.get(test, set(marker.args)) - found
            if not found:
                item.add_marker("slow")
    if whole and (lost := {test: names for test, names in missing.items() if names}):
        raise pytest.UsageError(f"no cases of these representatives: {lost}")
