"""A search over the settings of all levels of a hierarchy: one level at a time, the others held."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product

from specctl.policies import Setting, nested

SWEEPS = 2
"""How often every level is searched. What is best at one level hardly depends on the other's exact setting."""

Options = Sequence[Sequence[Setting]]
"""Settings of single levels, for each level from the top down."""


@dataclass(frozen=True, slots=True)
class Space:
    """What may be chosen at each level.

    Attributes:
        coarse: searched first.
        fine: searched next, of the policies that the coarse search ends with; the same as ``coarse`` for no such second
            search.
    """

    coarse: Options
    fine: Options

    @property
    def most(self) -> int:
        """No fewer settings than `explore` will ask for."""
        coarse = sum(len(some) for options in _by_mode(self.coarse) for some in options)
        fine = 0
        if self.fine is not self.coarse:
            fine = sum(
                max(Counter(one.policy for one in some).values()) for options in _by_mode(self.fine) for some in options
            )
        return SWEEPS * (coarse + fine)


def explore(space: Space, start: Setting, speed: Callable[[Setting], float]) -> None:
    """Ask for the speed of settings, ever nearer to the fastest.

    Every way of pre-verifying is searched for itself: what suits a block of one inner round need not suit a loop.

    Args:
        space: to search.
        start: its settings are held first, as far down as it has levels.
        speed: of a setting, the higher the better; asked more than once for the same.
    """
    for options in _by_mode(space.coarse):
        held = [_nearest(start, level, some) for level, some in enumerate(options)]
        best = _ascend(options, held, speed)
        if space.fine is not space.coarse:
            fine = [
                [one for one in some if (one.policy, one.once) == (level.policy, level.once)]
                for some, level in zip(space.fine, best, strict=True)
            ]
            _ascend(fine, best, speed)


def _by_mode(options: Options) -> list[list[list[Setting]]]:
    """The options of every combination of ways to pre-verify, level by level."""
    modes = product(*(sorted({one.once for one in some}) for some in options))
    return [
        [[one for one in some if one.once == once] for some, once in zip(options, mode, strict=True)] for mode in modes
    ]


def _nearest(start: Setting, level: int, options: Sequence[Setting]) -> Setting:
    """The level's setting in a start, or else the middle one of the options."""
    alone = [replace(own, below=None) for own in start.levels[level : level + 1]]
    return next((own for own in alone if own in options), options[len(options) // 2])


def _ascend(
    options: Sequence[Sequence[Setting]], held: Sequence[Setting], speed: Callable[[Setting], float]
) -> list[Setting]:
    held = list(held)
    for _ in range(SWEEPS):
        before = list(held)
        for level, some in enumerate(options):
            held[level] = max(some, key=lambda one: speed(nested([*held[:level], one, *held[level + 1 :]])))
        if held == before:
            break
    return held
