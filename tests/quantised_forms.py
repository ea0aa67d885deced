"""Targets in every form in which a CPU runs them, plain and quantised, and every way to draft for them."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from onnx_models import sure_runner
from toys import head_for, noisy_copy, random_model, seeded
from transformers import PreTrainedModel

from specctl.decoding.drafters import Drafter, ModelDrafter
from specctl.decoding.hierarchy import PreVerifiedDrafter
from specctl.decoding.leaves import LeafDrafter
from specctl.decoding.lookup import LookupDrafter
from specctl.decoding.parallel import ParallelDrafter
from specctl.decoding.tree_drafter import TreeDrafter
from specctl.models.loading.model import load_model
from specctl.models.running.acceptance_head import AcceptanceHead
from specctl.models.running.eager import EagerRunner
from specctl.models.running.fixed_width import FixedWidthRunner
from specctl.models.running.lookup import LookupRunner
from specctl.models.running.runner import Runner
from specctl.models.running.static import StaticRunner
from specctl.policies import POLICIES
from specctl.policies.constant import Constant
from specctl.policies.leaves import leaf_rule
from specctl.policies.self_verify import SelfVerify
from specctl.policies.trees import TreeSize
from specctl.profile.schema import ModelTable

TREES = ("tree", "leaves")
"""The ways to draft that need a target that reads trees."""
OTHER_WAYS = (*TREES, "lookup", "hierarchy", "parallel")


@dataclass(frozen=True)
class Form:
    """How a target is stored and read.

    Attributes:
        deterministic: whether it is read in passes of one shape, as bfloat16 has to be for texts to be the same.
    """

    engine: str
    quantize: str | None = None
    dtype: str = "float32"
    deterministic: bool = False

    def __str__(self) -> str:
        more = f", {self.dtype}, deterministic" if self.deterministic else ""
        return f"{self.engine}, {self.quantize or 'plain'}{more}"


ONNX = tuple(Form("onnx", quantize) for quantize in ("int8", "int4"))
TORCHAO = tuple(Form(engine, quantize) for engine in ("eager", "static") for quantize in ("int8", "int4", "fp8"))
BFLOAT16 = tuple(Form("eager", quantize, "bfloat16", deterministic=True) for quantize in ("int8", "int4"))
PLAIN = (Form("eager"), Form("static"), Form("onnx"))


@cache
def _folder() -> "TemporaryDirectory[str]":
    return TemporaryDirectory()


def small(family: str) -> PreTrainedModel:
    """A random model of a family; of the family ``three``, one of three tokens whose chances can be enumerated."""
    if family != "three":
        return random_model(family)
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    config = LlamaConfig(vocab_size=3, num_hidden_layers=1, head_dim=16, initializer_range=0.3, **sizes, **ids)
    with torch.inference_mode(False), torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        return LlamaForCausalLM(config).float().eval()


@cache
def _loaded(family: str, quantize: str | None, dtype: str) -> PreTrainedModel:
    path = Path(_folder().name) / family
    if not path.exists():
        small(family).save_pretrained(path)
    table = ModelTable(model=str(path), device="cpu", dtype=dtype, quantize=quantize)
    return load_model(table, role="target").model


@cache
def target_of(form: Form, family: str, *, trees: bool = False) -> Runner:
    """A target's runner, shared by all who ask: roll it back first."""
    vocabulary = small(family).config.vocab_size
    if form.engine == "onnx":
        return sure_runner(_loaded(family, None, form.dtype), vocabulary, quantize=form.quantize, trees=trees)
    model = _loaded(family, form.quantize, form.dtype)
    runner = EagerRunner(model, vocabulary) if form.engine == "eager" else StaticRunner(model, vocabulary)
    return FixedWidthRunner(runner) if form.deterministic else runner


@dataclass(frozen=True)
class Drafts:
    """What drafts: a draft, one that verifies it before the target does, a head, settings of policies by name."""

    draft: Runner
    middle: Runner
    vocabulary: int
    head: AcceptanceHead
    settings: dict[str, dict[str, object]]

    def drafter(self, way: str) -> Drafter:
        """A fresh drafter: by a policy's name, or one of `OTHER_WAYS`."""
        other: dict[str, Callable[[], Drafter]] = {
            "tree": lambda: TreeDrafter(self.draft, Constant(3), TreeSize(6, 2)),
            "leaves": lambda: LeafDrafter(ModelDrafter(self.draft, Constant(3), laws=True), leaf_rule(1)),
            "lookup": lambda: LookupDrafter(LookupRunner(self.vocabulary), Constant(3)),
            "hierarchy": lambda: PreVerifiedDrafter(
                ModelDrafter(self.draft, Constant(2)), self.middle, SelfVerify(max_draft=3)
            ),
            "parallel": lambda: ParallelDrafter(self.draft, Constant(2)),
        }
        if way in other:
            return other[way]()
        policy = POLICIES[way](**self.settings.get(way, {}))
        return ModelDrafter(self.draft, policy, head=head_for(policy, self.head))


@cache
def noisy_drafts(family: str) -> tuple[Runner, Runner]:
    """Copies of a model with noise on their weights, the second one with less."""
    draft, middle = (EagerRunner(noisy_copy(family, noise), 64) for noise in (0.03, 0.015))
    return draft, middle


def prompts_of(family: str, count: int, seed: int) -> list[list[int]]:
    """Random prompts of several lengths."""
    draws = seeded(seed)
    vocabulary = small(family).config.vocab_size
    return [torch.randint(1, vocabulary, (3 + 8 * number,), generator=draws).tolist() for number in range(count)]
