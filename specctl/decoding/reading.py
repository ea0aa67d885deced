"""One draft token out of the draft's logits, with every signal that a stopping policy may read."""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

import torch

from specctl.decoding.host import Floats, Softmax, array, picked
from specctl.decoding.sampling import Sampling, pick, read_signals, read_top_probs
from specctl.models.passes.token_reader import Foresee
from specctl.models.predictors.disco_head import DiscoHead
from specctl.policies import DISTRIBUTION_SIGNALS, TOP_PROBS, Signal
from specctl.records import DraftStep

TOP_FIELDS = tuple(f"top_prob_{place}" for place in range(1, TOP_PROBS + 1))
"""Names of the largest probabilities in a reading on the host, from the likeliest down."""


class AcceptancePredictor(Protocol):
    """Predicts whether a draft token will be accepted, as `AcceptanceHead` does.

    Attributes:
        reads_signals: whether it reads the token's own signals too.
    """

    @property
    def reads_signals(self) -> bool: ...

    def accept_prob(self, hidden: torch.Tensor, signals: torch.Tensor | None) -> torch.Tensor:
        """The acceptance probability ``(...)`` of tokens.

        Args:
            hidden: ``(..., H)``, last hidden states of the tokens.
            signals: ``(..., 3)``, `DISTRIBUTION_SIGNALS` of the steps that drew them; None where not read.
        """


class Reading(NamedTuple):
    """n tokens with their signals, on the model's device; None for a signal that was not read.

    All fields but ``top_probs`` are ``(n,)`` and have the names of `DraftStep`.

    Attributes:
        token: int64.
        entropy, top_prob, token_prob: float32, of the softmax at temperature 1 that the token comes from.
        accept_prob: float32, the predicted acceptance probability of the token fed before this one.
        next_accept_prob: float32, that of the token drafted after this one.
        top_probs: ``(n, 10)`` float32, the largest probabilities of that softmax, for a DISCO head.
    """

    token: torch.Tensor
    entropy: torch.Tensor | None = None
    top_prob: torch.Tensor | None = None
    token_prob: torch.Tensor | None = None
    accept_prob: torch.Tensor | None = None
    next_accept_prob: torch.Tensor | None = None
    top_probs: torch.Tensor | None = None


def unpack(values: Sequence[float], fields: Sequence[str]) -> dict[str, float]:
    """The F numbers of one packed token by the names of their fields."""
    return dict(zip(fields, values, strict=True))


def packed_signals(packed: torch.Tensor) -> torch.Tensor:
    """``(3,)``, a view: `DISTRIBUTION_SIGNALS` of a packed reading that has all of them."""
    return packed[1 : 1 + len(DISTRIBUTION_SIGNALS)]


def distribution_signals(reading: Reading) -> torch.Tensor:
    """``(n, 3)`` float32: `DISTRIBUTION_SIGNALS` of a reading that has all of them."""
    signals = [value for value in reading[1 : 1 + len(DISTRIBUTION_SIGNALS)] if value is not None]
    return torch.stack(signals, dim=-1)


def fetch_rows(reading: Reading) -> list[dict[str, float]]:
    """The reading of n tokens on the host, by token and field, in one transfer."""
    present = {name: value for name, value in zip(reading._fields, reading, strict=True) if value is not None}
    tops = present.pop("top_probs", None)
    columns = [value.double()[:, None] for value in present.values()]
    packed = torch.cat(columns if tops is None else [*columns, tops.double()], dim=-1)  # (n, F)
    names = [*present, *(TOP_FIELDS if tops is not None else ())]
    return [unpack(row, names) for row in packed.tolist()]


def own_accept_prob(head: DiscoHead, numbers: Mapping[str, float], index: int) -> float:
    """A DISCO head's acceptance probability of the ``index``-th token of a round, from its numbers on the host."""
    return head.own_accept_prob([numbers[name] for name in TOP_FIELDS], numbers["entropy"], index)


def step_of(index: int, numbers: Mapping[str, float], wanted: Set[Signal]) -> DraftStep:
    """A draft token on the host as a record, with the signals wanted."""
    return DraftStep(index, int(numbers["token"]), **{name: numbers[name] for name in wanted})


@dataclass(frozen=True)
class Reader:
    """Draws a token and computes signals: tensors in, tensors out, so that it can be compiled or captured.

    Attributes:
        sampling: how the token is drawn.
        wanted: which of `DISTRIBUTION_SIGNALS` to compute.
        predictor: predicts acceptance, on the model's device; None for no prediction.
        foresees: whether to read the draft head's own prediction for the next token.
        laws: whether the logits are wanted in greedy decoding.
        tops: whether to read the largest probabilities, which a DISCO head reads with the entropy.
    """

    sampling: Sampling
    wanted: frozenset[Signal] = frozenset()
    predictor: AcceptancePredictor | None = None
    foresees: bool = False
    laws: bool = False
    tops: bool = False

    @property
    def hidden(self) -> bool:
        """Whether it reads hidden states."""
        return self.predictor is not None

    @cached_property
    def fields(self) -> tuple[str, ...]:
        """The F numbers of a reading made with a hidden state where `hidden`, in packed order."""
        signals = [name for name in DISTRIBUTION_SIGNALS if name in self.wanted]
        predictions = {"accept_prob": self.hidden, "next_accept_prob": self.foresees}
        tops = TOP_FIELDS if self.tops else ()
        return ("token", *signals, *(name for name, read in predictions.items() if read), *tops)

    def __call__(
        self,
        logits: torch.Tensor,
        uniform: torch.Tensor | None,
        hidden: torch.Tensor | None = None,
        previous: torch.Tensor | None = None,
        foresee: Foresee | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """One token with its signals, and the distribution ``(V,)`` that it was drawn from.

        When greedy that is None, or the logits in float32 where `laws` are wanted.

        Args:
            logits: ``(V,)``.
            uniform: ``()`` float64 from `sampling.uniforms`, the draw's randomness; None when greedy.
            hidden: ``(H,)``, the last hidden state of the token that was fed; only a predictor needs it.
            previous: ``(3,)``, `DISTRIBUTION_SIGNALS` of the step that drew that token, for a predictor that reads
                them.
            foresee: gives the acceptance probability of the token that follows the one drawn.

        Returns:
            The `fields` as ``(F,)`` float64, which holds ids and probabilities alike, and the distribution.
        """
        probs = None if uniform is None else self.sampling.probs(logits)  # (V,)
        token = logits.argmax() if probs is None or uniform is None else pick(probs, uniform)
        numbers = [token, *read_signals(logits, token, self.wanted, probs, self.sampling).values()]
        if self.predictor is not None and hidden is not None:
            numbers.append(self.predictor.accept_prob(hidden, previous))
        if self.foresees and foresee is not None:
            numbers.append(foresee(token))
        if self.laws and probs is None:
            probs = logits.float()
        packed = torch.stack([number.double() for number in numbers])
        if self.tops:
            packed = torch.cat([packed, read_top_probs(logits).double()])
        return packed, probs

    def read_row(
        self,
        row: Floats,
        uniform: float | None,
        hidden: torch.Tensor | None = None,
        previous: torch.Tensor | None = None,
        foresee: Foresee | None = None,
    ) -> tuple[list[float], Floats | None]:
        """The same of logits ``(V,)`` on the host: the numbers as they are, and few of torch's operations.

        After a model's pass has emptied the processor's caches, each of those takes 30 to 80 microseconds.
        """
        sampling, probs = self.sampling, None
        unfiltered = uniform is not None and not sampling.filters
        softmax = Softmax(row) if self.wanted or self.tops or unfiltered else None
        if uniform is None:
            token = int(row.argmax()) if softmax is None else softmax.best
        else:
            known = softmax.probs(sampling.temperature) if softmax is not None and unfiltered else None
            probs = array(sampling.probs(torch.from_numpy(row))) if known is None else known  # (V,)
            token = picked(probs, uniform)
        numbers: list[float] = [token]
        if softmax is not None:
            numbers += softmax.signals(token, self.wanted)
        if self.predictor is not None and hidden is not None:
            numbers.append(self.predictor.accept_prob(hidden, previous).item())
        if self.foresees and foresee is not None:
            numbers.append(foresee(torch.tensor(token)).item())
        if self.tops and softmax is not None:
            numbers += softmax.tops()
        if self.laws and probs is None:
            probs = row
        return numbers, probs
