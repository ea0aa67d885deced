"""All that is read of some draft tokens, as columns: what a step in a trace, or an example for a head, is made of."""

from collections.abc import Mapping, Sequence

import torch

from specctl.decoding.rows.rows_of import rows_of
from specctl.models.passes.forward import Forward, Numbers
from specctl.models.predictors.predictor_checkpoint import TrainedPredictor, disco_predictors, state_predictors
from specctl.policies import DISTRIBUTION_SIGNALS

NOTHING = (0.0,) * len(DISTRIBUTION_SIGNALS)
"""The signals of the step before the first token of a text, where none is known."""


def token_columns(
    forward: Forward,
    chosen: torch.Tensor,
    previous: Sequence[float] | Sequence[Sequence[float]] | None = None,
    predictors: Mapping[str, TrainedPredictor] | None = None,
    *,
    tops: bool = False,
) -> torch.Tensor:
    """The signals of tokens, what heads predict for the tokens fed before them, and what DISCO heads read.

    Args:
        forward: logits ``(B, V)`` behind which the tokens stand and, for heads that read them, the hidden states
            ``(B, H)`` of the tokens before.
        chosen: ``(B,)`` int64, the tokens.
        previous: for heads, ``(B, 3)`` `DISTRIBUTION_SIGNALS` of the steps that drew the tokens before; ``(3,)``, those
            of the step before the first, if each further token follows the one in the row before. None for the first
            tokens of rounds, which no draft token precedes.
        predictors: the draft's trained heads by name.
        tops: whether to read the largest probabilities although no DISCO head does.

    Returns:
        ``(B, W)`` float32: `DISTRIBUTION_SIGNALS`, a prediction of each head that reads hidden states and, where there
        is a DISCO head, the `specctl.policies.TOP_PROBS` largest probabilities.
    """
    predictors = predictors or {}
    rows = rows_of(forward)
    found = [_tensor(column) for column in rows.signals(chosen, frozenset(DISTRIBUTION_SIGNALS)).values()]
    if reading := state_predictors(predictors).values():
        if previous is None:
            found += [torch.ones_like(found[0])] * len(reading)
        else:
            assert forward.hidden is not None
            own = torch.stack(found, dim=1)  # (B, 3)
            before = own.new_tensor(previous)
            # A row's hidden state is of the token before its position, and so must the signals be.
            before = torch.cat([before[None], own[:-1]]) if before.ndim == 1 else before
            found += [predictor.accept_prob(forward.hidden, before) for predictor in reading]
    if tops or disco_predictors(predictors):
        found += _tensor(rows.top_probs()).unbind(-1)
    return torch.stack(found, dim=1)


def token_row(forward: Forward, token: int) -> list[float]:
    """`DISTRIBUTION_SIGNALS` of a token behind a pass of one row."""
    row: list[float] = token_columns(forward, torch.tensor([token], device=forward.logits.device))[0].tolist()
    return row


def _tensor(column: Numbers) -> torch.Tensor:
    return column if isinstance(column, torch.Tensor) else torch.from_numpy(column)
