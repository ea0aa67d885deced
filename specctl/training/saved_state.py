"""The state of a training in one safetensors file, written whole, from which it goes on bit for bit."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import nn
from torch.optim import Optimizer

from specctl.errors import UsageError
from specctl.outputs import naming, write_whole

SAVE_SECONDS = 20.0
"""Time between two states: training time that is lost at most when a run is killed."""


@dataclass(frozen=True, slots=True)
class SavedState:
    """Where a training keeps its state, and what belongs to it.

    Args:
        path: of the file.
        facts: what the training depends on; a state of other facts is refused.
        modules: whose weights are trained.
        optimizers: with their states.
    """

    path: Path
    facts: Mapping[str, Any]
    modules: Sequence[nn.Module]
    optimizers: Sequence[Optimizer]

    def save(self, step: int, seconds: float) -> None:
        """Write the state after ``step`` steps, which took ``seconds``."""
        tensors: dict[str, torch.Tensor] = {}
        for number, module in enumerate(self.modules):
            tensors |= {f"module/{number}/{name}": weight for name, weight in module.state_dict().items()}
        for number, optimizer in enumerate(self.optimizers):
            for index, state in optimizer.state_dict()["state"].items():
                tensors |= {f"optimizer/{number}/{index}/{name}": value for name, value in state.items()}
        metadata = {"facts": json.dumps(self.facts), "step": str(step), "seconds": str(seconds)}
        with naming(self.path.parent):
            self.path.parent.mkdir(parents=True, exist_ok=True)
        plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        write_whole(self.path, save(plain, metadata))

    def restore(self) -> tuple[int, float]:
        """Load the state where there is one; the steps done and the seconds spent.

        Raises:
            UsageError: the file is damaged or belongs to another training run.
        """
        if not self.path.is_file():
            return 0, 0.0
        try:
            with safe_open(self.path, framework="pt") as file:
                metadata: dict[str, str] = file.metadata() or {}
                if metadata.get("facts") != json.dumps(self.facts):
                    hint = "resume with the same options, or delete it"
                    raise UsageError(f"{self.path} belongs to another training run", hint)
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
        except (OSError, SafetensorError) as error:
            raise UsageError(f"{self.path} is damaged ({error})", "delete it to train from the start") from error
        for number, module in enumerate(self.modules):
            module.load_state_dict(_below(tensors, f"module/{number}/"))
        for number, optimizer in enumerate(self.optimizers):
            states: dict[int, dict[str, Any]] = {}
            for name, tensor in _below(tensors, f"optimizer/{number}/").items():
                index, _, key = name.partition("/")
                states.setdefault(int(index), {})[key] = tensor
            optimizer.load_state_dict({**optimizer.state_dict(), "state": states})
        return int(metadata["step"]), float(metadata["seconds"])


def _below(tensors: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
