"""The two kinds of trained heads that predict the acceptance of a model's draft tokens."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Union

from specctl.models.predictors.disco_predictor import DiscoPredictor
from specctl.policies import Signal

if TYPE_CHECKING:
    from specctl.models.predictors.state_predictor import StatePredictor

TrainedPredictor = Union["StatePredictor", DiscoPredictor]


def signal_of(predictor: TrainedPredictor) -> Signal:
    """The signal that a head computes."""
    return "own_accept_prob" if isinstance(predictor, DiscoPredictor) else "accept_prob"


def first_for(signals: Iterable[Signal], predictors: Iterable[TrainedPredictor]) -> TrainedPredictor | None:
    """The first head that computes one of the signals."""
    wanted = set(signals)
    return next((predictor for predictor in predictors if signal_of(predictor) in wanted), None)


def state_predictors(named: Mapping[str, TrainedPredictor]) -> "dict[str, StatePredictor]":
    """Those of some named heads that read hidden states."""
    return {name: predictor for name, predictor in named.items() if not isinstance(predictor, DiscoPredictor)}


def disco_predictors(named: Mapping[str, TrainedPredictor]) -> dict[str, DiscoPredictor]:
    """Those of some named heads that read distributions."""
    return {name: predictor for name, predictor in named.items() if isinstance(predictor, DiscoPredictor)}
