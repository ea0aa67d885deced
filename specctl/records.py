"""Records of generation: rounds and completions. No torch here."""

from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise
from typing import Self


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The target's log-probability of an emitted token, from the softmax at temperature 1 over the logits after token
    rules.

    Temperature and filters do not affect it.
    """

    id: int  # the token's id
    logprob: float  # its log-probability in nats
    # The most probable ids with their log-probabilities, descending, without impossible tokens.
    top: tuple[tuple[int, float], ...] = ()


class StopReason(StrEnum):
    """Why drafting ended in a round."""

    POLICY = "policy"
    MAX_DRAFT = "max_draft"
    BUDGET = "budget"
    EOS = "eos"


class ExtraToken(StrEnum):
    """The origin of the token that the verifier itself adds to a round."""

    CORRECTION = "correction"
    """Drawn from the residual distribution after the first rejection."""
    BONUS = "bonus"
    """Drawn from the verifier after a round whose drafts were all accepted (or that had none)."""


# Never modified, but not frozen either: a frozen dataclass takes four times as long to construct, and a round
# constructs several.
@dataclass(slots=True, unsafe_hash=True)
class DraftStep:
    """One drafted token with the signals a stopping policy may read.

    Signals always come from the draft's softmax at temperature 1 over its raw logits, independent of the sampling
    settings. A signal that no policy reads is None.
    """

    index: int  # 1 for the first token of the round
    token: int  # the drafted token's id
    entropy: float | None = None  # Shannon entropy in nats
    top_prob: float | None = None  # the largest probability
    token_prob: float | None = None  # the drafted token's probability
    accept_prob: float | None = None  # a trained head's acceptance probability for the token fed *before* this one
    # a draft head's or a lookup's acceptance probability for the token drafted *after* this one, if all before it are
    # accepted; known before that token is drawn; 0 where no token can follow
    next_accept_prob: float | None = None
    # a DISCO head's acceptance probability for this token, computed from its distribution and index
    own_accept_prob: float | None = None
    # whether a lookup would copy this token: +L/4 if it is what followed the latest earlier occurrence of the L tokens
    # before it, -L/4 if another token did, 0 without such a match of at least 2 tokens; L is at most 4, and the longest
    # match counts
    agreement: float | None = None


@dataclass(frozen=True, slots=True)
class RoundSummary:
    """The numbers of a round that files and metrics contain."""

    # drafted, accepted: numbers of draft tokens and of accepted ones; for trees see `Round.tree`
    drafted: int
    accepted: int
    stop: StopReason | None  # why drafting ended; None in a round without a draft
    threshold: float | None  # the policy's threshold during the round; None for a policy without one
    # draft_ms, verify_ms: wall time of drafting and of the verifying forward pass with its verdict, in milliseconds
    draft_ms: float
    verify_ms: float
    # in a hierarchy, the rounds in which the draft collected its block from the draft below it
    inner: "tuple[RoundSummary, ...]" = ()
    tree: tuple[int, ...] = ()  # see `Round`
    # Wall time of drafting during the verification; None where drafting and verification alternate.
    overlap_ms: float | None = None
    copied: int = 0  # see `Round`

    @property
    def nodes(self) -> int:
        """See `Round`."""
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
        """A copy with times rounded to microseconds, also in inner rounds."""
        return replace(
            self,
            draft_ms=round(self.draft_ms, 3),
            verify_ms=round(self.verify_ms, 3),
            overlap_ms=None if self.overlap_ms is None else round(self.overlap_ms, 3),
            inner=tuple(inner.rounded() for inner in self.inner),
        )


@dataclass(slots=True, unsafe_hash=True)
class Round:
    """One drafting phase and the verification that ended it."""

    index: int  # 0 for the first round of the sequence; for an inner round, 0 for the first one in its block
    steps: tuple[DraftStep, ...]  # the drafted tokens in order
    accepted: int  # number of drafted tokens that verification accepted
    extra: int | None  # id of the verifier's own token after the accepted ones; None after an accepted end of sequence
    extra_kind: ExtraToken | None  # where ``extra`` comes from; None if ``extra`` is None
    stop: StopReason | None  # why drafting ended; None in a round that drafted nothing because there is no draft
    threshold: float | None = None  # the policy's threshold during the round, if it has one
    # draft_seconds, verify_seconds, total_seconds: wall time of drafting, of the verifying forward pass with its
    # verdict, and of the whole round
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    total_seconds: float = 0.0
    # in a hierarchy, the rounds in which the draft, itself a verifier, collected this round's block from the model
    # below it; each took one forward pass of the draft. An inner round stops with ``budget`` where the block is full.
    inner: tuple["Round", ...] = ()
    # for each accepted token and the first rejected one, the probability that verification accepted it, given all draft
    # tokens of the round and that those before it were accepted. Where tokens are verified one by one this is min(1,
    # p/q), with p and q the verifier's and the draft's probability of the token; in block verification it depends on
    # later tokens too. The verdict is a draw from these probabilities, so learning from either is the same on average.
    # None in greedy decoding.
    chances: tuple[float, ...] | None = None
    # for a tree, the number of verified tokens at each level; empty for a chain. ``steps`` are then the tree's levels,
    # each with the signals that the policy read and the most probable token. ``accepted`` is the length of the accepted
    # path. A chance is the probability that the path goes on: the sum of p over the children of its last token.
    # ``path`` has the ids of the accepted tokens.
    tree: tuple[int, ...] = ()
    path: tuple[int, ...] = ()
    # wall time of drafting during the verification, not counted in ``draft_seconds``; None where drafting and
    # verification alternate. With an overlap the verifier adds a token only after a rejection.
    overlap_seconds: float | None = None
    context: int = 0  # number of tokens of the sequence before the round, prompt included; 0 where unknown
    # how many of the last drafted tokens a chain's lookup copied from the text; 0 without a chain
    copied: int = 0
    logprobs: tuple[TokenLogprobs, ...] | None = None  # for each of the ``emitted`` tokens; None if not requested

    @property
    def drafted(self) -> int:
        return len(self.steps)

    @property
    def nodes(self) -> int:
        """The number of verified tokens: the draft's, or all of a tree."""
        return sum(self.tree) if self.tree else self.drafted

    @property
    def accepted_tokens(self) -> tuple[int, ...]:
        """The accepted tokens."""
        return self.path if self.tree else tuple([step.token for step in self.steps[: self.accepted]])

    @property
    def fully_accepted(self) -> bool:
        """Whether nothing was rejected; a tree may be deeper next to an accepted end of sequence."""
        return self.accepted == len(self.steps) or self.extra is None

    @property
    def rejected(self) -> DraftStep | None:
        """The first rejected token; those after it were discarded with it."""
        return None if self.fully_accepted else self.steps[self.accepted]

    @property
    def emitted(self) -> tuple[int, ...]:
        """The tokens this round adds to the sequence."""
        extra = () if self.extra is None else (self.extra,)
        return (*self.accepted_tokens, *extra) if self.accepted else extra

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


SHOWN = 200  # Characters of a text in the representation of a completion


class FinishReason(StrEnum):
    """Why a completion ended: at an end-of-sequence token or stop string, at the token limit, or by the user."""

    STOP = "stop"
    LENGTH = "length"
    INTERRUPTED = "interrupted"


@dataclass(frozen=True, slots=True)
class CompletionSummary:
    """The data of a finished generation that files and metrics contain; times in milliseconds."""

    prompt_tokens: int  # length of the prompt
    tokens: tuple[int, ...]  # generated ids, an end-of-sequence token included
    text: str  # the decoded tokens without special tokens, the token that ended the text, or a stop string
    finish_reason: FinishReason  # why it ended
    # Time spent on the prompt by all models; where a pass also verifies, only the prompt's share of it.
    prefill_ms: float
    first_token_ms: float  # from the start to the end of the first round
    total_ms: float  # from the start to the last token; where texts share passes, only this text's shares of them
    # verifying forward passes; the first one also reads the prompt, except with a draft head, trees or a recurrent
    # target
    target_forwards: int
    draft_forwards: int  # forward passes of the draft that the target verifies
    rounds: tuple[RoundSummary, ...] = ()  # in order; empty for a peer engine without visible rounds
    # arrival times of tokens, from the start: the end of each round, since a round's tokens arrive together. Empty
    # where unknown, for example in older files.
    arrivals_ms: tuple[float, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()  # for each token; empty if not requested

    @property
    def summary(self) -> "CompletionSummary":
        """Itself, so that it can replace a `Completion`."""
        return self

    @property
    def end_ms(self) -> float:
        """From the start to the last token, including the wait for other texts."""
        return max((self.total_ms, *self.arrivals_ms[-1:]))

    @property
    def tpot_ms(self) -> float | None:
        """Time per output token after the first one. None with fewer than two tokens, or if all came in one round."""
        later = len(self.tokens) - 1
        at_once = len(self.rounds) == 1 or len(self.arrivals_ms) == 1
        return (self.end_ms - self.first_token_ms) / later if later > 0 and not at_once else None

    @property
    def gaps_ms(self) -> tuple[float, ...]:
        """Times between consecutive arrivals of tokens."""
        return tuple(later - earlier for earlier, later in pairwise(self.arrivals_ms))


@dataclass(frozen=True, slots=True, repr=False)
class Completion:
    """One finished generation."""

    prompt: tuple[int, ...]  # ids of the prompt
    seed: int  # the seed of all random draws
    tokens: tuple[int, ...]  # generated ids, an end-of-sequence token included
    text: str  # the decoded tokens without special tokens, the token that ended the text, or a stop string
    finish_reason: FinishReason  # why it ended
    rounds: tuple[Round, ...]  # every round in order
    # wall time spent on the prompt by all models; where a pass also verifies, only the prompt's share of it
    prefill_seconds: float
    # wall time from the prompt's ids to the last token; where texts share passes, only this text's shares of them, so
    # that the times of all texts add up to the run's
    total_seconds: float
    # wall time from the prompt's ids to the end of the first round, including the wait for other texts
    first_token_seconds: float
    # The same for the end of each round; for a peer engine, for each call of its streamer.
    arrivals: tuple[float, ...] = ()

    def __repr__(self) -> str:
        text = self.text if len(self.text) <= SHOWN else f"{self.text[:SHOWN]}..."
        return (
            f"Completion(text={text!r}, finish_reason={self.finish_reason.value!r}, "
            f"{self.prompt_tokens} prompt tokens, {len(self.tokens)} tokens, {len(self.rounds)} rounds, "
            f"{self.total_seconds:.3g} s)"
        )

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt)

    @property
    def logprobs(self) -> tuple[TokenLogprobs, ...]:
        """For each token; empty if not requested."""
        found = [one for round_ in self.rounds for one in round_.logprobs or ()]
        return tuple(found[: len(self.tokens)])

    @property
    def summary(self) -> CompletionSummary:
        """The completion without its prompt's ids, its seed and the tokens of its rounds."""
        rounds = tuple(round_.summary for round_ in self.rounds)
        return CompletionSummary(
            prompt_tokens=self.prompt_tokens,
            tokens=self.tokens,
            text=self.text,
            finish_reason=self.finish_reason,
            prefill_ms=self.prefill_seconds * 1e3,
            first_token_ms=self.first_token_seconds * 1e3,
            total_ms=self.total_seconds * 1e3,
            target_forwards=len(rounds),
            draft_forwards=sum(round_.draft_forwards for round_ in rounds),
            rounds=rounds,
            arrivals_ms=tuple(round(seconds * 1e3, 3) for seconds in self.arrivals),
            logprobs=self.logprobs,
        )
