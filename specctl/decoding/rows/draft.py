"""What a drafter hands to a verifier."""

from collections.abc import Sequence
from dataclasses import dataclass

from specctl.models.passes.draft_vocabulary import DraftVocabulary
from specctl.models.passes.forward import Numbers
from specctl.records import DraftStep, Round, StopReason


# Nobody changes these; frozen ones take four times as long to make, and a round makes several.
@dataclass(slots=True)
class Draft:
    """A block of K draft tokens with the distributions they were drawn from.

    Attributes:
        tokens: K ids.
        probs: ``(K, N)`` float32, or fewer rows: the tokens behind them are one-hot. None where each is one-hot at its
            token: when greedy, and of tokens that were copied.
        steps: the K tokens with their signals.
        stop: why drafting ended.
        threshold: the policy's threshold while it drafted.
        inner: the rounds of the level below, in a hierarchy.
        laws: ``(K, N)`` float32, the draft's distribution behind each token: ``probs``, or in greedy decoding the
            softmax at temperature 1; None if they are not kept.
        leaves: beside each token, other ids to be verified in its place; empty without any.
        parents: of a tree, the number of each token's parent among ``tokens``, an earlier one, or -1 for the newest
            token of the text. The tree's steps are then its levels, not its tokens. None for a chain.
        vocabulary: the ids of the N columns of ``probs`` and ``laws``; None where a column is an id.
        copied: as of `Round`.
    """

    tokens: list[int]
    probs: Numbers | None
    steps: tuple[DraftStep, ...]
    stop: StopReason | None
    threshold: float | None = None
    inner: tuple[Round, ...] = ()
    laws: Numbers | None = None
    leaves: tuple[tuple[int, ...], ...] = ()
    parents: tuple[int, ...] | None = None
    vocabulary: DraftVocabulary | None = None
    copied: int = 0

    @classmethod
    def of(
        cls,
        steps: Sequence[DraftStep],
        laws: Numbers | None,
        stop: StopReason,
        threshold: float | None,
        inner: Sequence[Round] = (),
        *,
        greedy: bool,
        keeps_laws: bool,
        vocabulary: DraftVocabulary | None = None,
    ) -> "Draft":
        """A draft of K tokens that were drawn from their laws ``(K, N)``, or when greedy are the likeliest there.

        Args:
            steps, laws, stop, threshold, inner, vocabulary: as in the attributes.
            greedy: whether each token was certain.
            keeps_laws: whether the draft keeps its laws.
        """
        return cls(
            [step.token for step in steps],
            None if greedy else laws,
            tuple(steps),
            stop,
            threshold,
            tuple(inner),
            laws if keeps_laws else None,
            vocabulary=vocabulary,
        )
