"""A drafter from another package, which predicts the next token from the text alone."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from specctl.errors import ModelError
from specctl.models.passes.forward import Forward
from specctl.models.passes.inference import HOST
from specctl.models.running.context import ENDLESS
from specctl.models.running.passes import Passes, Request
from specctl.plugins import DRAFTER, DRAFTERS, PluginError

if TYPE_CHECKING:
    import torch


class NextTokens(Protocol):
    """The interface of a registered drafter: scores of the next token, from a text of ids. It needs no network.

    Tokens are drawn from its scores as from a model's logits, so the output stays exact whatever it predicts.
    """

    def logits(self, text: Sequence[int], rows: int) -> "torch.Tensor":
        """Scores ``(rows, V)`` of the tokens that follow the last ``rows`` tokens of the text, any float dtype.

        Row i is for the token after ``text[: len(text) - rows + 1 + i]`` and must not depend on later tokens. ``-inf``
        excludes a token; equal scores express no preference. The list must not be changed.
        """


class RegisteredPasses(Passes):
    """Passes of a registered drafter: store its text, and check its results.

    Args:
        name: the drafter's name, with ``drafter:``.
        vocabulary: V, the pair's shared vocabulary.

    Raises:
        ModelError: the drafter is unknown.
        PluginError: the drafter cannot be created.
    """

    engine = "registered drafter"
    runs_model = False
    no_trees = "a registered drafter reads one text"

    def __init__(self, name: str, vocabulary: int) -> None:
        short, _, argument = name.removeprefix(DRAFTER).partition(":")
        if short not in DRAFTERS:
            raise ModelError(DRAFTERS.broken.get(short, f"there is no drafter {short!r} in this environment"))
        self.context = ENDLESS
        self.device = HOST
        self._what = f"the drafter {short} of {DRAFTERS.origin(short)}"
        self._vocabulary = vocabulary
        self._text: list[int] = []
        try:
            # Annotated, since foreign code is only known to have the method when it is called.
            self._model: NextTokens = DRAFTERS[short](vocabulary, argument)  # type: ignore[assignment]
        except Exception as error:
            raise PluginError(self._what, "making it", error) from error

    def forward(self, requests: Sequence[Request]) -> list[Forward]:
        import torch

        (request,) = requests
        keep = request.keep
        self._text[request.after :] = request.tokens
        if not keep:
            return [Forward(torch.zeros(0, self._vocabulary))]
        try:
            logits = self._model.logits(self._text, keep)
            if not isinstance(logits, torch.Tensor) or logits.shape != (keep, self._vocabulary):
                found = tuple(logits.shape) if isinstance(logits, torch.Tensor) else type(logits).__name__
                raise TypeError(f"expected a tensor of shape {(keep, self._vocabulary)}, not {found}")
            logits = logits.detach().to("cpu", torch.float32)
            if bool(logits.isnan().any()) or bool((logits.amax(-1) == -torch.inf).any()):
                raise ValueError("a row has NaN, or no token that may follow")
        except Exception as error:
            raise PluginError(self._what, "logits", error) from error
        return [Forward(logits)]

    def rollback(self, slot: int, length: int) -> int:  # noqa: ARG002 - there is one
        del self._text[length:]
        return length
