"""What was generated for one prompt. No torch here."""

from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

from specctl.records.rounds import Round, RoundSummary, TokenLogprobs

SHOWN = 200
"""Characters of a text that a completion shows of itself."""


class FinishReason(StrEnum):
    """Why a completion ended: at an end-of-sequence token or stop string, at the token limit, or by the user."""

    STOP = "stop"
    LENGTH = "length"
    INTERRUPTED = "interrupted"


@dataclass(frozen=True, slots=True)
class CompletionSummary:
    """The data of a finished generation that files and metrics contain; times in milliseconds.

    Attributes:
        prompt_tokens: length of the prompt.
        tokens: generated ids, an end-of-sequence token included.
        text: the decoded tokens without special tokens, the token that ended the text, and a stop string.
        finish_reason: why it ended.
        prefill_ms: time spent on the prompt by all models; of a pass that verifies too, the share of the prompt.
        first_token_ms: from the start to the end of the first round.
        total_ms: from the start to the last token; of a text that shares passes with others, its shares of them.
        target_forwards: verifying forward passes; the first reads the prompt too, but with a draft head, trees
            or a recurrent target.
        draft_forwards: forward passes of the draft that the target verifies.
        rounds: in order; empty for a peer, whose rounds are not visible.
        arrivals_ms: when tokens arrived, from the start: the end of each round, whose tokens arrive together. Empty
            where that is not known, as in files of specctl before it recorded this.
        logprobs: of each token; empty where nobody asked.
    """

    prompt_tokens: int
    tokens: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    prefill_ms: float
    first_token_ms: float
    total_ms: float
    target_forwards: int
    draft_forwards: int
    rounds: tuple[RoundSummary, ...] = ()
    arrivals_ms: tuple[float, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()

    @property
    def summary(self) -> "CompletionSummary":
        """Itself: wherever a `Completion` has one, this may stand for it."""
        return self

    @property
    def end_ms(self) -> float:
        """From the start to the last token, waiting for other texts included."""
        return max((self.total_ms, *self.arrivals_ms[-1:]))

    @property
    def tpot_ms(self) -> float | None:
        """Time per output token after the first one; None where there is no such time: with fewer than two tokens, and
        where all of them came in one round."""
        later = len(self.tokens) - 1
        at_once = len(self.rounds) == 1 or len(self.arrivals_ms) == 1
        return (self.end_ms - self.first_token_ms) / later if later > 0 and not at_once else None

    @property
    def gaps_ms(self) -> tuple[float, ...]:
        """Times between one arrival of tokens and the next."""
        return tuple(later - earlier for earlier, later in pairwise(self.arrivals_ms))


@dataclass(frozen=True, slots=True, repr=False)
class Completion:
    """One finished generation.

    Attributes:
        prompt: ids of the prompt.
        seed: of all random draws.
        tokens: generated ids, an end-of-sequence token included.
        text: the decoded tokens without special tokens, the token that ended the text, and a stop string.
        finish_reason: why it ended.
        rounds: every round in order.
        prefill_seconds: wall time spent on the prompt by all models; of a pass that verifies too, the prompt's share.
        total_seconds: wall time from the prompt's ids to the last token; of a text that shares passes with others, its
            shares of them, so that the times of all add up to that of the run.
        first_token_seconds: wall time from the prompt's ids to the end of the first round, waiting for others included.
        arrivals: the same for the end of each round; of a peer, for each call of its streamer.
    """

    prompt: tuple[int, ...]
    seed: int
    tokens: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    rounds: tuple[Round, ...]
    prefill_seconds: float
    total_seconds: float
    first_token_seconds: float
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
        """Of each token; empty where nobody asked."""
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
