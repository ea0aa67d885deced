"""What is known of tokens: how a verifier judged drafted ones, how both models read the target's own. No torch here."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields

import numpy as np
import numpy.typing as npt

from specctl.statistics.intervals import Floats

Ints = npt.NDArray[np.int64]

RISING = {"entropy": -1.0, "top_prob": 1.0, "token_prob": 1.0, "accept_prob": 1.0}
"""Signals, with whether acceptance should rise or fall with them."""


@dataclass(frozen=True, slots=True)
class Judged:
    """Draft tokens with their verdicts, all arrays ``(N,)``.

    Attributes:
        prompt: which prompt, counted from 0.
        signals: by name, those of `RISING` that are known. ``accept_prob``, a head's prediction, is of the token itself
            and NaN where the head never judged it.
        accepted: 1 or 0; where the verdict is a coin, the probability of 1.
        run: (expected) tokens accepted in a row from this one on.
        discarded: ``(M,)`` entropies of tokens after a refused one, which were never judged.
        verdicts: ``(N,)`` by name, for signals of another token than the others, what became of that one.
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
    """What target and draft make of each token of outputs the target wrote; all arrays ``(T,)``, entropies in nats.

    Attributes:
        entropy, cross_entropy, top_prob: H_q, H_{q,p} and max q, of the softmaxes at temperature 1 of the raw logits.
        acceptance: the probability sum(min(p, q)) that a token drawn from q is accepted.
        divergence: KL(q||p) of the same two distributions; infinite where q has a token that p has not.
        agrees: 1 where target and draft have the same best token, else 0.
        kept: probability that the output's token came as an accepted draft: greedy 0 or 1, else min(1, q/p) of it.
        run: expected tokens so accepted in a row from this one to at most the output's end.
        judged: in greedy decoding ``kept``, else ``acceptance``.
        predicted: a head's word on a token drawn from the draft in place of this one; empty where there is no head.
        predicted_of: min(1, p/q) of that token; empty likewise.
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
        all: every token of them.
        prompt: ``(T,)`` which prompt, counted from 0.
        categories: of the prompts.
    """

    all: Reading
    prompt: Ints
    categories: Sequence[str]


def judge(readings: Readings) -> Judged:
    """The readings' tokens as verdicts, as if each were the first of a draft."""
    reading = readings.all
    signals = {"entropy": reading.entropy, "top_prob": reading.top_prob}
    verdicts: dict[str, Floats] = {}
    if len(reading.predicted):
        signals["accept_prob"], verdicts["accept_prob"] = reading.predicted, reading.predicted_of
    return Judged(readings.prompt, signals, reading.judged, reading.run, np.zeros(0), verdicts)


def run_lengths(kept: Floats) -> Floats:
    """Expected tokens accepted in a row from each position on, from the chance of each given those before it."""
    runs = np.zeros(len(kept) + 1)
    for place in reversed(range(len(kept))):
        runs[place] = kept[place] * (1 + runs[place + 1])
    return runs[:-1]
