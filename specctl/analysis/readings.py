"""Draft tokens with their verdicts, and the target's own tokens as both models read them. No torch here."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields

import numpy as np
import numpy.typing as npt

from specctl.statistics.intervals import Floats

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
    """Draft tokens with their verdicts, all arrays ``(N,)``.

    Attributes:
        prompt: which prompt, counted from 0.
        signals: by name, those of `RISING` that are known. ``accept_prob`` and ``next_accept_prob`` are the predictions
            for the token itself, made after and before it was drawn; NaN where there is none.
        accepted: 1 or 0; where the verdict is random, the probability of 1.
        run: (expected) tokens accepted in a row from this one on.
        discarded: ``(M,)`` draft entropies of tokens after a rejected one, which were never judged.
        verdicts: ``(N,)`` by name, for signals of another token than ``accepted``, the verdict on that other token.
    """

    prompt: Ints
    signals: Mapping[str, Floats]
    accepted: Floats
    run: Floats
    discarded: Floats
    verdicts: Mapping[str, Floats] = field(default_factory=dict)

    @property
    def certain(self) -> bool:
        """Whether every verdict is known."""
        return bool(np.isin(self.accepted, (0.0, 1.0)).all())


@dataclass(frozen=True, slots=True)
class Reading:
    """Target and draft at each token of the target's own outputs; all arrays ``(T,)``, entropies in nats.

    Attributes:
        entropy, cross_entropy, top_prob: H_q, H_{q,p} and max q, of the softmaxes at temperature 1 of the raw logits.
        acceptance: the probability sum(min(p, q)) that a token drawn from q is accepted.
        divergence: KL(q||p) of the distributions in ``acceptance``; infinite where q has a token that p lacks.
        agrees: 1 where target and draft have the same best token, else 0.
        kept: probability that the token of the output was an accepted draft token: 0 or 1 in greedy decoding, else
            min(1, q/p) at that token.
        run: expected number of tokens accepted in a row from this one on, at most to the end of the output.
        judged: in greedy decoding ``kept``, else ``acceptance``.
        predicted: a head's prediction for a token drawn from the draft at this position; empty where there is no head.
        predicted_of: min(1, p/q) of the token that ``predicted`` is about; empty where there is no head.
    """

    entropy: Floats
    cross_entropy: Floats
    top_prob: Floats
    acceptance: Floats
    divergence: Floats
    agrees: Floats
    kept: Floats
    run: Floats
    judged: Floats
    predicted: Floats = field(default_factory=lambda: np.zeros(0))
    predicted_of: Floats = field(default_factory=lambda: np.zeros(0))

    @classmethod
    def joined(cls, readings: Sequence["Reading"]) -> "Reading":
        return cls(*(np.concatenate([getattr(one, column.name) for one in readings]) for column in fields(cls)))


@dataclass(frozen=True, slots=True)
class Readings:
    """Readings of several prompts.

    Attributes:
        all: every token of all prompts.
        prompt: ``(T,)`` which prompt, counted from 0.
        categories: one per prompt.
    """

    all: Reading
    prompt: Ints
    categories: Sequence[str]


def judge(readings: Readings) -> Judged:
    """Readings as verdicts, as if each token were the first of a draft."""
    reading = readings.all
    signals = {"entropy": reading.entropy, "top_prob": reading.top_prob}
    verdicts: dict[str, Floats] = {}
    if len(reading.predicted):
        signals["accept_prob"], verdicts["accept_prob"] = reading.predicted, reading.predicted_of
    return Judged(readings.prompt, signals, reading.judged, reading.run, np.zeros(0), verdicts)


def run_lengths(kept: Floats) -> Floats:
    """Expected tokens accepted in a row from each position on.

    Args:
        kept: ``(T,)`` probability that each token is accepted, given that those before it were.
    """
    runs = np.zeros(len(kept) + 1)
    for position in reversed(range(len(kept))):
        runs[position] = kept[position] * (1 + runs[position + 1])
    return runs[:-1]
