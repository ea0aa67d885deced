"""What runs one model over one sequence, and what some such runners can do besides."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from specctl.models.passes.forward import Forward as Forward
from specctl.models.passes.forward import joined as joined
from specctl.models.passes.token_reader import Token, TokenReader
from specctl.models.passes.watching import States

if TYPE_CHECKING:
    import torch


class Runner(Protocol):
    """A model that extends and rolls back one sequence; it knows nothing of rounds.

    Attributes:
        length: tokens in the cache, always a prefix of the sequence.
        context: the most tokens the cache may hold.
        device: of the logits.
    """

    @property
    def length(self) -> int: ...

    @property
    def context(self) -> int: ...

    @property
    def device(self) -> "torch.device": ...

    def extend(self, tokens: Sequence[int], keep: int, *, hidden: bool = False) -> Forward:
        """Run ``tokens`` after the cached prefix and cache them; gives logits of the last ``keep`` of them only."""

    def rollback(self, length: int) -> None:
        """Drop all but the first ``length`` tokens; no effect if fewer are cached.

        A cache that cannot go back that far may drop more: callers continue from ``length`` as it is afterwards.
        """

    def watch(self, layers: Iterable[int]) -> None:
        """Give the states of these layers with every later pass of `extend`, besides those watched already.

        Args:
            layers: i for the input of decoder layer i, -1 for the last state after the final norm.

        Raises:
            IndexError: the model has no such layer.
        """


@runtime_checkable
class StateReader(Runner, Protocol):
    """A `Runner` that reads its verifier's states: a draft head.

    Where the state of the place before a token is not known, it reads its own output in its stead. A rollback goes
    back to what came from the verifier's states, so that what it drafts does not depend on earlier rounds.

    Attributes:
        layers: the layers of the verifier that it reads.
        state_size: D, the width of their states.
        witnessed: W, the first W places of the sequence are those whose states it was given.
        longest: the most tokens that it can draft in a round; None for any number.
    """

    @property
    def layers(self) -> tuple[int, ...]: ...

    @property
    def state_size(self) -> int: ...

    @property
    def witnessed(self) -> int: ...

    @property
    def longest(self) -> int | None: ...

    def witness(self, start: int, states: States) -> None:
        """Take the verifier's states of places from ``start`` on, which is at most W; those known already are ignored.

        Only places that stay in the sequence may be given.
        """


@runtime_checkable
class FusedRunner(Runner, Protocol):
    """A `Runner` that can read a pass's last token within the pass.

    Attributes:
        vocabulary: V, the length of a row of logits.
        widest_read: the most tokens that `read` takes, at least 1.
        specialises: whether every reader has a pass of its own compiled or captured, which takes long.
    """

    @property
    def vocabulary(self) -> int: ...

    @property
    def widest_read(self) -> int: ...

    @property
    def specialises(self) -> bool: ...

    def read(
        self,
        tokens: Sequence[Token],
        reader: TokenReader,
        uniform: float | None,
        previous: "torch.Tensor | None" = None,
    ) -> "tuple[torch.Tensor, torch.Tensor | None]":
        """Extend by tokens and read the last of them in the same pass.

        Args:
            tokens: at least one, or a single one that is on the device.
            reader: the same one for a whole sequence, because each reader has a pass compiled or captured for it.
            uniform: for the reader, or None.
            previous: ``(S,)`` for the reader, or None; of one S for the whole of a sequence.

        Returns:
            The reader's numbers ``(F,)`` float64, and its distribution ``(V,)`` if it gives one.
        """


@runtime_checkable
class AheadRunner(FusedRunner, Protocol):
    """A `FusedRunner` whose device may work on while the host looks at what it has found.

    Attributes:
        runs_ahead: whether starting a pass takes the host so little time that it is worth starting the next one, over
            the token that is on the device, before the numbers of the last are read.
    """

    @property
    def runs_ahead(self) -> bool: ...


@runtime_checkable
class PreparedRunner(Protocol):
    """A runner whose first pass of each kind may take long, being compiled or captured.

    Attributes:
        engine: its name in reports.
        prepares: whether it compiles or captures passes.
        preparing_seconds: wall time spent on that so far.
    """

    @property
    def engine(self) -> str: ...

    @property
    def prepares(self) -> bool: ...

    @property
    def preparing_seconds(self) -> float: ...
