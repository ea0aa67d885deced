"""One draft token out of the draft's logits, with every signal that a stopping policy may read."""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from specctl.decoding.host import argmax, on_host
from specctl.decoding.sampling import Sampling, race, read_signals
from specctl.models.running.foresight import Foresee
from specctl.policies import DISTRIBUTION_SIGNALS, Signal
from specctl.records import DraftStep


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
    """Draft tokens with their signals, on the model's device; None for a signal that was not read.

    All fields have one shape, ``()`` for a single token or ``(n,)``, and the names of `DraftStep`.

    Attributes:
        token: int64.
        entropy, top_prob, token_prob: float32, of the softmax at temperature 1 that the token comes from.
        accept_prob: float32, the predicted acceptance probability of the token fed before this one.
        next_accept_prob: float32, that of the token drafted after this one.
    """

    token: torch.Tensor
    entropy: torch.Tensor | None = None
    top_prob: torch.Tensor | None = None
    token_prob: torch.Tensor | None = None
    accept_prob: torch.Tensor | None = None
    next_accept_prob: torch.Tensor | None = None


def pack(reading: Reading) -> torch.Tensor:  # (..., F)
    """The F fields that were read as one float64 tensor, which holds ids and probabilities alike."""
    values = [value for value in reading if value is not None]
    if reading.token.dim() == 0 and on_host(reading.token):
        return torch.tensor([value.item() for value in values], dtype=torch.float64)
    return torch.stack([value.double() for value in values], dim=-1)


def unpack(values: Sequence[float], fields: Sequence[str]) -> dict[str, float]:
    """The F numbers of one packed token by the names of their fields."""
    return dict(zip(fields, values, strict=True))


def packed_signals(packed: torch.Tensor) -> torch.Tensor:
    """``(..., 3)``, a view: `DISTRIBUTION_SIGNALS` of a packed reading that has all of them."""
    return packed[..., 1 : 1 + len(DISTRIBUTION_SIGNALS)]


def distribution_signals(reading: Reading) -> torch.Tensor:
    """``(..., 3)`` float32: `DISTRIBUTION_SIGNALS` of a reading that has all of them."""
    signals = [value for value in reading[1 : 1 + len(DISTRIBUTION_SIGNALS)] if value is not None]
    return torch.stack(signals, dim=-1)


def fetch(reading: Reading) -> dict[str, float]:
    """A single token's reading on the host, by field, in one transfer where there is a device to wait for."""
    present = {name: value for name, value in zip(reading._fields, reading, strict=True) if value is not None}
    if reading.token.device.type == "cpu":
        return {name: value.item() for name, value in present.items()}
    return unpack(pack(reading).tolist(), list(present))


def fetch_rows(reading: Reading) -> list[dict[str, float]]:
    """The reading of n tokens on the host, by token and field, in one transfer."""
    fields = [name for name, value in zip(reading._fields, reading, strict=True) if value is not None]
    return [unpack(row, fields) for row in pack(reading).tolist()]


def step_of(index: int, numbers: Mapping[str, float], wanted: Set[Signal]) -> DraftStep:
    """A draft token on the host as a record, with the signals wanted."""
    return DraftStep(index, int(numbers["token"]), **{name: numbers[name] for name in wanted})


@dataclass(frozen=True, slots=True)
class Reader:
    """Draws a token and computes signals: tensors in, tensors out, so that it can be compiled or captured.

    Attributes:
        sampling: how the token is drawn.
        wanted: which of `DISTRIBUTION_SIGNALS` to compute.
        predictor: predicts acceptance, on the model's device; None for no prediction.
        foresees: whether to read the draft head's own prediction for the next token.
        laws: whether the distribution is wanted in greedy decoding too.
    """

    sampling: Sampling
    wanted: frozenset[Signal] = frozenset()
    predictor: AcceptancePredictor | None = None
    foresees: bool = False
    laws: bool = False

    @property
    def hidden(self) -> bool:
        """Whether it reads hidden states."""
        return self.predictor is not None

    @property
    def fields(self) -> list[str]:
        """The fields of a reading made with a hidden state where `hidden`, in packed order."""
        signals = [name for name in DISTRIBUTION_SIGNALS if name in self.wanted]
        predictions = {"accept_prob": self.hidden, "next_accept_prob": self.foresees}
        return ["token", *signals, *(name for name, read in predictions.items() if read)]

    def read(
        self,
        logits: torch.Tensor,
        arrivals: torch.Tensor | None,
        hidden: torch.Tensor | None = None,
        previous: torch.Tensor | None = None,
        foresee: Foresee | None = None,
    ) -> tuple[Reading, torch.Tensor | None]:
        """One token with its signals, and the distribution ``(V,)`` that it was drawn from.

        When greedy that is None, or the softmax at temperature 1 where `laws` are wanted.

        Acceptance of the token that was fed is predicted where there are a predictor and its hidden state.

        Args:
            logits: ``(V,)``.
            arrivals: ``(V,)`` float32 from `sampling.arrivals`, the draw's randomness; None when greedy.
            hidden: ``(H,)``, the last hidden state of the token that was fed.
            previous: ``(3,)``, `DISTRIBUTION_SIGNALS` of the step that drew that token, for a predictor that reads
                them.
            foresee: gives the acceptance probability of the token that follows the one drawn.
        """
        probs = None if arrivals is None else self.sampling.probs(logits)  # (V,)
        token = argmax(logits) if probs is None or arrivals is None else race(probs, arrivals)
        signals = read_signals(logits, token, self.wanted, probs, self.sampling)
        accept_prob = None
        if self.predictor is not None and hidden is not None:
            accept_prob = self.predictor.accept_prob(hidden, previous)
        next_accept_prob = foresee(token) if self.foresees and foresee is not None else None
        if self.laws and probs is None:
            probs = logits.float().softmax(-1)
        return Reading(token, **signals, accept_prob=accept_prob, next_accept_prob=next_accept_prob), probs

    def __call__(
        self,
        logits: torch.Tensor,
        arrivals: torch.Tensor | None,
        hidden: torch.Tensor | None = None,
        previous: torch.Tensor | None = None,
        foresee: Foresee | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`read` with the reading packed ``(F,)``: the form that becomes part of a model's pass."""
        reading, probs = self.read(logits, arrivals, hidden, previous, foresee)
        return pack(reading), probs
