"""Logits where they are: what numpy's and torch's form have in common, and what is decided on a draft."""

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import isnan
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from specctl.decoding.draft import Drafted
from specctl.decoding.draws import DrawGenerator
from specctl.errors import RecordError
from specctl.models.passes.forward import Foresee, Numbers
from specctl.policies import Signal
from specctl.profile.schema import Verification
from specctl.records import ExtraToken, TokenLogprobs

if TYPE_CHECKING:
    import torch

    from specctl.decoding.logits.token_sampler import TokenSampler
    from specctl.decoding.sampling import Sampling
    from specctl.decoding.trees import DraftTree

TINY = float(np.finfo(np.float32).tiny)
IMPOSSIBLE = -1e9  # The log-probability of what has probability 0 or none at all: such a token is never verified


# They are not changed; frozen ones take four times as long to make, and a round makes several.
@dataclass(slots=True)
class Verdict:
    """How many draft tokens are accepted, and the verifier's own token after them."""

    accepted: int  # n
    # id of the verifier's token; None after a draft that is kept as a whole, where the verifier has read no place after
    # it
    extra: int | None
    kind: ExtraToken | None  # correction after a rejection, else bonus; None where there is no such token
    # of each accepted token and of the first rejected one, see `specctl.records.Round.chances`; None when greedy
    chances: tuple[float, ...] | None = None


def verdict_of(accepted: int, extra: int | None, chances: Sequence[float]) -> Verdict:
    """The verdict on a draft of at least one token, from the chances of all its tokens."""
    if extra is None:
        return Verdict(accepted, None, None, tuple(chances))
    kind = ExtraToken.BONUS if accepted == len(chances) else ExtraToken.CORRECTION
    return Verdict(accepted, extra, kind, tuple(chances[: accepted + 1]))


def not_a_number(*values: float) -> RecordError | None:
    """The error where a verifier computed something that is not a number."""
    if not any(map(isnan, values)):
        return None
    return RecordError(
        "not_a_number",
        "a verifying model computed NaN instead of logits; float16 may be too narrow for it (try dtype bfloat16 or "
        "float32), or its weights are damaged",
    )


def require_numbers(*values: float) -> None:
    """Raise the error of `not_a_number`."""
    if (error := not_a_number(*values)) is not None:
        raise error


def verify_greedy(tokens: Sequence[int], target_choices: Sequence[int]) -> Verdict:
    """The verdict at temperature 0, where both distributions are one-hot: tokens are kept while they are the target's
    argmax.

    Args:
        tokens: the K drafted ids.
        target_choices: the target's argmax at each of them and after the last, K + 1 ids; or K, K > 0, where no token
            is to follow a draft that is kept as a whole.
    """
    accepted = 0
    while accepted < len(tokens) and tokens[accepted] == target_choices[accepted]:
        accepted += 1
    if accepted == len(target_choices):
        return Verdict(accepted, None, None)
    kind = ExtraToken.BONUS if accepted == len(tokens) else ExtraToken.CORRECTION
    return Verdict(accepted, target_choices[accepted], kind)


def kept_in_turn(passing: Sequence[float]) -> list[float]:
    """Of each of K draft tokens, the probability that it is kept, given all K and that those before it are.

    Args:
        passing: of block verification h_1 to h_K, the probabilities that the draft's beginnings pass; see
            `specctl.decoding.logits.host.passing`.
    """
    # Fewer than i tokens are kept if neither these i nor a longer beginning passes: a product from the end.
    fewer = [*accumulate(reversed(passing), lambda failed, chance: failed * (1 - chance), initial=1.0)][:0:-1]
    at_least = [1.0, *(1 - failed for failed in fewer)]  # of 0 to K tokens
    return [kept / before if before else 0.0 for before, kept in pairwise(at_least)]


class Beams(NamedTuple):
    """The distributions at B beams of a tree."""

    ids: list[list[int]]  # of each beam its k likeliest tokens, the likeliest first
    logs: list[list[float]]  # their log-probabilities
    signals: dict[Signal, list[float]]  # each that was read, of the first beam or of all
    tops: list[float]  # the largest probabilities at the first beam, where they were asked for


class Look(NamedTuple):
    """A verifier's own next token after one of a tree's, and the probability that the tree has it; None if greedy."""

    token: int
    chance: float | None


class Logits(Protocol):
    """R rows of V numbers: the logits of a pass, or the distributions that `distributions` makes of them.

    `HostLogits` and `DeviceLogits` are the two forms; with the same numbers and draws both find the same but for
    rounding. Signals are those of the softmax at temperature 1, whatever the sampling.

    Attributes:
        numbers: ``(R, V)``.
    """

    @property
    def numbers(self) -> Numbers: ...

    def part(self, rows: slice) -> "Logits":
        """Some of the rows."""

    def best(self) -> tuple[list[int], list[float]]:
        """The index of each row's largest number, and its value: NaN where a row holds one."""

    def distributions(self, sampling: "Sampling") -> "Logits":
        """The processed distributions, float32; one-hot at the argmax when greedy."""

    def sample(
        self,
        sampler: "TokenSampler",
        uniforms: Sequence[float | None],
        hidden: "torch.Tensor | None" = None,
        previous: "Sequence[float] | torch.Tensor | None" = None,
        foresee: Foresee | None = None,
    ) -> "tuple[list[list[float]] | torch.Tensor, Numbers | None]":
        """A token of each row with its signals, and the distributions ``(R, N)`` they were drawn from; None if greedy.

        Args:
            sampler: what is wanted.
            uniforms: of each row a number in [0, 1), the draw's randomness; None when greedy.
            hidden: ``(H,)``, of a single row the last hidden state of the token that was fed, for a predictor.
            previous: `DISTRIBUTION_SIGNALS` of the step that drew that token, for a predictor that reads them.
            foresee: of a single row, gives the acceptance probability of the token after the one drawn.

        Returns:
            The `TokenSampler.fields` of each row: numbers on the host, or ``(R, F)`` float64 on the device, without
            waiting for it.
        """

    def describe(
        self,
        sampler: "TokenSampler",
        tokens: Sequence[int],
        hidden: "torch.Tensor | None" = None,
        previous: "Sequence[float] | torch.Tensor | None" = None,
    ) -> "tuple[list[list[float]], Sequence[float] | torch.Tensor | None]":
        """The `TokenSampler.fields` of given tokens, n of them after the first n rows, in one transfer.

        Args:
            sampler: what is wanted; nothing is foreseen.
            tokens: n ids, at least one.
            hidden: ``(n, H)`` or more, the last hidden states of the tokens before them, for a predictor.
            previous: `DISTRIBUTION_SIGNALS` of the token before the first, for a predictor that reads them; None where
                there is none.

        Returns:
            The numbers by token, and the signals of the last one for the next call's ``previous``.
        """

    def signals(self, tokens: "Sequence[int] | torch.Tensor", wanted: Set[Signal]) -> "Mapping[Signal, Numbers]":
        """``(R,)`` float32 of each of the `DISTRIBUTION_SIGNALS` wanted, for one token of each row."""

    def logprobs(self, tokens: Sequence[int], most: int) -> tuple[TokenLogprobs, ...]:
        """The log-probabilities of n tokens, one of each of the first n rows, in a single transfer.

        Args:
            tokens: n ids.
            most: how many of the likeliest ids are wanted too.
        """

    def top_probs(self) -> "Numbers":
        """The `specctl.policies.TOP_PROBS` largest probabilities ``(R, TOP_PROBS)``, 0 where V is less."""

    def beams(self, most: int, asked: slice, wanted: Set[Signal], *, tops: bool) -> Beams:
        """What a tree's next level is made of, in a single transfer.

        Args:
            most: how many continuations of each row.
            asked: the rows whose signals are wanted, those of their likeliest token.
            wanted: which signals.
            tops: whether the largest probabilities of the first row are.
        """

    def verdicts(
        self, drafted: Sequence[Drafted], bounds: Sequence[int], verification: Verification = "token"
    ) -> list[Verdict | RecordError]:
        """Of a verifier's distributions: speculative sampling, which keeps a beginning of each draft and draws a token.

        How many tokens are kept is decided token by token or for the draft as a block, see
        `specctl.decoding.logits.host`. At the first token that is not kept the extra token is drawn from
        max(w p - q, 0), normalised, p the target's and q the draft's probabilities there, and w 1 for single tokens;
        after a draft that is kept as a whole, from p. The emitted tokens then follow the target's distribution.

        Args:
            drafted: of B texts, each with K tokens.
            bounds: B + 1 places, between which each text has K + 1 rows; or K > 0, where no token is to follow a draft
                that is kept as a whole.
            verification: which of the two rules.

        Returns:
            The verdicts, and an error where a text's distributions hold NaN.
        """

    def look(self, tree: "DraftTree", sampling: "Sampling", generator: DrawGenerator | None) -> Callable[[int], Look]:
        """A draw from a verifier's distribution at each token of a tree, by the token's number.

        One number is drawn for each depth, since one token of it is looked at.
        """


def array(numbers: Numbers) -> npt.NDArray[np.float32]:
    """Numbers as a float32 array on the host: of the same memory, if it is one already."""
    if isinstance(numbers, np.ndarray):
        return numbers
    found: npt.NDArray[np.float32] = (numbers.detach() if numbers.requires_grad else numbers).float().cpu().numpy()
    return found


def token_logprobs(token: int, log: float, ids: Sequence[int], logs: Sequence[float]) -> TokenLogprobs:
    """Of one token and the likeliest ids, without those that cannot follow."""
    top = zip(ids, logs, strict=True)
    return TokenLogprobs(token, log, tuple((one, value) for one, value in top if value > IMPOSSIBLE))
