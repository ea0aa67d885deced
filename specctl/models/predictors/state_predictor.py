"""A small network on a draft model that predicts whether the token just fed to it will be accepted."""

from collections.abc import Mapping

import torch
from torch import nn
from torch.nn.functional import silu

from specctl.errors import ModelError
from specctl.policies import DISTRIBUTION_SIGNALS

Weights = Mapping[str, torch.Tensor]


class StatePredictor(nn.Module):
    """D residual blocks x + SiLU(W x + b), then one logit (SpecDec++: Huang, Guo, Wang 2024, arXiv 2405.19715).

    Its weights are float32 for drafts of all dtypes. The blocks are initialised to the identity. Beyond the paper, the
    last layer may also read the draft's signals from when it sampled the token: a shallow draft's state after a token
    holds little information about the distribution before it.

    Args:
        hidden_size: width H of the draft's last hidden state.
        depth: D, 0 for a linear predictor.
        reads_signals: whether the last layer reads `DISTRIBUTION_SIGNALS` too.
    """

    def __init__(self, hidden_size: int, depth: int, *, reads_signals: bool = False) -> None:
        super().__init__()
        self.reads_signals = reads_signals
        self.blocks = nn.ModuleList(nn.Linear(hidden_size, hidden_size) for _ in range(depth))
        self.output = nn.Linear(hidden_size + reads_signals * len(DISTRIBUTION_SIGNALS), 1)
        for parameter in self.blocks.parameters():
            nn.init.zeros_(parameter)

    @property
    def hidden_size(self) -> int:
        return self.output.in_features - self.reads_signals * len(DISTRIBUTION_SIGNALS)

    @property
    def depth(self) -> int:
        return len(self.blocks)

    def forward(self, hidden: torch.Tensor, signals: torch.Tensor | None = None) -> torch.Tensor:
        """Logits of the acceptance probability, float32 ``(...)``, of hidden states ``(..., H)``.

        ``signals`` ``(..., 3)`` are `DISTRIBUTION_SIGNALS` of the step that sampled the token; unused where not read.
        """
        state = hidden.float()
        for block in self.blocks:
            state = state + silu(block(state))
        if self.reads_signals:
            assert signals is not None
            state = torch.cat([state, signals.float()], -1)
        logits: torch.Tensor = self.output(state).squeeze(-1)
        return logits

    def accept_prob(self, hidden: torch.Tensor, signals: torch.Tensor | None = None) -> torch.Tensor:
        """The acceptance probability ``(...)`` of the tokens with these last hidden states."""
        return self.forward(hidden, signals).sigmoid()


def predictor_from(weights: Weights, *, reads_signals: bool = False) -> StatePredictor:
    """A predictor from its own weights (``blocks.I.weight``, ``output.weight`` and biases).

    Raises:
        ModelError: names or shapes do not match.
    """
    try:
        depth = len({name.split(".")[1] for name in weights if name.startswith("blocks.")})
        width = weights["output.weight"].shape[1] - reads_signals * len(DISTRIBUTION_SIGNALS)
        predictor = StatePredictor(width, depth, reads_signals=reads_signals)
        predictor.load_state_dict({name: weight.float() for name, weight in weights.items()})
    except (KeyError, IndexError, RuntimeError) as error:
        raise ModelError(f"the weights are not those of an acceptance head ({str(error).splitlines()[0]})") from error
    return predictor.eval()


def predictor_from_published(weights: Weights, depth: int) -> StatePredictor:
    """A predictor from the layout of SpecDec++'s released checkpoints, with one logit for its two classes.

    There it is one Sequential: blocks ``model.0.linear`` to ``model.(D-1).linear``, then the classifier ``model.D``
    with the rows rejected and accepted. All blocks share one module, so a file may contain the weights of a single
    block. The softmax over two classes is the sigmoid of the difference of their logits.

    Raises:
        ModelError: names or shapes do not match that layout.
    """
    converted: dict[str, torch.Tensor] = {}
    try:
        for kind in ("weight", "bias"):
            blocks = {name: weight for name, weight in weights.items() if name.endswith(f".linear.{kind}")}
            for block in range(depth):
                own = f"model.{block}.linear.{kind}"
                converted[f"blocks.{block}.{kind}"] = blocks[own] if own in blocks else next(iter(blocks.values()))
            rejected, accepted = weights[f"model.{depth}.{kind}"].float()
            converted[f"output.{kind}"] = (accepted - rejected)[None]
    except (KeyError, StopIteration, ValueError) as error:
        first = min(weights, default="none")
        raise ModelError(f"the weights are not those of a SpecDec++ head of depth {depth} (first: {first})") from error
    return predictor_from(converted)
