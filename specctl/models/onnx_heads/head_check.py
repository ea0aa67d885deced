"""A draft head's graphs compared with its torch network, before anybody reads what they compute."""

import torch

from specctl.models.running.rounding import apart
from specctl.models.running.runner import Runner

ROUNDS = ((24, 3, 1), (4, 5, 2), (1, 2, 0), (7, 3, 6), (2, 4, 1))
"""Places that are witnessed, tokens drafted behind them, and how many of those places are taken back after that."""
LONGEST = sum(places + steps for places, steps, _ in ROUNDS)


def difference(runner: Runner, reference: Runner, vocabulary: int) -> float:
    """The largest difference between what two runners of a draft head compute, as `apart` measures it.

    They are shown the same states and read the same tokens, some of them before their states are known, and go back
    in between. Afterwards both are empty.

    Args:
        runner, reference: of the same head, empty.
        vocabulary: V, ids are drawn from below it.
    """
    draws = torch.Generator().manual_seed(16)
    text: list[int] = torch.randint(0, vocabulary, (LONGEST,), generator=draws).tolist()
    known, worst = 0, 0.0
    for places, steps, back in ROUNDS:
        states = {layer: torch.randn(places, runner.state_size, generator=draws) for layer in runner.layers}
        for each in (runner, reference):
            each.witness(known, states)
        known += places
        worst = max(worst, _apart(runner, reference, text[runner.length : known + 1]))
        for place in range(known + 1, known + min(steps, runner.longest or steps)):
            worst = max(worst, _apart(runner, reference, text[place : place + 1]))
        known -= back
        for each in (runner, reference):
            each.rollback(known)
    for each in (runner, reference):
        each.rollback(0)
    return worst


def _apart(runner: Runner, reference: Runner, tokens: list[int]) -> float:
    """The difference of what is behind the last of some tokens."""
    mine, theirs = (each.extend(tokens, keep=1, hidden=True) for each in (runner, reference))
    assert mine.hidden is not None
    assert theirs.hidden is not None
    found = [apart(mine.logits, theirs.logits), apart(mine.hidden, theirs.hidden)]
    if runner.foresee is not None and reference.foresee is not None:
        token = torch.tensor(tokens[-1])
        found.append(abs(float(runner.foresee(token)) - float(reference.foresee(token))))
    return max(found)
