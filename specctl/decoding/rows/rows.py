"""The one seam between numpy and torch: rows of numbers over the vocabulary, read and judged where they are."""

from collections.abc import Callable, Mapping, Sequence, Set
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from specctl.decoding.beams import IMPOSSIBLE
from specctl.decoding.rows.draft_verdict import Verdict
from specctl.decoding.rows.draws import DrawGenerator
from specctl.decoding.rows.reading import Reader
from specctl.decoding.sampling import Sampling
from specctl.models.passes.draft_vocabulary import DraftVocabulary
from specctl.models.passes.forward import Numbers
from specctl.models.passes.token_reader import Foresee
from specctl.policies import Signal
from specctl.profile.schema import Verification
from specctl.records import TokenLogprobs

if TYPE_CHECKING:
    import torch

    from specctl.decoding.rows.host_laws import Floats
    from specctl.decoding.rows.tree_verification import DraftTree


class Beams(NamedTuple):
    """The laws at B beams of a tree.

    Attributes:
        ids: of each beam its k likeliest tokens, the likeliest first.
        logs: their log-probabilities.
        signals: each that was read, of the first beam or of all.
        tops: the largest probabilities at the first beam, where they were asked for.
    """

    ids: list[list[int]]
    logs: list[list[float]]
    signals: dict[Signal, list[float]]
    tops: list[float]


class Look(NamedTuple):
    """A verifier's own next token after one of a tree's, and the probability that the tree has it; None if greedy."""

    token: int
    chance: float | None


class Rows(Protocol):
    """R rows of V numbers: the logits of a pass, or the laws that `laws` makes of them.

    `HostRows` and `DeviceRows` are the two forms; with the same numbers and draws both find the same but for rounding.
    What is asked of logits reads the softmax at temperature 1 for signals, whatever the sampling.

    Attributes:
        numbers: ``(R, V)``.
    """

    @property
    def numbers(self) -> Numbers: ...

    def part(self, rows: slice) -> "Rows":
        """Some of the rows."""

    def best(self) -> tuple[list[int], list[float]]:
        """The index of each row's largest number, and its value: NaN where a row holds one."""

    def laws(self, sampling: Sampling) -> "Rows":
        """Of logits: the processed distributions, float32; one-hot at the argmax when greedy."""

    def read(
        self,
        reader: Reader,
        uniform: float | None,
        hidden: "torch.Tensor | None" = None,
        previous: "Sequence[float] | torch.Tensor | None" = None,
        foresee: Foresee | None = None,
    ) -> "tuple[list[float] | torch.Tensor, Numbers | None]":
        """Of logits: one token drawn from the first row, with its signals, and the law ``(N,)`` it was drawn from.

        When greedy the law is None.

        Args:
            reader: what is wanted.
            uniform: in [0, 1), the draw's randomness; None when greedy.
            hidden: ``(H,)``, the last hidden state of the token that was fed; only a predictor needs it.
            previous: `DISTRIBUTION_SIGNALS` of the step that drew that token, for a predictor that reads them.
            foresee: gives the acceptance probability of the token that follows the one drawn.

        Returns:
            The `Reader.fields`: numbers on the host, or ``(F,)`` float64 on the device, not waited for.
        """

    def read_tokens(
        self,
        reader: Reader,
        tokens: Sequence[int],
        hidden: "torch.Tensor | None" = None,
        previous: "Sequence[float] | torch.Tensor | None" = None,
    ) -> "tuple[list[list[float]], Sequence[float] | torch.Tensor | None]":
        """Of logits: the `Reader.fields` of given tokens, n of them behind the first n rows, in one transfer.

        Args:
            reader: what is wanted; nothing is foreseen.
            tokens: n ids, at least one.
            hidden: ``(n, H)`` or more, the last hidden states of the tokens before them, for a predictor.
            previous: `DISTRIBUTION_SIGNALS` of the token before the first, for a predictor that reads them; None where
                there is none.

        Returns:
            The numbers by token, and the signals of the last one for the next call's ``previous``.
        """

    def signals(self, tokens: "Sequence[int] | torch.Tensor", wanted: Set[Signal]) -> "Mapping[Signal, Numbers]":
        """Of logits: ``(R,)`` float32 of each of the `DISTRIBUTION_SIGNALS` wanted, for one token of each row."""

    def logprobs(self, tokens: Sequence[int], most: int) -> tuple[TokenLogprobs, ...]:
        """Of logits: the log-probabilities of n tokens, one of each of the first n rows, in a single transfer.

        Args:
            tokens: n ids.
            most: how many of the likeliest ids are wanted too.
        """

    def top_probs(self) -> "Numbers":
        """Of logits: the `specctl.policies.TOP_PROBS` largest probabilities ``(R, TOP_PROBS)``, 0 where V is less."""

    def beams(self, most: int, asked: slice, wanted: Set[Signal], *, tops: bool) -> Beams:
        """Of logits: what a tree's next level is made of, in a single transfer.

        Args:
            most: how many continuations of each row.
            asked: the rows whose signals are wanted, those of their likeliest token.
            wanted: which signals.
            tops: whether the largest probabilities of the first row are.
        """

    def draws(self, count: int, generator: DrawGenerator | None) -> "Sequence[float] | torch.Tensor":
        """Numbers in [0, 1), float64, where the rows are."""

    def verify(
        self,
        tokens: "Sequence[int] | torch.Tensor",
        draft_probs: Numbers | None,
        generator: DrawGenerator | None,
        verification: Verification = "token",
        vocabulary: DraftVocabulary | None = None,
    ) -> Verdict:
        """Of a verifier's laws: speculative sampling, which keeps a beginning of a draft and draws one token after it.

        How many tokens are kept is decided token by token or for the draft as a block, see
        `specctl.decoding.rows.host_verdict`. At the first token that is not kept the extra token is drawn from
        max(w p - q, 0), normalised, p the target's and q the draft's probabilities there, and w 1 for single tokens;
        after a draft that is kept as a whole, from p. The emitted tokens then follow the target's distribution.

        There is a row for each of the K tokens and for the place behind; or K > 0 rows, where no token is to follow a
        draft that is kept as a whole.

        Args:
            tokens: K ids, drawn from ``draft_probs``.
            draft_probs: ``(K, N)`` float32, the very distributions the tokens were drawn from, wherever they are; with
                fewer rows those of the tokens behind are one-hot, and with None all are.
            generator: for rows of this place.
            verification: which of the two rules.
            vocabulary: the ids of the N columns, the others' probability being 0; None where a column is an id.

        Raises:
            RecordError: the laws hold NaN.
        """

    def look(self, tree: "DraftTree", sampling: Sampling, generator: DrawGenerator | None) -> Callable[[int], Look]:
        """Of a verifier's logits: a draw from its law at each token of a tree, by the token's number.

        One number is drawn for each depth, since one token of it is looked at.
        """


def array(numbers: Numbers) -> "Floats":
    """Numbers as a float32 array on the host: of the same memory, if it is one already."""
    if isinstance(numbers, np.ndarray):
        return numbers
    found: Floats = (numbers.detach() if numbers.requires_grad else numbers).float().cpu().numpy()
    return found


def token_logprobs(token: int, log: float, ids: Sequence[int], logs: Sequence[float]) -> TokenLogprobs:
    """Of one token and the likeliest ids, without those that cannot follow."""
    top = zip(ids, logs, strict=True)
    return TokenLogprobs(token, log, tuple((one, value) for one, value in top if value > IMPOSSIBLE))
