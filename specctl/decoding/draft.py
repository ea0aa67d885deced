"""Who drafts for a verifier, and what it hands over."""

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


# They are not changed; frozen ones take four times as long to make, and a round makes several.
@dataclass(slots=True)
class Draft:
    """A block of K draft tokens with the distributions they were drawn from."""

    tokens: list[int]  # K ids
    # ``(K, N)`` float32, or fewer rows: the tokens after them are one-hot. None where each is one-hot at its token:
    # when greedy, and of tokens that were copied.
    probs: Numbers | None
    steps: tuple[DraftStep, ...]  # the K tokens with their signals
    stop: StopReason | None  # why drafting ended
    threshold: float | None = None  # the policy's threshold while it drafted
    inner: tuple[Round, ...] = ()  # the rounds of the level below, in a hierarchy
    # of a tree, the number of each token's parent among ``tokens``, an earlier one, or -1 for the newest token of the
    # text. The tree's steps are then its levels, not its tokens. None for a chain.
    parents: tuple[int, ...] | None = None
    vocabulary: DraftVocabulary | None = None  # the ids of the N columns of ``probs``; None where a column is an id
    copied: int = 0  # see `Round`
    prompt_seconds: float = 0.0  # of what drafting took, the prompt's share where the first step of a text read it too


@dataclass(slots=True, eq=False)
class Drafted:
    """A text's draft to be verified."""

    draft: Draft  # K tokens
    # the text's own, for the coins, so that its numbers do not depend on what others draw
    generator: DrawGenerator | None
    # ``(K + 1,)`` that were drawn on a device, where a verdict may be asked for again
    numbers: "torch.Tensor | None" = field(default=None, init=False)


class Drafter(Protocol):
    """Drafts blocks; every token carries the distribution it was drawn from.

    Attributes:
        observed: the places, from the start of the sequence on, whose states it was given; None if it reads none.
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
        """Whether a text that begins has to be prefilled, since its first round may have a draft."""
        return True

    def prefill(self, sequence: Sequence[int], *, begins: bool = True, first: bool = True) -> None:
        """Cache all but the last token of the prompt, unless no draft is wanted next: that may wait until one is.

        Args:
            sequence: the prompt.
            begins: whether a text begins, rather than goes on.
            first: whether the text's next draft is this one's for the target: then its first step may read a prompt of
                which nothing is cached, and `Draft.prompt_seconds` shows what that took.
        """

    def draft(self, sequence: Sequence[int], budget: int) -> Draft:
        """Draft at most ``budget`` tokens after ``sequence``; the cache may hold any shorter prefix of it."""

    def observe_states(self, start: int, states: States) -> None:  # noqa: ARG002 - most read none
        """Take the verifier's states of places from ``start`` on, all of them of tokens that stay in the sequence."""
        return

    def observe(self, round_: Round) -> None:
        """Adapt to the verified round, and roll the caches back to what was accepted."""

    def rests(self) -> int:
        """For how many rounds it drafts nothing from now on and needs no `observe`; it still observes states."""
        return 0

    def rested(self, rounds: int) -> None:  # noqa: ARG002 - as above
        """This many of these rounds went by."""
        return

    def rollback(self, length: int) -> None:
        """Forget all but the first ``length`` tokens of the sequence."""
