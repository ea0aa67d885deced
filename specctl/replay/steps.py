"""Draft tokens with all that a policy may read of them, as columns. No torch here."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from specctl.errors import UsageError
from specctl.models.predictors.disco_predictor import DiscoPredictor
from specctl.policies import TOP_PROBS
from specctl.records import DraftStep


@dataclass(frozen=True, slots=True)
class DraftSteps:
    """Draft tokens at consecutive positions with their signals, as columns.

    Every list is as long as ``tokens``. ``accept_prob`` is the prediction of the draft's head for the token fed just
    before the position, None without a head; ``further`` holds the predictions of the draft's other heads by name.
    ``next_accept_prob`` is what a draft head predicts for the token that it would draft next, None if it does not.
    ``top_probs`` are the `TOP_PROBS` largest probabilities at each position; None if the draft has no DISCO head.
    """

    tokens: list[int]
    entropy: list[float]
    top_prob: list[float]
    token_prob: list[float]
    accept_prob: list[float] | None = None
    further: dict[str, list[float]] | None = None
    next_accept_prob: list[float] | None = None
    top_probs: list[list[float]] | None = None
    agreement: list[float] | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, positions: slice) -> "DraftSteps":
        return DraftSteps(
            self.tokens[positions],
            self.entropy[positions],
            self.top_prob[positions],
            self.token_prob[positions],
            None if self.accept_prob is None else self.accept_prob[positions],
            next_accept_prob=None if self.next_accept_prob is None else self.next_accept_prob[positions],
            top_probs=None if self.top_probs is None else self.top_probs[positions],
            agreement=None if self.agreement is None else self.agreement[positions],
        )

    def __add__(self, after: "DraftSteps") -> "DraftSteps":
        predictors = None
        if self.accept_prob is not None and after.accept_prob is not None:
            predictors = self.accept_prob + after.accept_prob
        return DraftSteps(
            self.tokens + after.tokens,
            self.entropy + after.entropy,
            self.top_prob + after.top_prob,
            self.token_prob + after.token_prob,
            predictors,
            top_probs=None if self.top_probs is None or after.top_probs is None else self.top_probs + after.top_probs,
        )

    def of_predictor(self, name: str) -> "DraftSteps":
        """These steps with the predictions of another head in ``accept_prob``."""
        return replace(self, accept_prob=(self.further or {})[name], further=None)

    def signals(self, position: int) -> list[float]:
        """Entropy, top probability and token probability at a position."""
        return [self.entropy[position], self.top_prob[position], self.token_prob[position]]

    def step(self, position: int, index: int, disco: DiscoPredictor | None = None) -> DraftStep:
        """The token at a position as the ``index``-th step of a round, with the prediction of a DISCO head."""
        accept_prob = None if self.accept_prob is None else self.accept_prob[position]
        if accept_prob is not None and index == 1:
            accept_prob = 1.0  # no draft token precedes it
        return DraftStep(
            index,
            self.tokens[position],
            self.entropy[position],
            self.top_prob[position],
            self.token_prob[position],
            accept_prob,
            None if self.next_accept_prob is None else self.next_accept_prob[position],
            self.own_accept_prob(position, index, disco),
            None if self.agreement is None else self.agreement[position],
        )

    def own_accept_prob(self, position: int, index: int, disco: DiscoPredictor | None) -> float | None:
        """A DISCO head's prediction for the token at a position as the ``index``-th of a round, computed as live."""
        if disco is None or self.top_probs is None:
            return None
        return disco.own_accept_prob(self.top_probs[position], self.entropy[position], index)


def draft_steps(tokens: list[int], columns: list[list[float]], predictors: Iterable[str]) -> DraftSteps:
    """Draft steps from a column for each of `DISTRIBUTION_SIGNALS`, one for each head's predictions, and in the end,
    where the draft has a DISCO head, one for each of the largest probabilities."""
    names = list(predictors)
    entropy, top_prob, token_prob, *more = columns
    predictions, tops = more[: len(names)], more[len(names) :]
    assert len(tops) in (0, TOP_PROBS)
    further = dict(zip(names[1:], predictions[1:], strict=True)) or None
    top_probs = list(map(list, zip(*tops, strict=True))) if tops else None
    first = predictions[0] if predictions else None
    return DraftSteps(tokens, entropy, top_prob, token_prob, first, further, top_probs=top_probs)


class Judged(NamedTuple):
    """Draft tokens at consecutive positions with the verdicts on them.

    Attributes:
        steps: the tokens with their signals.
        accepted: whether verification accepts each, once it has accepted those before it in the round.
        outcomes: the probability that it does; in greedy decoding 1 or 0.
        indices: the number of each token in its round, from 1; all 1 where a token does not depend on where its round
            began, so that any of them may be the first.
        predictions: what the draft's head predicts for each token; None where that is not known.
        own_predictions: the same of a DISCO head.
    """

    steps: DraftSteps
    accepted: Sequence[bool]
    outcomes: Sequence[float]
    indices: Sequence[int]
    predictions: Sequence[float | None]
    own_predictions: Sequence[float | None]

    @classmethod
    def of(
        cls,
        steps: DraftSteps,
        accepted: Sequence[bool],
        outcomes: Sequence[float],
        indices: Sequence[int],
        predictions: Sequence[float | None],
        disco: DiscoPredictor | None,
    ) -> "Judged":
        """Judged tokens with the predictions of a DISCO head, if there is one."""
        own = [steps.own_accept_prob(position, index, disco) for position, index in enumerate(indices)]
        return cls(steps, accepted, outcomes, indices, predictions, own)


def judged_in_round(
    row: DraftSteps, run: int, outcomes: Sequence[float] | None, disco: DiscoPredictor | None
) -> Judged:
    """The tokens of a round that verification judges: to the first that is rejected.

    Args:
        row: the tokens of the round, and perhaps further ones.
        run: how many of them are accepted.
        outcomes: of `Judged`; None in greedy decoding.
        disco: predicts too, if there is one.
    """
    count = min(run + 1, len(row))
    accepted = [number < run for number in range(count)]
    # A head predicts for a token once it is fed, so its prediction stands at the step after.
    after: list[float | None] = [] if row.accept_prob is None else [*row.accept_prob[1 : count + 1]]
    after += [None] * (count - len(after))
    known = list(map(float, accepted)) if outcomes is None else outcomes
    return Judged.of(row[:count], accepted, known, range(1, count + 1), after, disco)


def too_short(index: int) -> UsageError:
    """The error for a trace that was recorded for drafts of fewer than ``index`` tokens."""
    return UsageError(
        f"the trace was not recorded for drafts of {index} tokens",
        "record a new one, or replay policies with a smaller max_draft",
    )
