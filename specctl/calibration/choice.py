"""Chooses the simplest setting that is about as fast as the fastest, and estimates how sure the choice is."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specctl.calibration.grids import SIMPLEST
from specctl.calibration.scores import RESAMPLES, Score
from specctl.policies import Setting
from specctl.statistics.intervals import SEED


@dataclass(frozen=True, slots=True)
class Choice:
    """The chosen setting, and how sure the choice is.

    Attributes:
        chosen: the simplest setting within one standard error of the fastest.
        fastest: the fastest setting by predicted tokens/s.
        share: share of bootstrap resamples of the prompts in which the chosen setting is within one standard error of
            the fastest.
        near: the other settings within one standard error of the fastest, the fastest first.
    """

    chosen: Score
    fastest: Score
    share: float
    near: list[Score]


def choose(scores: Sequence[Score]) -> Choice:
    """Choose by predicted tokens/s; all scores must be of the same prompts in the same order."""
    speeds = np.array([score.tokens_per_second for score in scores])
    best = int(speeds.argmax())
    tokens, ms = scores[0].tokens, np.stack([score.ms for score in scores])  # (P,), (S, P)
    prompts = len(tokens)
    if prompts > 1:
        weights = np.random.default_rng(SEED).multinomial(prompts, np.full(prompts, 1 / prompts), size=RESAMPLES)
        resampled = 1e3 * (weights @ tokens)[:, None] / (weights @ ms.T)  # (R, S)
        errors = (resampled[:, [best]] - resampled).std(axis=0)
    else:
        resampled, errors = speeds[None], np.zeros(len(scores))
    within = [index for index in range(len(scores)) if speeds[best] - speeds[index] <= errors[index]]
    chosen = min(within, key=lambda index: (*simplicity(scores[index].setting), -speeds[index]))
    sure = resampled[:, chosen] >= resampled.max(axis=1) - errors[chosen]
    near = sorted((index for index in within if index != chosen), key=lambda index: -speeds[index])
    return Choice(scores[chosen], scores[best], float(sure.mean()), [scores[index] for index in near])


def simplicity(setting: Setting) -> tuple[int, int, int]:
    """The smaller, the simpler: fewer drafts, simpler policies, fewer values that are not the defaults."""
    levels = setting.levels
    known = sum(SIMPLEST.index(one.policy) if one.policy in SIMPLEST else len(SIMPLEST) for one in levels)
    return len(levels), known, sum(len(one.values) for one in levels)
