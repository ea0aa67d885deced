"""The setting to use among some, and how sure that choice is."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specctl.calibration.grids import SIMPLEST
from specctl.calibration.scores import RESAMPLES, Score
from specctl.policies import Setting
from specctl.statistics.intervals import SEED


@dataclass(frozen=True, slots=True)
class Choice:
    """The setting to use among some, and how sure that is.

    Attributes:
        chosen: the simplest within one standard error of the fastest.
        fastest: by predicted tokens/s.
        share: of the bootstrap's resamples of prompts in which the chosen one is within the noise of the fastest.
        near: the others within one standard error of the fastest, the fastest first.
    """

    chosen: Score
    fastest: Score
    share: float
    near: list[Score]


def choose(scores: Sequence[Score]) -> Choice:
    """Pick by predicted tokens/s; all scores are of the same prompts in the same order."""
    speeds = np.array([found.tokens_per_second for found in scores])
    best = int(speeds.argmax())
    tokens, ms = scores[0].tokens, np.stack([found.ms for found in scores])  # (P,), (S, P)
    prompts = len(tokens)
    if prompts > 1:
        weights = np.random.default_rng(SEED).multinomial(prompts, np.full(prompts, 1 / prompts), size=RESAMPLES)
        resampled = 1e3 * (weights @ tokens)[:, None] / (weights @ ms.T)  # (R, S)
        errors = (resampled[:, [best]] - resampled).std(axis=0)
    else:
        resampled, errors = speeds[None], np.zeros(len(scores))
    within = [place for place in range(len(scores)) if speeds[best] - speeds[place] <= errors[place]]
    chosen = min(within, key=lambda place: (*_simplicity(scores[place].setting), -speeds[place]))
    sure = resampled[:, chosen] >= resampled.max(axis=1) - errors[chosen]
    near = sorted((place for place in within if place != chosen), key=lambda place: -speeds[place])
    return Choice(scores[chosen], scores[best], float(sure.mean()), [scores[place] for place in near])


def _simplicity(setting: Setting) -> tuple[int, int, int]:
    levels = setting.levels
    known = sum(SIMPLEST.index(one.policy) if one.policy in SIMPLEST else len(SIMPLEST) for one in levels)
    return len(levels), known, sum(len(one.values) for one in levels)
