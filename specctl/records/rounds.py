"""What happened in each round: the records that decoding passes to other modules. No torch here."""

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Self


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """What the target's softmax at temperature 1 gives an emitted token, of logits that follow the token rules.

    Temperature and filters leave it as it is.

    Attributes:
        id: of the token.
        logprob: its log-probability in nats.
        top: the likeliest ids with theirs, falling; none of them that cannot follow.
    """

    id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


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


# Nobody changes these; frozen ones take four times as long to make, and a round makes several.
@dataclass(slots=True, unsafe_hash=True)
class DraftStep:
    """One drafted token with the signals a stopping policy may read.

    Signals are taken from the draft's softmax at temperature 1 over its raw logits, whatever the sampling settings;
    a signal that no policy reads is None.

    Attributes:
        index: 1 for the first token of the round.
        token: the drafted token's id.
        entropy: Shannon entropy in nats.
        top_prob: the largest probability.
        token_prob: the drafted token's probability.
        accept_prob: a trained head's acceptance probability for the token fed *before* this one.
        next_accept_prob: a draft head's or a lookup's acceptance probability for the token drafted *after* this one, if
            all before it are accepted, known before it is drawn; 0 where none can follow.
        own_accept_prob: a DISCO head's acceptance probability for this token, told from its distribution and index.
        agreement: whether a lookup would copy this token: +L/4 if it is what followed the latest earlier occurrence of
            the L tokens before it, -L/4 if another token did, 0 without such a match of at least 2 tokens; L is at
            most 4, and the longest match counts.
    """

    index: int
    token: int
    entropy: float | None = None
    top_prob: float | None = None
    token_prob: float | None = None
    accept_prob: float | None = None
    next_accept_prob: float | None = None
    own_accept_prob: float | None = None
    agreement: float | None = None


@dataclass(frozen=True, slots=True)
class RoundSummary:
    """The numbers of a round that files and metrics contain.

    Attributes:
        drafted, accepted: number of draft tokens, and of accepted ones; of a tree, see `Round.tree`.
        stop: why drafting ended; None in a round without a draft.
        threshold: the policy's threshold during the round; None for a policy without one.
        draft_ms, verify_ms: wall time of drafting and of the verifying forward pass with its verdict, in milliseconds.
        inner: in a hierarchy, the rounds in which the draft collected its block from the draft below it.
        tree: as in `Round`.
        overlap_ms: wall time of drafting during the verification; None where the two take turns.
        copied: as in `Round`.
    """

    drafted: int
    accepted: int
    stop: StopReason | None
    threshold: float | None
    draft_ms: float
    verify_ms: float
    inner: "tuple[RoundSummary, ...]" = ()
    tree: tuple[int, ...] = ()
    overlap_ms: float | None = None
    copied: int = 0

    @property
    def nodes(self) -> int:
        """As in `Round`."""
        return sum(self.tree) if self.tree else self.drafted

    @property
    def draft_forwards(self) -> int:
        """Forward passes of the draft: one for each inner round in a hierarchy, else for each token or level."""
        return len(self.inner) or self.drafted - self.copied

    @property
    def accepted_copies(self) -> int:
        """How many of the `copied` tokens were accepted."""
        return max(0, self.accepted - (self.drafted - self.copied))

    def rounded(self) -> Self:
        """A copy with times rounded to microseconds, in inner rounds too."""
        return replace(
            self,
            draft_ms=round(self.draft_ms, 3),
            verify_ms=round(self.verify_ms, 3),
            overlap_ms=None if self.overlap_ms is None else round(self.overlap_ms, 3),
            inner=tuple(inner.rounded() for inner in self.inner),
        )


@dataclass(slots=True, unsafe_hash=True)
class Round:
    """One drafting phase and the verification that ended it.

    Attributes:
        index: 0 for the first round of the sequence; of an inner round, 0 for the first in its block.
        steps: the drafted tokens in order.
        accepted: number of drafted tokens that verification accepted.
        extra: id of the verifier's own token after those that stay; None after an accepted end of sequence.
        extra_kind: where ``extra`` comes from; None if ``extra`` is None.
        stop: why drafting ended; None in a round that drafted nothing because there is no draft.
        threshold: the policy's threshold during the round, if it has one.
        draft_seconds, verify_seconds, total_seconds: wall time of drafting, of the verifying forward pass with its
            verdict, and of the whole round.
        inner: in a hierarchy, the rounds in which the draft, itself a verifier, collected this round's block from the
            model below it; each took one forward pass of the draft. An inner round stops with ``budget`` where the
            block is full.
        chances: of each accepted token and of the first rejected one, the probability that verification accepted it,
            given all draft tokens of the round and that those before it were accepted. Where tokens are verified one
            by one that is min(1, p/q), p and q the verifier's and the draft's probability of the token; in block
            verification later tokens count too. The verdict is a draw from it either way, so whoever learns from
            either learns the same on average. None in greedy decoding.
        tree: of a tree that was grown level by level, how many tokens of each level were verified; empty for a chain.
            The steps are its levels, each with the law that the policy was asked about and the likeliest token there;
            ``accepted`` is the length of the path that stays, of whichever tokens; and a chance is that the path goes
            on, the sum of p over the tokens below its last one. ``path`` are the ids of the accepted tokens.
        overlap_seconds: wall time of drafting during the verification, beyond which it took ``draft_seconds``; None
            where the two take turns. With an overlap the verifier adds a token only after a rejection.
        context: tokens of the sequence before the round, the prompt's included; 0 where it is not known.
        copied: how many of the drafted tokens, the last ones, the lookup of a chain copied from the text; 0 without a
            chain.
        logprobs: of each of the ``emitted`` tokens; None where nobody asks.
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
    tree: tuple[int, ...] = ()
    path: tuple[int, ...] = ()
    overlap_seconds: float | None = None
    context: int = 0
    copied: int = 0
    logprobs: tuple[TokenLogprobs, ...] | None = None

    @property
    def drafted(self) -> int:
        return len(self.steps)

    @property
    def nodes(self) -> int:
        """Tokens that were verified: the draft's, or all of a tree."""
        return sum(self.tree) if self.tree else self.drafted

    @property
    def kept_tokens(self) -> tuple[int, ...]:
        """The accepted tokens."""
        return self.path if self.tree else tuple([step.token for step in self.steps[: self.accepted]])

    @property
    def fully_accepted(self) -> bool:
        """Whether nothing was rejected; beside an accepted end of sequence a tree may be deeper."""
        return self.accepted == len(self.steps) or self.extra is None

    @property
    def rejected(self) -> DraftStep | None:
        """The first token that verification did not keep; those after it were discarded with it."""
        return None if self.fully_accepted else self.steps[self.accepted]

    @property
    def emitted(self) -> tuple[int, ...]:
        """The tokens this round adds to the sequence."""
        return self.kept_tokens if self.extra is None else (*self.kept_tokens, self.extra)

    @property
    def summary(self) -> RoundSummary:
        """The round without its tokens."""
        return RoundSummary(
            self.drafted,
            self.accepted,
            self.stop,
            self.threshold,
            self.draft_seconds * 1e3,
            self.verify_seconds * 1e3,
            tuple(inner.summary for inner in self.inner),
            self.tree,
            None if self.overlap_seconds is None else self.overlap_seconds * 1e3,
            self.copied,
        )
