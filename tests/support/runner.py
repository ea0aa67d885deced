"""A stand-in for a slot that needs no passes."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from specctl.models.passes.forward import Forward
from specctl.models.running.passes import FACTS, Passes, Request
from specctl.models.running.slot import Slot, judged_after

if TYPE_CHECKING:
    import torch

    from specctl.models.passes.forward import Foresee, Numbers, PassReader, Token, TokenReader
    from specctl.models.passes.watching import States


class Runner(Slot, ABC):
    """A `Slot` whose class answers by itself."""

    wants_signals: bool = False
    judges: bool = False

    @property
    def transforms(self) -> list[Any]:
        return []

    @property
    def bare(self) -> Slot:
        return Slot(_Own(self))

    @property
    @abstractmethod
    def length(self) -> int: ...

    @abstractmethod
    def extend(self, tokens: Sequence[int], keep: int, *, hidden: bool = False) -> Forward: ...

    @abstractmethod
    def rollback(self, length: int) -> None: ...

    def begin(self, prompt: int) -> None:
        pass

    def rotate_as(self, length: int) -> None:
        raise NotImplementedError("its model rotates by position alone")

    def watch(self, layers: Iterable[int]) -> None:
        for layer in layers:
            raise IndexError(f"{self.engine} has no layer {layer} that another could read")

    @property
    def engine(self) -> str:
        return type(self).__name__

    @property
    def preparing_seconds(self) -> float | None:
        return None

    @property
    def observed(self) -> int:
        return 0

    def observe_states(self, start: int, states: "States") -> None:
        raise NotImplementedError("only a draft head reads states")

    @property
    def foresee(self) -> "Foresee | None":
        return None

    @property
    def widest_sample(self) -> int:
        return 0

    @property
    def specialises(self) -> bool:
        return False

    @property
    def runs_ahead(self) -> bool:
        return False

    def sample(
        self,
        tokens: "Sequence[Token]",
        reader: "TokenReader",
        uniform: float | None,
        previous: "torch.Tensor | None" = None,
    ) -> "tuple[list[float] | torch.Tensor, Numbers | None]":
        raise NotImplementedError("its logits are read after the pass")

    def extend_judged(
        self, tokens: Sequence[int], keep: int, judge: "PassReader", about: Any, *, hidden: bool = False
    ) -> Any:
        return judged_after(self.extend(tokens, keep, hidden=hidden), judge, about)

    def extend_tree(
        self, tokens: Sequence[int], parents: Sequence[int], *, before: int = 0, hidden: bool = False
    ) -> Forward:
        raise NotImplementedError(self.no_trees)

    def keep_path(self, path: Sequence[int]) -> None:
        raise NotImplementedError(self.no_trees)

    def fresh(self) -> Slot:
        raise NotImplementedError

    def over(self, slots: int, width: int | None = None) -> Passes:
        raise NotImplementedError(self.no_rows)

    def masked_pass(
        self, tokens: Sequence[int], positions: "torch.Tensor", seen: "torch.Tensor", *, hidden: bool = False
    ) -> Forward:
        raise NotImplementedError("it reads a sequence in its order")


class _Own(Passes):
    """The passes of such a slot."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        for name in FACTS:
            setattr(self, name, getattr(runner, name))

    def forward(self, requests: Sequence[Request]) -> list[Forward]:
        (request,) = requests
        self._runner.rollback(request.after)
        return [self._runner.extend(request.tokens, request.keep, hidden=request.hidden)]
