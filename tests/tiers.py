"""Which tests run always, and which only in the exhaustive tier."""

import re

OTHERS = ("heuristic", "max-confidence", "adaedl", "self-verify", "specdec++", "disco", "confidence", "bandit")
"""Policies that do not run in every product of policies with something else. A policy reads numbers, whatever they
come from, so that one that reads nothing (constant), one that may drop the token that made it stop (svip) and one that
learns (cost-optimal) stand for all. All run in `test_greedy_identity`, `test_embedded` and `tests/policies`."""
_OTHER = re.compile(rf"(?<![a-z])({'|'.join(map(re.escape, OTHERS))})(?![a-z])")


def names_another(case: str) -> bool:
    """Whether a test's name, with its parameters, has a policy of `OTHERS`."""
    return _OTHER.search(case) is not None
