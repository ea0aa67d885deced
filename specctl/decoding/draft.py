"""The interface between a drafter and its verifier: drafts, and the `Drafter` protocol."""

from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from specctl.decoding.draws import DrawGenerator
from specctl.models.passes.draft_vocabulary import DraftVocabulary
from specctl.models.passes.forward import Numbers
from specctl.models.passes.watching import States
from specctl.records import DraftStep, Round, StopReason

if TYPE_CHECKING:
    import torch

    from specctl.decoding.sampling import Sampling


# Never modified, but not frozen either: a frozen dataclass takes four times as long to construct, and a round
# constructs several.
@dataclass(slots=True)
class Draft:
    """A block of K draft tokens with the distributions they were drawn from."""

    tokens: list[int]  # K ids
    # ``(K, N)`` float32, or fewer rows where the remaining tokens are one-hot. None where all are one-hot: in greedy
    # decoding, and for copied tokens.
    probs: Numbers | None
    steps: tuple[DraftStep, ...]  # the K tokens with their signals
    stop: StopReason | None  # why drafting ended
    threshold: float | None = None  # the policy's threshold while it drafted
    inner: tuple[Round, ...] = ()  # the rounds of the level below, in a hierarchy
    # for a tree, the index in ``tokens`` of each token's parent, which comes earlier, or -1 for the newest token of the
    # text. The tree's steps are then its levels, not its tokens. None for a chain.
    parents: tuple[int, ...] | None = None
    vocabulary: DraftVocabulary | None = None  # the ids of the N columns of ``probs``; None where columns are ids
    copied: int = 0  # see `Round`
    # The prompt's share of the drafting time, where the first step of a text also read the prompt.
    prompt_seconds: float = 0.0


@dataclass(slots=True, eq=False)
class Drafted:
    """A text's draft, ready to be verified."""

    draft: Draft  # K tokens
    # the text's own, for the acceptance coins: its numbers do not depend on other texts' draws
    generator: DrawGenerator | None
    # ``(K + 1,)``, drawn on a device, where the same verdict may be computed again
    numbers: "torch.Tensor | None" = field(default=None, init=False)


class Drafter(Protocol):
    """Drafts blocks; every token carries the distribution it was drawn from.

    Attributes:
        observed: the number of positions, from the start of the sequence, with known target states; None if it reads
            none.
    """

    @property
    def observed(self) -> int | None: ...

    def begin(self, sampling: "Sampling", eos: Set[int], generator: DrawGenerator | None) -> None:
        """Start a new sequence, leaving the caches alone.

        Args:
            sampling: the verifier's own, because exactness needs both distributions processed alike.
            eos: ids that end the sequence.
            generator: for draws; drafters on other devices derive their own from it.
        """

    def starts(self) -> bool:
        """Whether a new text has to be prefilled, because its first round may have a draft."""
        return True

    def prefill(self, sequence: Sequence[int], *, begins: bool = True, first: bool = True) -> None:
        """Cache all but the last token of the prompt. Without a draft in the next round this may wait until one is
        wanted.

        Args:
            sequence: the prompt.
            begins: whether the text is new rather than continued.
            first: whether this drafter makes the text's next draft for the target. Its first step may then read an
                uncached prompt, and `Draft.prompt_seconds` has the time for that.
        """

    def draft(self, sequence: Sequence[int], budget: int) -> Draft:
        """Draft at most ``budget`` tokens after ``sequence``; the cache may hold any shorter prefix of it."""

    def observe_states(self, start: int, states: States) -> None:  # noqa: ARG002 - most drafters read no states
        """Receive the verifier's states of the positions from ``start`` on, all of tokens that stay in the sequence."""
        return

    def observe(self, round_: Round) -> None:
        """Adapt to the verified round, and roll the caches back to what was accepted."""

    def rests(self) -> int:
        """The number of coming rounds without a draft and without `observe`; states are still observed."""
        return 0

    def rested(self, rounds: int) -> None:  # noqa: ARG002 - as above
        """Count this many rounds of a rest."""
        return

    def rollback(self, length: int) -> None:
        """Forget all but the first ``length`` tokens of the sequence."""
