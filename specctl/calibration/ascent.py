"""Coordinate ascent over the settings of a hierarchy: one level is searched at a time while the others are held."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product

from specctl.policies import Setting, nested

SWEEPS = 2
"""How often every level is searched. The best setting of a level hardly depends on the exact settings of the others."""

Options = Sequence[Sequence[Setting]]
"""For each level from the top down, the settings that it may have."""


@dataclass(frozen=True, slots=True)
class Space:
    """The settings to search at each level.

    Attributes:
        coarse: searched first.
        fine: searched second, limited to the policies that the coarse search ends with; the same object as ``coarse``
            if there is no second search.
    """

    coarse: Options
    fine: Options

    @property
    def most(self) -> int:
        """An upper bound of the number of settings that `explore` evaluates."""
        coarse = sum(len(level) for options in _by_mode(self.coarse) for level in options)
        fine = 0
        if self.fine is not self.coarse:
            fine = sum(
                max(Counter(one.policy for one in level).values())
                for options in _by_mode(self.fine)
                for level in options
            )
        return SWEEPS * (coarse + fine)


def explore(space: Space, start: Setting, speed: Callable[[Setting], float]) -> None:
    """Call ``speed`` for settings, each search moving towards the fastest.

    Every combination of ways to pre-verify is searched separately, because settings that suit a block of one inner
    round need not suit a loop.

    Args:
        space: the settings to search.
        start: supplies the settings that are held first, for the levels that it has.
        speed: returns the speed of a setting, the higher the better; called repeatedly for the same setting.
    """
    for options in _by_mode(space.coarse):
        held = [_nearest(start, level, settings) for level, settings in enumerate(options)]
        best = _ascend(options, held, speed)
        if space.fine is not space.coarse:
            fine = [
                [one for one in settings if (one.policy, one.once) == (chosen.policy, chosen.once)]
                for settings, chosen in zip(space.fine, best, strict=True)
            ]
            _ascend(fine, best, speed)


def _by_mode(options: Options) -> list[list[list[Setting]]]:
    """For each combination of the levels' ways to pre-verify, the options that have these ways."""
    modes = product(*(sorted({one.once for one in some}) for some in options))
    return [
        [[one for one in some if one.once == once] for some, once in zip(options, mode, strict=True)] for mode in modes
    ]


def _nearest(start: Setting, level: int, options: Sequence[Setting]) -> Setting:
    """The setting that the start has at a level if it is among the options, else the middle option."""
    alone = [replace(setting, below=None) for setting in start.levels[level : level + 1]]
    return next((setting for setting in alone if setting in options), options[len(options) // 2])


def _ascend(
    options: Sequence[Sequence[Setting]], held: Sequence[Setting], speed: Callable[[Setting], float]
) -> list[Setting]:
    held = list(held)
    for _ in range(SWEEPS):
        previous = list(held)
        for level, settings in enumerate(options):
            held[level] = max(settings, key=lambda one: speed(nested([*held[:level], one, *held[level + 1 :]])))
        if held == previous:
            break
    return held
