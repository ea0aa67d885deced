"""Where a part runs: on the first CUDA device with a pair of real size, or in a rehearsal with tiny models."""

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from specctl.models.running.engines import EngineSettings
    from specctl.models.running.pair import Pair
    from tools.gpu_report.record import Recorder

TESTS = Path(__file__).parents[2] / "tests"
SLOW = 1e-4
"""Seconds that a kernel takes of simulated devices that are slower than their host, as with models of real size."""
AGREEMENT = 0.8
"""Share of positions at which target and draft of the synthetic pair choose the same token."""


@dataclass(frozen=True, slots=True)
class Cards:
    """CUDA devices, pretended ones in a rehearsal.

    Attributes:
        count: how many there are.
        pretended: the simulation, an instance of `tests.support.pretend_cuda.Devices`; None for real ones.
    """

    count: int
    pretended: Any = None

    def now(self) -> float:
        """Seconds by the clock that specctl reads."""
        return perf_counter() if self.pretended is None else float(self.pretended.clock.read())

    def put(self, model: "PreTrainedModel", device: str) -> "PreTrainedModel":
        """A copy of a model on a device."""
        if self.pretended is not None:
            moved: PreTrainedModel = self.pretended.move(deepcopy(model), device)
            return moved
        model = deepcopy(model)
        model.to(device)  # type: ignore[arg-type]
        return model


@dataclass(frozen=True, slots=True)
class Stage:
    """A device, or a rehearsal without one.

    Attributes:
        rehearsal: whether models are tiny and devices pretended.
    """

    rehearsal: bool
    _pairs: list[Any] = field(default_factory=list, compare=False)

    @property
    def device(self) -> str:
        """Where parts run that need no pretended device."""
        return "cpu" if self.rehearsal else "cuda:0"

    @property
    def dtype(self) -> "torch.dtype":
        """Of the pair: CPUs are slow in bfloat16."""
        import torch

        return torch.float32 if self.rehearsal else torch.bfloat16

    @property
    def shape(self) -> str:
        """The synthetic pair's."""
        return "tiny" if self.rehearsal else "llama3-8b-1b"

    def sized(self, usual: int, rehearsed: int) -> int:
        """A number of tokens, prompts or repeats."""
        return rehearsed if self.rehearsal else usual

    @contextmanager
    def cards(self, count: int = 1, *, timed: bool = False) -> Iterator[Cards]:
        """Use CUDA devices.

        Args:
            count: how many a rehearsal pretends.
            timed: whether specctl reads a simulated clock in a rehearsal, by which devices are slower than the host.
        """
        import torch

        if not self.rehearsal:
            yield Cards(torch.cuda.device_count())
            return
        sys.path.insert(0, str(TESTS.parent))
        from tests.support.pretend_cuda import Costs, Devices

        clocked = [name for name in sys.modules if name.startswith("specctl.") and _times(sys.modules[name])]
        costs = Costs(kernel=SLOW, node=SLOW)
        with Devices(count, clock=tuple(clocked) if timed else (), costs=costs if timed else None) as pretended:
            yield Cards(count, pretended)

    def wait(self) -> None:
        """Return when the device has done its work."""
        if not self.rehearsal:
            import torch

            torch.cuda.synchronize()

    def models(self) -> "tuple[PreTrainedModel, PreTrainedModel]":
        """The synthetic pair of `shape` on `device`, made once in a process."""
        from tools.synthetic.shapes import SHAPES, Dials
        from tools.synthetic.weights import build_pair, dial

        if not self._pairs:
            dials = Dials()
            pair = build_pair(*SHAPES[self.shape], dials, dtype=self.dtype, device=self.device)
            dial(*pair, dials, AGREEMENT)
            for model in pair:
                model.requires_grad_(False)
            self._pairs.append(pair)
        made: tuple[PreTrainedModel, PreTrainedModel] = self._pairs[0]
        return made

    def pair(self, settings: "EngineSettings") -> "Pair":
        """Runners of `models`; their texts end at the limit only."""
        from specctl.models.placing.engine_table import build_runner
        from specctl.models.running.pair import Pair
        from tools.synthetic_pair import tokenizer

        models = self.models()
        size = models[0].config.vocab_size
        target, draft = (
            build_runner(model, size, name, settings) for model, name in zip(models, ("target", "draft"), strict=True)
        )
        context = models[0].config.max_position_embeddings
        return Pair(target, (draft,), tokenizer(size), frozenset(), context, models, ({},))

    def prompt(self, tokens: int) -> list[int]:
        """Ids of letters in no order."""
        return [97 + place * place * 7 % 26 for place in range(tokens)]

    def judge(self, to: "Recorder", claim: str, held: bool, detail: str) -> None:
        """A check of times, or of a device's own tests; in a rehearsal they prove nothing and are not judged."""
        if self.rehearsal:
            to.unjudged(claim, detail)
        else:
            to.check(claim, held, detail)

    def keep_from_cudnn(self) -> None:
        """Let torch do without cuDNN's attention for the rest of the process, as loading a model does."""
        from specctl.models.loading.model import prefer_own_attention

        prefer_own_attention([self.device])

    def attention(self, *, cudnn: bool) -> AbstractContextManager[None]:
        """Let torch choose cuDNN's attention, or keep it from that; as before afterwards."""
        return _cudnn(cudnn) if not self.rehearsal else nullcontext()


def _times(module: Any) -> bool:
    return getattr(module, "perf_counter", None) is perf_counter


@contextmanager
def _cudnn(allowed: bool) -> Iterator[None]:
    import torch

    before = torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
    torch.backends.cuda.enable_cudnn_sdp(allowed)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)
