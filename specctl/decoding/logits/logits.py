"""Logits and where they live: the interface of numpy's and torch's form, and the verdicts on drafts."""

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
IMPOSSIBLE = -1e9  # Log-probability of a token with probability 0 or none; verification never accepts it


# Never modified, but not frozen either: a frozen dataclass takes four times as long to construct, and a round
# constructs several.
@dataclass(slots=True)
class Verdict:
    """How many draft tokens are accepted, and the verifier's own token after them."""

    accepted: int  # n
    # id of the verifier's token; None after a fully accepted draft if the verifier has not read the position after it
    extra: int | None
    kind: ExtraToken | None  # correction after a rejection, else bonus; None without such a token
    # for each accepted token and the first rejected one, see `specctl.records.Round.chances`; None when greedy
    chances: tuple[float, ...] | None = None


def verdict_of(accepted: int, extra: int | None, chances: Sequence[float]) -> Verdict:
    """The verdict on a non-empty draft, from the chances of all its tokens."""
    if extra is None:
        return Verdict(accepted, None, None, tuple(chances))
    kind = ExtraToken.BONUS if accepted == len(chances) else ExtraToken.CORRECTION
    return Verdict(accepted, extra, kind, tuple(chances[: accepted + 1]))


def not_a_number(*values: float) -> RecordError | None:
    """The error for a verifier that computed NaN."""
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
    """The verdict at temperature 0, with one-hot distributions: tokens are accepted while they equal the target's
    argmax.

    Args:
        tokens: the K drafted ids.
        target_choices: the target's argmax at each of them and after the last, K + 1 ids; or K, K > 0, where no token
            is to follow a fully accepted draft.
    """
    accepted = 0
    while accepted < len(tokens) and tokens[accepted] == target_choices[accepted]:
        accepted += 1
    if accepted == len(target_choices):
        return Verdict(accepted, None, None)
    kind = ExtraToken.BONUS if accepted == len(tokens) else ExtraToken.CORRECTION
    return Verdict(accepted, target_choices[accepted], kind)


def kept_in_turn(passing: Sequence[float]) -> list[float]:
    """For each of K draft tokens the probability of acceptance, given all K and that those before it are accepted.

    Args:
        passing: block verification's h_1 to h_K, the probabilities that the draft's prefixes pass; see
            `specctl.decoding.logits.host.passing`.
    """
    # Fewer than i tokens are accepted if neither this prefix nor a longer one passes: a product taken from the end.
    fewer = [*accumulate(reversed(passing), lambda failed, chance: failed * (1 - chance), initial=1.0)][:0:-1]
    at_least = [1.0, *(1 - failed for failed in fewer)]  # probability of at least 0 to K tokens
    return [kept / before if before else 0.0 for before, kept in pairwise(at_least)]


class Beams(NamedTuple):
    """The distributions at B beams of a tree."""

    ids: list[list[int]]  # for each beam its k most probable tokens, the most probable first
    logs: list[list[float]]  # their log-probabilities
    signals: dict[Signal, list[float]]  # each signal that was read, for the first beam or for all
    tops: list[float]  # the largest probabilities at the first beam, if wanted


class Look(NamedTuple):
    """A verifier's own token after a tree node, and the probability that a child of the node has it; None if greedy."""

    token: int
    chance: float | None


class Logits(Protocol):
    """R rows of V numbers: a pass's logits, or the distributions that `distributions` computes from them.

    `HostLogits` and `DeviceLogits` are the two forms. Given the same numbers and draws they agree up to rounding.
    Signals are those of the softmax at temperature 1, whatever the sampling.

    Attributes:
        numbers: ``(R, V)``.
    """

    @property
    def numbers(self) -> Numbers: ...

    def part(self, rows: slice) -> "Logits":
        """Some of the rows."""

    def best(self) -> tuple[list[int], list[float]]:
        """The index and the value of each row's largest number; the value is NaN where a row holds one."""

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
        """A token for each row with its signals, and the distributions ``(R, N)`` that they were drawn from; None if
        greedy.

        Args:
            sampler: what to compute.
            uniforms: for each row a number in [0, 1), the draw's randomness; None when greedy.
            hidden: for a single row, ``(H,)``: the last hidden state of the token that was fed, for a predictor.
            previous: `DISTRIBUTION_SIGNALS` of the step that drew that token, for a predictor that reads them.
            foresee: for a single row, returns the acceptance probability of the token after the one drawn.

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
        """The `TokenSampler.fields` of n given tokens, predicted by the first n rows, in one transfer.

        Args:
            sampler: what to compute, without ``foresees``.
            tokens: n ids, at least one.
            hidden: ``(n, H)`` or more, the last hidden states of the tokens before them, for a predictor.
            previous: `DISTRIBUTION_SIGNALS` of the token before the first, for a predictor that reads them; None where
                there is none.

        Returns:
            The numbers by token, and the signals of the last one for the next call's ``previous``.
        """

    def signals(self, tokens: "Sequence[int] | torch.Tensor", wanted: Set[Signal]) -> "Mapping[Signal, Numbers]":
        """The wanted `DISTRIBUTION_SIGNALS` for one token per row, ``(R,)`` float32 each."""

    def logprobs(self, tokens: Sequence[int], most: int) -> tuple[TokenLogprobs, ...]:
        """The log-probabilities of n tokens, one in each of the first n rows, in a single transfer.

        Args:
            tokens: n ids.
            most: how many of the most probable ids to return too.
        """

    def top_probs(self) -> "Numbers":
        """The `specctl.policies.TOP_PROBS` largest probabilities ``(R, TOP_PROBS)``, 0 where V is less."""

    def beams(self, most: int, asked: slice, wanted: Set[Signal], *, tops: bool) -> Beams:
        """The data for a tree's next level, in a single transfer.

        Args:
            most: the number of continuations of each row.
            asked: the rows to read signals for, each at its most probable token.
            wanted: which signals.
            tops: whether to read the largest probabilities of the first row.
        """

    def verdicts(
        self, drafted: Sequence[Drafted], bounds: Sequence[int], verification: Verification = "token"
    ) -> list[Verdict | RecordError]:
        """Speculative sampling from the verifier's distributions: accepts a prefix of each draft and draws an extra
        token.

        Tokens are accepted one by one, or the draft is verified as a block; see `specctl.decoding.logits.host`. At the
        first rejected token the extra token is drawn from max(w p - q, 0), normalised: p and q are the verifier's and
        the draft's probabilities there, and w is 1 token by token. After a fully accepted draft it is drawn from p. The
        emitted tokens then follow the verifier's distribution.

        Args:
            drafted: the drafts of B texts, each with its own K tokens.
            bounds: B + 1 row offsets. Each text has K + 1 rows between two of them, or K > 0 rows where no token is to
                follow a fully accepted draft.
            verification: which of the two rules.

        Returns:
            The verdicts, and an error where a text's distributions hold NaN.
        """

    def look(self, tree: "DraftTree", sampling: "Sampling", generator: DrawGenerator | None) -> Callable[[int], Look]:
        """Returns a function that draws the verifier's token at a tree node, by the node's number.

        One number is drawn per depth, since only one node of each depth is visited.
        """


def array(numbers: Numbers) -> npt.NDArray[np.float32]:
    """Numbers as a float32 array on the host, without a copy where they already are one."""
    if isinstance(numbers, np.ndarray):
        return numbers
    found: npt.NDArray[np.float32] = (numbers.detach() if numbers.requires_grad else numbers).float().cpu().numpy()
    return found


def token_logprobs(token: int, log: float, ids: Sequence[int], logs: Sequence[float]) -> TokenLogprobs:
    """The log-probabilities of one token and of the most probable ids, without impossible ones."""
    top = zip(ids, logs, strict=True)
    return TokenLogprobs(token, log, tuple((one, value) for one, value in top if value > IMPOSSIBLE))
