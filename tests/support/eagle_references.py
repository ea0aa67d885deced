"""EAGLE heads with the logits that their publishers' code computes; see tools/reference_heads/eagle.py."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from specctl.models.draft_heads.chain import ChainHead
from specctl.models.draft_heads.eagle1 import Eagle1Head
from specctl.models.draft_heads.eagle3 import Eagle3Head
from specctl.models.draft_heads.file_layout import read_head

DATA = Path(__file__).parents[1] / "data" / "draft_heads"
EAGLE3 = (
    "eagle3-speculators",
    "eagle3-speculators-normed",
    "eagle3-speculators-biased",
    "eagle3-safeailab",
    "eagle3-deepspec",
)
EAGLE1 = ("eagle1-safeailab", "eagle1-qwen2")
STEPS = 3


@dataclass
class Reference:
    """A published head: its file's contents, and the recorded inputs and outputs."""

    config: dict[str, Any]
    weights: dict[str, torch.Tensor]
    expected: dict[str, torch.Tensor]

    @property
    def ids(self) -> torch.Tensor:  # (T + STEPS - 1,)
        return self.expected["ids"]

    @property
    def states(self) -> dict[int, torch.Tensor]:  # (T, D) each
        found = {name: tensor for name, tensor in self.expected.items() if name.startswith("states.")}
        return {int(name.removeprefix("states.")): tensor for name, tensor in found.items()}

    def build(self, verifier: LlamaForCausalLM | None = None) -> Eagle1Head | Eagle3Head:
        kind = "eagle3" if "lm_head.weight" in self.weights or "norm.weight" in self.weights else "eagle1"
        return read_head(kind, self.config, self.weights, verifier or self.verifier(), "The draft head 'x'")

    def verifier(self, **settings: Any) -> LlamaForCausalLM:
        """A model that the head fits, with the recorded embeddings and output weights where there are any."""
        torch.manual_seed(0)
        sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 8}
        model = LlamaForCausalLM(LlamaConfig(**({"num_attention_heads": 4} | sizes | settings))).eval()
        with torch.no_grad():
            for own, name in ((model.model.embed_tokens, "embed"), (model.lm_head, "unembed")):
                if name in self.expected:
                    own.weight.copy_(self.expected[name])
        return model


def reference(name: str) -> Reference:
    folder = DATA / name
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return Reference(config, load_file(folder / "model.safetensors"), load_file(folder / "expected.safetensors"))


def causal(first: int, count: int) -> torch.Tensor:  # (1, 1, T, S)
    return (torch.arange(first + count) <= torch.arange(first, first + count)[:, None])[None, None]


@torch.no_grad()
def drafted(head: ChainHead, ids: torch.Tensor, states: dict[int, torch.Tensor], steps: int) -> torch.Tensor:
    """Logits ``(steps, V)`` of a chain that starts after T true rows.

    Args:
        head: any chain head.
        ids: ``(T + steps - 1,)``, the token read at each place.
        states: of the first T places, ``(T, D)`` each.
        steps: how often to predict.
    """
    cache = DynamicCache()
    rows, first, found = head.fuse(states), 0, []
    for step in range(steps):
        count = len(rows)
        positions = torch.arange(first, first + count)
        out = head(ids[None, first : first + count], rows[None], positions, causal(first, count), cache)
        rows, first = out.features[-1:], first + count
        found.append(head.widened(out.logits[-1]))
        assert len(out.logits) == len(out.hidden) == count, step
    return torch.stack(found)


def all_logits(head: ChainHead, data: Reference) -> torch.Tensor:  # (STEPS, T, V)
    """Logits of the chains that start at each place, as recorded."""
    places = len(data.expected["logits.0"])
    chains = [
        drafted(head, data.ids, {layer: rows[: place + 1] for layer, rows in data.states.items()}, STEPS)
        for place in range(places)
    ]
    return torch.stack(chains, 1)
