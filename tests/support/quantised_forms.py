"""Targets in every form in which a CPU runs them, plain and quantised, and every way to draft for them."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import AutoTokenizer, PreTrainedModel

from specctl.decoding.draft import Drafter
from specctl.decoding.drafters import ModelDrafter
from specctl.decoding.hierarchy import PreVerifiedDrafter
from specctl.decoding.lookup import LookupDrafter
from specctl.decoding.parallel import ParallelDrafter
from specctl.decoding.trees import TreeDrafter
from specctl.models.loading.model import load_model
from specctl.models.predictors.predictor_checkpoint import locate_predictor
from specctl.models.predictors.state_predictor import StatePredictor
from specctl.models.running.eager import EagerPasses
from specctl.models.running.lookup import LookupPasses
from specctl.models.running.slot import Slot
from specctl.models.running.static import StaticPasses
from specctl.models.running.transforms import FixedWidthPasses
from specctl.policies import POLICIES
from specctl.policies.published import Constant, SelfVerify
from specctl.policies.setting import TreeSize
from specctl.profile.schema import ModelTable, model_path
from specctl.prompts.suites import load_suite
from tests.support.onnx_models import sure_runner
from tests.support.toys import STOPPING, head_for, noisy_copy, random_model, random_predictor, seeded

TREES = ("tree",)
"""The ways to draft that need a target that reads trees."""
TRAINED = "embedded"
"""The family of the models that ship with the package, on whose weights small faults show that random ones hide."""
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

    @property
    def no_trees(self) -> bool:
        """Whether it reads chains alone."""
        return self.deterministic or (self.engine == "onnx" and self.quantize is not None)

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
def _loaded(path: str, quantize: str | None = None, dtype: str = "float32") -> PreTrainedModel:
    return load_model(ModelTable(model=path, device="cpu", dtype=dtype, quantize=quantize), role="target").model


@cache
def _path(family: str) -> str:
    if family == TRAINED:
        return "embedded:target"
    path = str(Path(_folder().name) / family)
    small(family).save_pretrained(path)
    return path


@cache
def target_of(form: Form, family: str, *, trees: bool = False) -> Slot:
    """A target's runner, shared by all who ask: roll it back first."""
    model = _loaded(_path(family), None if form.engine == "onnx" else form.quantize, form.dtype)
    vocabulary = model.config.vocab_size
    if form.engine == "onnx":
        return sure_runner(model, vocabulary, quantize=form.quantize, trees=trees)
    runner = Slot(EagerPasses(model, vocabulary)) if form.engine == "eager" else Slot(StaticPasses(model, vocabulary))
    return Slot(FixedWidthPasses(runner)) if form.deterministic else runner


@dataclass(frozen=True)
class Drafts:
    """What drafts: a draft, one that verifies it before the target does, a head, settings of policies by name."""

    draft: Slot
    middle: Slot
    vocabulary: int
    head: StatePredictor
    settings: dict[str, dict[str, object]]

    def drafter(self, way: str) -> Drafter:
        """A fresh drafter: by a policy's name, or one of `OTHER_WAYS`."""
        other: dict[str, Callable[[], Drafter]] = {
            "tree": lambda: TreeDrafter(self.draft, Constant(3), TreeSize(6, 2)),
            "lookup": lambda: LookupDrafter(Slot(LookupPasses(self.vocabulary)), Constant(3)),
            "hierarchy": lambda: PreVerifiedDrafter(
                ModelDrafter(self.draft, Constant(2)), self.middle, SelfVerify(max_draft=3)
            ),
            "parallel": lambda: ParallelDrafter(self.draft, Constant(2)),
        }
        if way in other:
            return other[way]()
        policy = POLICIES[way](**self.settings.get(way, {}))
        return ModelDrafter(self.draft, policy, predictor=head_for(policy, self.head))


@cache
def drafts_of(family: str) -> Drafts:
    """Copies of a random model with noise on their weights, the second one with less; for trained ones smaller ones."""
    if family != TRAINED:
        draft, middle = (Slot(EagerPasses(noisy_copy(family, noise), 64)) for noise in (0.03, 0.015))
        return Drafts(draft, middle, 64, random_predictor(hidden_size=32), STOPPING)
    models = [_loaded(f"embedded:{name}") for name in ("draft", "mid")]
    head = locate_predictor("embedded:draft-head").load(models[0].config.hidden_size)
    assert isinstance(head, StatePredictor)
    vocabulary = models[0].config.vocab_size
    draft, middle = (Slot(EagerPasses(model, vocabulary)) for model in models)
    return Drafts(draft, middle, vocabulary, head, {})


@cache
def _stories() -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(model_path("target"))
    return [
        tokenizer.encode(prompt.data["prompt"])
        for prompt in load_suite("embedded", categories=["story-middle"]).prompts
    ]


def prompts_of(family: str, count: int, seed: int) -> list[list[int]]:
    """Random prompts of several lengths; for trained models beginnings of stories, of 40 to 80 tokens."""
    draws = seeded(seed)

    def ids(limit: int, length: int, least: int = 1) -> list[int]:
        return torch.randint(least, limit, (length,), generator=draws).tolist()

    if family != TRAINED:
        return [ids(small(family).config.vocab_size, 3 + 8 * number) for number in range(count)]
    which = ids(len(_stories()), count, 0)
    return [_stories()[story][:length] for story, length in zip(which, ids(81, count, 40), strict=True)]
