"""What is sampled with a draft token: every signal that a stopping policy may read."""

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Protocol

from specctl.decoding.sampling import Sampling
from specctl.models.passes.draft_vocabulary import DraftVocabulary
from specctl.models.passes.forward import Foresee
from specctl.models.predictors.disco_predictor import DiscoPredictor
from specctl.policies import DISTRIBUTION_SIGNALS, SIGNALS, TOP_PROBS, Signal
from specctl.records import DraftStep

if TYPE_CHECKING:
    import torch

    from specctl.models.passes.forward import Forward, Numbers

OF_PASSES: frozenset[Signal] = frozenset({"entropy", "top_prob"})  # The signals in `Forward.signals`
TOP_FIELDS = tuple(f"top_prob_{place}" for place in range(1, TOP_PROBS + 1))
"""Names of the largest probabilities in a reading on the host, from the likeliest down."""


class AcceptancePredictor(Protocol):
    """Predicts whether a draft token will be accepted, as `StatePredictor` does.

    Attributes:
        reads_signals: whether it reads the token's own signals too.
    """

    @property
    def reads_signals(self) -> bool: ...

    def accept_prob(self, hidden: "torch.Tensor", signals: "torch.Tensor | None") -> "torch.Tensor":
        """The acceptance probability ``(...)`` of tokens.

        Args:
            hidden: ``(..., H)``, last hidden states of the tokens.
            signals: ``(..., 3)``, `DISTRIBUTION_SIGNALS` of the steps that drew them; None where not read.
        """


def predictors_read(
    predictor: AcceptancePredictor | DiscoPredictor | None, signals: Set[Signal]
) -> tuple[AcceptancePredictor | None, DiscoPredictor | None]:
    """A head, placed as the one on hidden states or the one on distributions, where its signal is read; else None.

    Raises:
        ValueError: a wanted signal is one that the head does not compute.
    """
    disco = predictor if isinstance(predictor, DiscoPredictor) and "own_accept_prob" in signals else None
    on_states = predictor if not isinstance(predictor, DiscoPredictor) and "accept_prob" in signals else None
    if on_states is None and "accept_prob" in signals:
        raise ValueError("accept_prob needs a head on hidden states")
    if disco is None and "own_accept_prob" in signals:
        raise ValueError("own_accept_prob needs a DISCO head")
    return on_states, disco


def packed_signals(packed: "Sequence[float] | torch.Tensor") -> "Sequence[float] | torch.Tensor":
    """The three `DISTRIBUTION_SIGNALS` of a packed reading that has all three; a view where it is a tensor."""
    return packed[1 : 1 + len(DISTRIBUTION_SIGNALS)]


def own_accept_prob(predictor: DiscoPredictor, numbers: Mapping[str, float], index: int) -> float:
    """A DISCO head's acceptance probability for the ``index``-th token of a round, from the token's numbers on the
    host.
    """
    return predictor.own_accept_prob([numbers[name] for name in TOP_FIELDS], numbers["entropy"], index)


def signals_among(fields: Sequence[str], wanted: Set[Signal]) -> Callable[[Sequence[float | None]], tuple[Any, ...]]:
    """Picks `SIGNALS` from a packed token followed by None, which fills the signals that are not wanted.

    Picking by index takes a third of the time of picking by name.
    """
    return itemgetter(*(fields.index(name) if name in wanted else -1 for name in SIGNALS))


def step_of(index: int, numbers: Mapping[str, float], wanted: Set[Signal]) -> DraftStep:
    """A draft token on the host as a `DraftStep`, with the wanted signals."""
    return DraftStep(index, int(numbers["token"]), **{name: numbers[name] for name in wanted})


@dataclass(frozen=True)
class TokenSampler:
    """What `Logits.sample` computes. Calling it samples within a pass that is compiled or captured."""

    sampling: Sampling  # how the token is drawn
    wanted: frozenset[Signal] = frozenset()  # which of `DISTRIBUTION_SIGNALS` to compute
    predictor: AcceptancePredictor | None = None  # predicts acceptance, on the model's device; None for no prediction
    foresees: bool = False  # whether to read the draft head's own prediction for the next token
    tops: bool = False  # whether to read the largest probabilities, which a DISCO head reads with the entropy
    vocabulary: DraftVocabulary | None = None  # the ids of the columns that are read; None where columns are ids

    @property
    def hidden(self) -> bool:
        """Whether it reads hidden states."""
        return self.predictor is not None

    @cached_property
    def unfiltered(self) -> bool:
        """Whether tokens are drawn from the unfiltered softmax at some temperature."""
        return not (self.sampling.greedy or self.sampling.filters)

    @cached_property
    def takes_pass_signals(self) -> bool:
        """Whether `Forward.signals` has all the signals that it needs."""
        return self.sampling.greedy and bool(self.wanted) and self.wanted <= OF_PASSES and not self.tops

    @cached_property
    def fields(self) -> tuple[str, ...]:
        """The F numbers of a reading in packed order; with a prediction where `hidden`."""
        signals = [name for name in DISTRIBUTION_SIGNALS if name in self.wanted]
        predictions = {"accept_prob": self.hidden, "next_accept_prob": self.foresees}
        tops = TOP_FIELDS if self.tops else ()
        return ("token", *signals, *(name for name, read in predictions.items() if read), *tops)

    def __call__(
        self,
        logits: "torch.Tensor",
        uniform: "torch.Tensor | None",
        hidden: "torch.Tensor | None" = None,
        previous: "torch.Tensor | None" = None,
        foresee: Foresee | None = None,
    ) -> "tuple[torch.Tensor, torch.Tensor | None]":
        """One token with its signals, and its distribution ``(N,)``: a `TokenReader`, which `Logits.sample` explains.

        Args:
            logits: ``(N,)``.
            uniform: ``()`` float64, the draw's randomness; None when greedy.
            hidden, previous, foresee: as there.

        Returns:
            The `fields` as ``(F,)`` float64, which holds ids and probabilities alike, and the distribution.
        """
        from specctl.decoding.logits.judging import sampled_within

        return sampled_within(self, logits, uniform, hidden, previous, foresee)

    def read_rows(
        self, forwards: "Sequence[Forward]", about: Sequence[float | None]
    ) -> "list[tuple[list[float], Numbers | None]]":
        """See `TokenReader`; each row gets the result that it would get alone, to the last bit."""
        from specctl.decoding.logits.judging import draft_logits

        answers: list[tuple[list[float], Numbers | None]] = []
        for logits, of in draft_logits(forwards):
            found, probs = logits.sample(self, about[of])
            rows = found if isinstance(found, list) else found.tolist()
            answers += [(row, None if probs is None else probs[place]) for place, row in enumerate(rows)]
        return answers
