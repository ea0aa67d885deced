"""Draft tokens with their verdicts, and both models' distributions at the target's own tokens. No torch here."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from math import isnan, nan
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import TypeAdapter

from specctl.errors import UsageError
from specctl.files import Content, content_of, lines_of, parse_line
from specctl.policies import DISTRIBUTION_SIGNALS
from specctl.replay.trace_files import read_traces as read_trace_set
from specctl.replay.traces import Trace
from specctl.round_trace import RoundLine, TracedRound
from specctl.statistics import Floats

Ints = npt.NDArray[np.int64]

RISING = {
    "entropy": -1.0,
    "top_prob": 1.0,
    "token_prob": 1.0,
    "accept_prob": 1.0,
    "next_accept_prob": 1.0,
    "own_accept_prob": 1.0,
}
"""The sign of the expected correlation of each signal with acceptance."""


@dataclass(frozen=True, slots=True)
class Judged:
    """Draft tokens with their verdicts, all arrays ``(N,)``."""

    prompt: Ints  # index of the prompt, from 0
    # by name, those of `RISING` that are known. ``accept_prob`` and ``next_accept_prob`` are the predictions for the
    # token itself, made after and before it was drawn; NaN where there is none.
    signals: Mapping[str, Floats]
    accepted: Floats  # 1 or 0; where the verdict is random, the probability of 1
    run: Floats  # (expected) tokens accepted in a row from this one on
    discarded: Floats  # ``(M,)`` draft entropies of tokens after a rejected one, which were never judged
    # ``(N,)`` by name, for signals of another token than ``accepted``, the verdict on that other token
    verdicts: Mapping[str, Floats] = field(default_factory=dict)

    @property
    def certain(self) -> bool:
        """Whether every verdict is known."""
        return bool(np.isin(self.accepted, (0.0, 1.0)).all())


@dataclass(frozen=True, slots=True)
class Reading:
    """Target and draft at each token of the target's own outputs; all arrays ``(T,)``, entropies in nats."""

    # entropy, cross_entropy, top_prob: H_q, H_{q,p} and max q, of the softmaxes at temperature 1 of the raw logits
    entropy: Floats
    cross_entropy: Floats
    top_prob: Floats
    acceptance: Floats  # sum(min(p, q)), the probability that a token drawn from q is accepted
    divergence: Floats  # KL(q||p) of the distributions in ``acceptance``; infinite where q has a token that p lacks
    agrees: Floats  # 1 where target and draft have the same best token, else 0
    # probability that the token of the output was an accepted draft token: 0 or 1 in greedy decoding, else min(1, q/p)
    # at that token
    kept: Floats
    run: Floats  # expected number of tokens accepted in a row from this one on, at most to the end of the output
    judged: Floats  # in greedy decoding ``kept``, else ``acceptance``
    # a head's prediction for a token drawn from the draft at this position; empty without a head
    predicted: Floats = field(default_factory=lambda: np.zeros(0))
    # min(1, p/q) of the token that ``predicted`` is about; empty without a head
    predicted_of: Floats = field(default_factory=lambda: np.zeros(0))

    @classmethod
    def joined(cls, readings: Sequence["Reading"]) -> "Reading":
        return cls(*(np.concatenate([getattr(one, column.name) for one in readings]) for column in fields(cls)))


@dataclass(frozen=True, slots=True)
class Readings:
    """One `Reading` for all tokens of several prompts."""

    all: Reading  # every token of all prompts
    prompt: Ints  # ``(T,)`` which prompt, counted from 0
    categories: Sequence[str]  # one per prompt


def judge(readings: Readings) -> Judged:
    """Convert readings to verdicts, as if each token were the first of a draft."""
    reading = readings.all
    signals = {"entropy": reading.entropy, "top_prob": reading.top_prob}
    verdicts: dict[str, Floats] = {}
    if len(reading.predicted):
        signals["accept_prob"], verdicts["accept_prob"] = reading.predicted, reading.predicted_of
    return Judged(readings.prompt, signals, reading.judged, reading.run, np.zeros(0), verdicts)


def run_lengths(kept: Floats) -> Floats:
    """Expected number of tokens accepted in a row, from each position.

    Args:
        kept: ``(T,)`` probability that each token is accepted, given that those before it were.
    """
    runs = np.zeros(len(kept) + 1)
    for position in reversed(range(len(kept))):
        runs[position] = kept[position] * (1 + runs[position + 1])
    return runs[:-1]


HINT = "--from takes files that generate --trace or calibrate --trace wrote"


@dataclass(slots=True)
class _Verdicts:
    """The columns of `Judged`, as they fill; ``numbers`` are the prompts', by id."""

    prompt: list[int] = field(default_factory=list)
    accepted: list[float] = field(default_factory=list)
    run: list[float] = field(default_factory=list)
    discarded: list[float] = field(default_factory=list)
    signals: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in RISING})
    numbers: dict[str, int] = field(default_factory=dict)

    def add_round(self, identity: Any, round_: TracedRound) -> None:
        """Add the verified tokens of a round, and the entropies of the tokens after the rejected one."""
        verified = round_.steps[: round_.accepted + 1]
        columns: dict[str, Sequence[float | None]] = {
            name: [getattr(step, name) for step in verified] for name in DISTRIBUTION_SIGNALS
        }
        # A head predicts for a token once it is fed, so its prediction stands at the step after.
        after = [step.accept_prob for step in round_.steps[1 : len(verified) + 1]]
        columns["accept_prob"] = [*after, *[None] * (len(verified) - len(after))]
        # A draft head predicts for a token before it is drawn, so its prediction stands at the step before.
        before = [step.next_accept_prob for step in verified[:-1]]
        columns["next_accept_prob"] = [*[None] * (len(verified) - len(before)), *before]
        columns["own_accept_prob"] = [step.own_accept_prob for step in verified]
        accepted = [float(step.accepted) for step in verified]
        self._add(identity, accepted, [float(round_.accepted - index) for index in range(len(verified))], columns)
        never = round_.steps[round_.accepted + 1 :]
        self.discarded += [max(0.0, step.entropy) for step in never if step.entropy is not None]

    def add_trace(self, trace: Trace) -> None:
        """Add the judged draft tokens: one per position of the text, or for a draft head one round per start.

        Raises:
            UsageError: the draft is a lookup.
        """
        if trace.draft.copies:
            raise UsageError("the trace is of a lookup, which has no distributions", "name a trace of a draft model")
        for judged in trace.draft.judged():
            columns: dict[str, Sequence[float | None]] = {
                name: getattr(judged.steps, name) for name in DISTRIBUTION_SIGNALS
            }
            columns["accept_prob"] = judged.predictions
            foreseen = judged.steps.next_accept_prob
            columns["next_accept_prob"] = [None] * len(judged.outcomes) if foreseen is None else [None, *foreseen[:-1]]
            columns["own_accept_prob"] = judged.own_predictions
            runs = run_lengths(np.array(judged.outcomes)).tolist()
            self._add(trace.prompt, list(judged.outcomes), runs, columns)

    def _add(
        self,
        identity: Any,
        accepted: Sequence[float],
        run: Sequence[float],
        signals: dict[str, Sequence[float | None]],
    ) -> None:
        self.prompt += [self.numbers.setdefault(repr(identity), len(self.numbers))] * len(accepted)
        self.accepted += accepted
        self.run += run
        for name, values in self.signals.items():
            values += [nan if value is None else value for value in signals[name]]


def read_traces(paths: Iterable[Path]) -> Judged:
    """Read the draft tokens of all traces. Records with the same id are one prompt, even in different files.

    Raises:
        UsageError: a file cannot be read or is not a trace, a line is damaged or belongs to a tree, or no draft token
            was verified.
    """
    found = _Verdicts()
    for path in paths:
        _read(path, found)
    if not found.accepted:
        raise UsageError("the traces contain no draft tokens", "trace a run with a policy other than none")
    return _judged(found)


def verdicts(traces: Iterable[Trace]) -> Judged | None:
    """The draft tokens that verification judges in these traces; None if there are none."""
    found = _Verdicts()
    for trace in traces:
        found.add_trace(trace)
    return _judged(found) if found.accepted else None


def _judged(found: _Verdicts) -> Judged:
    known = {name: np.array(values) for name, values in found.signals.items() if not all(map(isnan, values))}
    if not known:
        raise UsageError("the traces contain no signals", "write them with `specctl generate --trace FILE`")
    own = [values for name, values in known.items() if name in DISTRIBUTION_SIGNALS] or list(known.values())
    whole = np.isfinite(np.stack(own)).all(axis=0)
    if not whole.any():
        raise UsageError("no draft token has all the signals that others have", "analyse the traces one by one")
    return Judged(
        np.array(found.prompt)[whole],
        {name: np.clip(values[whole], 0, None if name == "entropy" else 1) for name, values in known.items()},
        np.array(found.accepted)[whole],
        np.array(found.run)[whole],
        np.array(found.discarded),
    )


def _read(path: Path, found: _Verdicts) -> None:
    content = content_of(path)
    if content is Content.TRACE:
        whole = read_trace_set(path)
        for trace in whole.of(whole.prompts):
            found.add_trace(trace)
    elif content in (Content.ROUNDS, None):
        adapter = TypeAdapter(RoundLine)
        for number, line in lines_of(path):
            round_ = parse_line(adapter, path, number, line, HINT)
            if round_.tree:
                raise UsageError(
                    f"{path}:{number}: the levels of a tree are not tokens that were verified one by one",
                    "trace the chain: specctl generate --set draft.tree=0 --trace FILE",
                )
            found.add_round(round_.id, round_)
    else:
        raise UsageError(f"{path} holds {content}, not a trace", HINT)
