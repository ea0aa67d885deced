"""The two kinds of trained heads that predict the acceptance of a model's draft tokens."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Union

from specctl.models.predictors.disco_head import DiscoHead
from specctl.policies import Signal

if TYPE_CHECKING:
    from specctl.models.predictors.acceptance_head import AcceptanceHead

TrainedHead = Union["AcceptanceHead", DiscoHead]


def signal_of(head: TrainedHead) -> Signal:
    """The signal that a head computes."""
    return "own_accept_prob" if isinstance(head, DiscoHead) else "accept_prob"


def first_for(signals: Iterable[Signal], heads: Iterable[TrainedHead]) -> TrainedHead | None:
    """The first head that computes one of the signals."""
    wanted = set(signals)
    return next((head for head in heads if signal_of(head) in wanted), None)


def state_heads(named: Mapping[str, TrainedHead]) -> "dict[str, AcceptanceHead]":
    """Those of some named heads that read hidden states."""
    return {name: head for name, head in named.items() if not isinstance(head, DiscoHead)}


def disco_heads(named: Mapping[str, TrainedHead]) -> dict[str, DiscoHead]:
    """Those of some named heads that read distributions."""
    return {name: head for name, head in named.items() if isinstance(head, DiscoHead)}
