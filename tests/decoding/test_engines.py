"""What is written does not depend on the engine that writes it, nor, where that is promised, on the policy."""

from collections.abc import Callable, Sequence
from functools import cache

import pytest
import torch
from transformers import PreTrainedModel

from specctl.decoding.composition import build_drafter
from specctl.decoding.drafters import ModelDrafter
from specctl.decoding.loop import decode
from specctl.decoding.round import prefill
from specctl.decoding.sampling import Sampling
from specctl.decoding.session import Session
from specctl.decoding.warming import warm_up
from specctl.models.loading.assembly import load_pair
from specctl.models.passes.compilation import Compiler, missing_compiler
from specctl.models.running.eager import EagerPasses
from specctl.models.running.graph import GraphPasses
from specctl.models.running.slot import Slot
from specctl.models.running.static import StaticPasses
from specctl.models.running.transforms import FixedWidthPasses
from specctl.policies import POLICIES, Setting
from specctl.profile import resolve
from tests.support.onnx_models import needs_onnx, sure_runner
from tests.support.toys import (
    STOPPING,
    WITHOUT_FORESIGHT,
    Replays,
    generated,
    head_for,
    noisy_copy,
    random_model,
    random_predictor,
    seeded,
)

pytestmark = pytest.mark.crossed

LENGTH = 48
PROMPTS = (1, 5, 9), tuple(torch.randint(1, 64, (70,), generator=seeded(5)).tolist())
HEAD = random_predictor(hidden_size=32, spread=0.15)
ENGINES: dict[str, Callable[[PreTrainedModel], Slot]] = {
    "static": lambda model: Slot(StaticPasses(model, 64)),
    "graph": lambda model: Slot(GraphPasses(model, 64, Replays())),
    "fixed width": lambda model: Slot(FixedWidthPasses(Slot(StaticPasses(model, 64)))),
    "onnx": lambda model: onnx_copy(model),
}
ENGINE_NAMES = [pytest.param(name, marks=needs_onnx) if name == "onnx" else name for name in ENGINES]


@cache
def onnx_copy(model: PreTrainedModel) -> Slot:
    """One runner for each model, since a session takes longer to open than these texts to write."""
    return sure_runner(model, 64)


def written(
    target: Slot, draft: Slot, name: str, prompt: Sequence[int], sampling: Sampling, seed: int = 0
) -> list[int]:
    policy = POLICIES[name](**STOPPING.get(name, {}))
    drafter = ModelDrafter(draft, policy, predictor=head_for(policy, HEAD))
    with torch.inference_mode():
        target.rollback(0)
        drafter.rollback(0)
        prefill(target, drafter, prompt)
        rounds = list(decode(target, drafter, prompt, LENGTH, sampling, frozenset(), seeded(seed)))
    return [token for round_ in rounds for token in round_.emitted]


# A policy reads numbers, whatever family they come from. Those that read nothing, a law, and a hidden state are tested
# with every family, the others with one.
EVERYWHERE = ("constant", "svip", "specdec++")


@pytest.mark.parametrize("engine", ENGINE_NAMES)
@pytest.mark.parametrize(
    ("family", "name"),
    [("llama", name) for name in WITHOUT_FORESIGHT]
    + [(family, name) for family in ("qwen3", "gpt-neox") for name in EVERYWHERE],
)
@pytest.mark.representatives(
    "llama-svip",
    "llama-none-static",
    "llama-cost-optimal-fixed width",
    "gpt-neox-constant-static",
    "qwen3-svip-graph",
    slow=("qwen3-constant-onnx", "gpt-neox-constant", "llama-cost-optimal-onnx"),
)
def test_greedy_tokens_are_those_of_generate(family: str, name: str, engine: str) -> None:
    target, draft = ENGINES[engine](random_model(family)), ENGINES[engine](noisy_copy(family))
    for prompt in PROMPTS:
        assert written(target, draft, name, prompt, Sampling()) == generated(random_model(family), prompt, LENGTH)


@pytest.mark.parametrize("engine", ENGINE_NAMES)
@pytest.mark.parametrize("name", ["constant", "svip", "specdec++"])
@pytest.mark.parametrize("sampling", [Sampling(1.0), Sampling(0.8, top_k=20, top_p=0.9)], ids=["plain", "filtered"])
@pytest.mark.representatives(
    "plain-svip-onnx",
    "plain-svip-static",
    "filtered-constant-graph",
    slow=("filtered-constant-static", "filtered-specdec++-onnx", "plain-constant-fixed width"),
)
def test_sampled_tokens_are_those_of_the_eager_engine(engine: str, name: str, sampling: Sampling) -> None:
    """The same randomness is used up in the same order, so that the law of the one is the law of the other."""
    model, copy = random_model("llama"), noisy_copy("llama")
    for seed, prompt in enumerate(PROMPTS):
        expected = written(Slot(EagerPasses(model, 64)), Slot(EagerPasses(copy, 64)), name, prompt, sampling, seed)
        assert written(ENGINES[engine](model), ENGINES[engine](copy), name, prompt, sampling, seed) == expected


@pytest.mark.exhaustive
@pytest.mark.skipif(missing_compiler(torch.device("cpu")) is not None, reason="there is no C++ compiler")
def test_compiled_tokens_are_those_of_generate() -> None:
    """Of one layer, because every pass and every policy's reader is compiled; two are in `test_engine_choice`."""
    heard: list[str] = []
    models = random_model("qwen3", layers=1), noisy_copy("qwen3", layers=1)
    target, draft = (Slot(StaticPasses(model, 64, compiler=Compiler("it", heard.append))) for model in models)
    for name in ("constant", "svip", "specdec++"):  # that read nothing, a law, and a hidden state too
        for prompt in PROMPTS:
            expected = generated(random_model("qwen3", layers=1), prompt, LENGTH)
            assert written(target, draft, name, prompt, Sampling()) == expected
    plain = [Slot(EagerPasses(model, 64)) for model in models]
    for name in ("constant", "specdec++"):
        expected = written(*plain, name, PROMPTS[1], Sampling(1.0))
        assert written(target, draft, name, PROMPTS[1], Sampling(1.0)) == expected
    assert heard == []


OPENINGS = ("Once upon a time", "Tom has 3 red apples and buys", "The little dog was sad because")


@pytest.mark.parametrize("engine", ["eager", "static"])
@pytest.mark.exhaustive
def test_deterministic_greedy_output_is_the_same_whatever_the_policy_in_bfloat16(engine: str) -> None:
    changes = ["target.dtype=bfloat16", "draft.dtype=bfloat16", f"engine={engine}", "deterministic=true"]
    profile = resolve("embedded", overrides=[*changes, "sampling.max_new_tokens=64"]).profile
    pair = load_pair(profile)
    for opening in OPENINGS:
        prompt = pair.tokenizer.encode(opening)
        baseline = Session(pair, None).generate(prompt, profile.sampling).tokens
        for name in ("constant", "svip", "adaedl", "self-verify"):
            session = Session(pair, build_drafter(pair, Setting(name)))
            assert session.generate(prompt, profile.sampling).tokens == baseline, name


def test_logits_of_a_fixed_width_do_not_depend_on_how_tokens_came() -> None:
    """Bit for bit, in bfloat16, where eager passes differ."""
    profile = resolve("embedded", overrides=["target.dtype=bfloat16"]).profile
    pair = load_pair(profile, drafts=[])
    tokens = pair.tokenizer.encode(" ".join(2 * OPENINGS))[:22]
    fixed = Slot(FixedWidthPasses(pair.target))
    found = []
    with torch.inference_mode():
        for steps in ((1,), (2, 5), (9, 1, 3)):
            fixed.rollback(0)
            fixed.extend(tokens[:4], keep=0)
            rows, turn = [], 0
            while fixed.length < len(tokens):
                width = steps[turn % len(steps)]
                fixed.extend([1] * 3, keep=3)  # drafts that are refused
                fixed.rollback(fixed.length - 3)
                block = tokens[fixed.length : fixed.length + width]
                rows.append(fixed.extend(block, keep=len(block)).logits)
                turn += 1
            found.append(torch.cat(rows))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_warming_up_leaves_the_runners_as_new() -> None:
    profile = resolve("embedded", overrides=["engine=static"]).profile
    pair = load_pair(profile)
    warm_up(pair, profile.sampling)
    assert [runner.length for runner in (pair.target, *pair.drafts)] == [0, 0]
    eager = load_pair(resolve("embedded").profile)
    prompt = pair.tokenizer.encode(OPENINGS[0])
    texts = []
    for each in (pair, eager):
        session = Session(each, build_drafter(each, Setting.of({"name": "svip", "threshold": 0.6})))
        texts.append(session.generate(prompt, profile.sampling).text)
    assert texts[0] == texts[1]
