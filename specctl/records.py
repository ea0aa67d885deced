"""What happened: the facts that the decoding loop hands to everyone else. No torch here."""

from dataclasses import dataclass, field
from enum import StrEnum


class StopReason(StrEnum):
    """Why drafting ended in a round."""

    POLICY = "policy"
    MAX_DRAFT = "max_draft"
    BUDGET = "budget"
    EOS = "eos"


class ExtraToken(StrEnum):
    """Where the token that the verifier itself adds to a round comes from."""

    CORRECTION = "correction"
    """Drawn from the residual distribution after the first rejection."""
    BONUS = "bonus"
    """Drawn from the verifier after a round whose drafts were all accepted (or that had none)."""


class FinishReason(StrEnum):
    """Why a completion ended: at an end-of-sequence token or stop string, or at the token limit."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class DraftStep:
    """One drafted token with the signals a stopping policy may read.

    Signals are taken from the draft's softmax at temperature 1 over its raw logits, whatever the sampling settings;
    a signal that nobody asked for is None.

    Attributes:
        index: 1 for the first token of the round.
        token: the drafted token's id.
        entropy: Shannon entropy in nats.
        top_prob: the largest probability.
        token_prob: the drafted token's probability.
        accept_prob: a trained head's acceptance probability for the token fed *before* this one.
    """

    index: int
    token: int
    entropy: float | None = None
    top_prob: float | None = None
    token_prob: float | None = None
    accept_prob: float | None = None


@dataclass(frozen=True, slots=True)
class Round:
    """One drafting phase and the verification that ended it.

    Attributes:
        index: 0 for the first round of the sequence; of an inner round, 0 for the first in its block.
        steps: the drafted tokens in order.
        accepted: how many of them verification kept.
        extra: the id of the verifier's own token after them; None when an accepted end of sequence made it moot.
        extra_kind: where ``extra`` comes from; None with it.
        stop: why drafting ended; None in a round that drafted nothing because there is no draft.
        threshold: the policy's threshold during the round, if it has one.
        draft_seconds, verify_seconds, total_seconds: wall time of drafting, of the verifying forward pass with its
            verdict, and of the whole round.
        inner: in a hierarchy, the rounds in which the draft, itself a verifier, collected this round's block from the
            model below it; each took one forward pass of the draft. Their ``budget`` is the room left in the block.
        chances: min(1, p/q) of each judged token, the first rejected one included: with what probability it was to be
            kept, p the verifier's and q the draft's probability of it. None when greedy.
    """

    index: int
    steps: tuple[DraftStep, ...]
    accepted: int
    extra: int | None
    extra_kind: ExtraToken | None
    stop: StopReason | None
    threshold: float | None = None
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    total_seconds: float = 0.0
    inner: tuple["Round", ...] = ()
    chances: tuple[float, ...] | None = None

    @property
    def drafted(self) -> int:
        return len(self.steps)

    @property
    def fully_accepted(self) -> bool:
        return self.accepted == len(self.steps)

    @property
    def rejected(self) -> DraftStep | None:
        """The first token that verification refused; the ones after it were never judged."""
        return None if self.fully_accepted else self.steps[self.accepted]

    @property
    def emitted(self) -> tuple[int, ...]:
        """The tokens this round adds to the sequence."""
        kept = tuple(step.token for step in self.steps[: self.accepted])
        return kept if self.extra is None else (*kept, self.extra)


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished generation.

    Attributes:
        prompt: its ids.
        seed: what its draws were seeded with.
        tokens: generated ids, an end-of-sequence token included.
        text: the decoded tokens without special tokens and without a stop string.
        finish_reason: why it ended.
        rounds: every round in order.
        prefill_seconds: wall time spent on the prompt before the first round, by all models.
        total_seconds: wall time from the prompt's ids to the last token.
        first_token_seconds: wall time from the prompt's ids to the end of the first round.
    """

    prompt: tuple[int, ...]
    seed: int
    tokens: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    rounds: tuple[Round, ...] = field(repr=False)
    prefill_seconds: float
    total_seconds: float
    first_token_seconds: float

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt)
