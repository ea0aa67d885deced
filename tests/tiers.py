"""Which tests run always, which in the second tier (`slow`), and which in the third one only (`exhaustive`)."""

import re

import pytest

OTHERS = (
    "heuristic",
    "max-confidence",
    "adaedl",
    "self-verify",
    "specdec++",
    "disco",
    "confidence",
    "bandit",
    "vllm-adaptive",
)
"""Policies that do not run in every product of policies with something else. A policy reads numbers, whatever they
come from, so that one that reads nothing (constant), one that may drop the token that made it stop (svip) and one that
learns (cost-optimal) stand for all. All run in `test_greedy_identity`, `test_embedded` and `tests/policies`."""


def named(case: str, names: tuple[str, ...]) -> set[str]:
    """Those of some names that stand, whole, in a test's name with its parameters."""
    return {name for name in names if re.search(rf"(?<!\w){re.escape(name)}(?!\w)", case)}


LOST = pytest.StashKey[dict[str, set[str]]]()
"""By test, names of representatives that none of its cases has."""


def sort_into_tiers(items: list[pytest.Item]) -> dict[str, set[str]]:
    """Mark cases by the markers of their tests, and return what `LOST` says of them.

    ``crossed``: cases with a policy of `OTHERS` are ``exhaustive``. ``representatives(*names)``: cases with none of
    these names in their parameters are ``exhaustive``, but for those with one of ``slow=names``, which are ``slow``.
    """
    missing = dict[str, set[str]]()
    for item in items:
        test, _, case = item.nodeid.partition("[")
        if item.get_closest_marker("crossed") and named(item.name, OTHERS):
            item.add_marker("exhaustive")
        if marker := item.get_closest_marker("representatives"):
            second = marker.kwargs.get("slow", ())
            first, found = named(case, marker.args), named(case, second)
            missing[test] = missing.get(test, {*marker.args, *second}) - first - found
            if not first:
                item.add_marker("slow" if found else "exhaustive")
    return {test: names for test, names in missing.items() if names}
