"""Scores settings: replays them on traces and prices the rounds with measured costs."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from random import Random

import numpy as np

from specctl.calibration.grids import LONGEST
from specctl.policies import Setting, Signal
from specctl.replay.batch_replay import replay_together
from specctl.replay.bound import READS, play_best
from specctl.replay.costs import CostTable
from specctl.replay.oracle import oracle
from specctl.replay.play import players_of, replay_levels
from specctl.replay.replayed import Replay
from specctl.replay.trace_files import TraceSet
from specctl.statistics.intervals import SEED, Floats, Interval, bootstrap

RESAMPLES = 2000
EACH = 4
"""Texts of each place of a batch, at least: while the last ones end, places are empty."""


@dataclass(frozen=True, slots=True)
class Score:
    """The replayed rounds of a setting in numbers; every array is ``(P,)``, a value for each of P prompts.

    Attributes:
        setting: what was replayed.
        tokens: generated tokens.
        ms: predicted time after the prompt, in milliseconds.
        passes: rounds, which are target passes.
        drafted, accepted: draft tokens of the first draft, and how many were accepted.
    """

    setting: Setting
    tokens: Floats
    ms: Floats
    passes: Floats
    drafted: Floats
    accepted: Floats

    @property
    def tokens_per_second(self) -> float:
        return float(1e3 * self.tokens.sum() / self.ms.sum())

    @property
    def acceptance_rate(self) -> float | None:
        drafted = float(self.drafted.sum())
        return float(self.accepted.sum()) / drafted if drafted else None

    @property
    def discard_rate(self) -> float:
        """Rejected draft tokens for each generated token."""
        return float((self.drafted.sum() - self.accepted.sum()) / self.tokens.sum())

    @property
    def verification_rate(self) -> float:
        """Target passes for each generated token."""
        return float(self.passes.sum() / self.tokens.sum())

    @property
    def mean_acceptance_length(self) -> float:
        return float(1 + self.accepted.sum() / self.passes.sum())

    def speedup(self, over: "Score") -> Interval:
        """Ratio of predicted speeds with a bootstrap interval paired by prompt."""

        def ratio(weights: Floats) -> Floats:
            ratios: Floats = (weights @ over.ms) / (weights @ self.ms)
            return ratios

        return bootstrap(ratio, len(self.ms), RESAMPLES)


def score(setting: Setting, traces: TraceSet, prompts: Sequence[str], costs: CostTable) -> Score:
    """Replay a setting on the prompts and price its rounds."""
    costs = costs.of_predictor(setting.head)
    signals = [level.signals for level in setting.levels]
    players = players_of(setting, costs.clocks(signals))
    replays = replay_levels(players, traces.of(prompts, setting.head), frozenset(traces.header.eos))
    return _priced(setting, replays, prompts, costs, *signals)


def score_together(setting: Setting, traces: TraceSet, prompts: Sequence[str], rows: int, costs: CostTable) -> Score:
    """Score a setting of one draft for so many texts at once: ``ms`` are prompts' shares of the time.

    Every text is written equally often, at least `EACH` texts in each place of the batch, in an order that is always
    the same.
    """
    costs = costs.of_predictor(setting.head)
    known, order = traces.of(prompts, setting.head), Random(SEED)
    texts = [one for _ in range(-(-EACH * rows // len(known))) for one in order.sample(known, len(known))]
    batch = replay_together(setting, texts, rows, costs, frozenset(traces.header.eos))
    places = {prompt: place for place, prompt in enumerate(prompts)}
    columns = np.zeros((5, len(prompts)))  # tokens, ms, rounds, drafted and accepted tokens
    for one, seconds in zip(batch.replays, batch.shares, strict=True):
        numbers = one.tokens, 1e3 * seconds, len(one.starts), sum(one.drafted), sum(one.accepted)
        columns[:, places[one.trace.prompt]] += numbers
    return Score(setting, *columns)


def score_oracle(traces: TraceSet, prompts: Sequence[str], costs: CostTable) -> Score:
    """Score the policy that knows where the target will disagree (SpecDec++, Theorem 4.1); it reads no signal.

    In a hierarchy every draft knows where its verifier will disagree; the number of drafts is the fastest one.
    """
    known = traces.of(prompts)
    scores = [
        _priced(Setting("oracle"), [oracle(trace, used) for trace in known], prompts, costs, *[()] * used)
        for used in range(1, len(costs.levels) + 1)
    ]
    return max(scores, key=lambda one: one.tokens_per_second)


def score_signal_bound(traces: TraceSet, prompts: Sequence[str], costs: CostTable) -> Score:
    """Score the best stopping rule on entropy and top probability, fitted to the same prompts."""
    longest = min(LONGEST, traces.header.depth)
    replays = play_best(traces.of(prompts), costs, frozenset(traces.header.eos), longest=longest)
    return _priced(Setting("signal bound"), replays, prompts, costs, READS)


def _priced(
    setting: Setting,
    replays: Iterable[Replay],
    prompts: Sequence[str],
    costs: CostTable,
    *signals: Iterable[Signal],
) -> Score:
    by_prompt: dict[str, list[Replay]] = {prompt: [] for prompt in prompts}
    for played in replays:
        by_prompt[played.trace.prompt].append(played)
    groups = list(by_prompt.values())
    return Score(
        setting,
        np.array([sum(one.tokens for one in group) for group in groups], dtype=np.float64),
        np.array([costs.milliseconds(group, *signals) for group in groups]),
        np.array([sum(len(one.starts) for one in group) for group in groups], dtype=np.float64),
        np.array([sum(map(sum, (one.drafted for one in group))) for group in groups], dtype=np.float64),
        np.array([sum(map(sum, (one.accepted for one in group))) for group in groups], dtype=np.float64),
    )
