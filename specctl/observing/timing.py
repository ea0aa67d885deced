"""Helpers for timing forward passes."""

from collections.abc import Sequence

import torch

from specctl.models.running.runner import Runner


def fill(runner: Runner, tokens: Sequence[int]) -> None:
    """Make the cache hold these tokens and nothing else; a draft head reads them with states of zeros."""
    runner.rollback(0)
    _show_zeros(runner, 0, len(tokens))
    if tokens:
        runner.extend(list(tokens), keep=0)


def forget(runner: Runner, length: int, last: int) -> None:
    """Take back the ``last`` of ``length`` cached tokens; a draft head keeps states of zeros for them."""
    runner.rollback(length - last)
    _show_zeros(runner, length - last, last)


def _show_zeros(runner: Runner, start: int, count: int) -> None:
    if runner.reads_states and count:
        states = torch.zeros(count, runner.state_size, device=runner.device)
        runner.witness(start, dict.fromkeys(runner.layers, states))
