"""With a quantised target every text, and every law of texts, is that of the same quantised target alone."""

from collections.abc import Sequence
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from law_table import BY_BLOCK, TARGET
from transformers import PreTrainedModel

from specctl.decoding.composition import build_drafter
from specctl.decoding.drafters import ModelDrafter
from specctl.decoding.loop import decode
from specctl.decoding.round import prefill
from specctl.decoding.sampling import Sampling
from specctl.decoding.session import Session
from specctl.models.loading.assembly import load_pair
from specctl.models.loading.model import load_model
from specctl.models.passes.forward import Forward
from specctl.models.running import eager, one_function
from specctl.models.running.eager import EagerPasses
from specctl.models.running.one_function import ROUNDING, apart, width_fault, widths_apart
from specctl.models.running.passes import Request
from specctl.models.running.slot import Slot
from specctl.policies import POLICIES, Setting
from specctl.profile import resolve
from specctl.profile.schema import ModelTable
from specctl.records import Round
from tests.faults.quantised import ROUNDED, greedy_differs, law_error, single_rows
from tests.support.onnx_models import needs_onnx
from tests.support.quantised_forms import ONNX, OTHER_WAYS, TORCHAO, TRAINED, TREES, Form, target_of
from tests.support.toys import (
    STOPPING,
    WITHOUT_FORESIGHT,
    TableRunner,
    generated,
    head_for,
    noisy_copy,
    random_model,
    random_predictor,
)

pytest.importorskip("torchao")

PROMPT = (1, 5, 9)
LENGTH = 32
OPENINGS = ("Once upon a time", "Tom has 3 red apples and buys", "The little dog was sad because")
HEAD = random_predictor(hidden_size=32)
CHAINS = [way for way in OTHER_WAYS if way not in TREES]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    random_model("llama").save_pretrained(path)
    return path


@cache
def quantised(folder: Path, quantize: str) -> PreTrainedModel:
    return load_model(
        ModelTable(model=str(folder), device="cpu", dtype="float32", quantize=quantize), role="target"
    ).model


def rounds(target: PreTrainedModel, draft: PreTrainedModel, policy: str) -> list[Round]:
    runner = Slot(EagerPasses(target, 64))
    stopping = POLICIES[policy](**STOPPING.get(policy, {}))
    drafter = ModelDrafter(Slot(EagerPasses(draft, 64)), stopping, predictor=head_for(stopping, HEAD))
    with torch.inference_mode():
        prefill(runner, drafter, PROMPT)
        return list(decode(runner, drafter, PROMPT, LENGTH, Sampling()))


@pytest.mark.parametrize("policy", WITHOUT_FORESIGHT)
@pytest.mark.parametrize("quantize", ["int8", "int4"])
@pytest.mark.representatives("int8-constant", "int4-svip", "int4-cost-optimal")
def test_tokens_are_those_of_generate_on_the_quantised_target(folder: Path, quantize: str, policy: str) -> None:
    found = rounds(quantised(folder, quantize), noisy_copy("llama", 0.02), policy)

    expected = generated(quantised(folder, quantize), PROMPT, LENGTH)
    assert [token for round_ in found for token in round_.emitted] == expected


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_drafts_of_a_noisy_copy_are_accepted_and_rejected(folder: Path, quantize: str) -> None:
    found = rounds(quantised(folder, quantize), noisy_copy("llama", 0.02), "constant")

    assert any(round_.accepted for round_ in found)
    assert any(not round_.fully_accepted for round_ in found)


@pytest.mark.parametrize(
    "settings",
    [
        {"target.quantize": "int8"},
        {"target.quantize": "int8", "draft.quantize": "int8"},
        {"target.quantize": "int4", "target.dtype": "bfloat16", "deterministic": "true"},
    ],
    ids=["int8", "int8 pair", "int4 in bfloat16"],
)
@pytest.mark.representatives(slow=("int8 pair",))
def test_the_embedded_pair_writes_what_its_quantised_target_writes(settings: dict[str, Any]) -> None:
    profile = resolve("embedded", overrides=[f"{key}={value}" for key, value in settings.items()]).profile
    pair = load_pair(profile)
    sampling = profile.sampling.model_copy(update={"max_new_tokens": 40})
    rounds = []

    for opening in OPENINGS:
        prompt = pair.tokenizer.encode(opening)
        alone = Session(pair, None).generate(prompt, sampling)
        for policy in ("constant", "svip"):
            drafted = Session(pair, build_drafter(pair, Setting(policy))).generate(prompt, sampling)
            assert drafted.tokens == alone.tokens
            rounds += drafted.rounds

    assert any(round_.accepted for round_ in rounds)
    assert any(not round_.fully_accepted for round_ in rounds)


# A single token, a round and a tree are passes of different widths: what a form computes must not depend on them.
# Graphs of onnxruntime read no trees where their weights are quantised.


@needs_onnx
@pytest.mark.parametrize("way", ["constant", "svip", "cost-optimal", *CHAINS])
@pytest.mark.parametrize("form", ONNX, ids=str)
@pytest.mark.representatives("onnx, int8-svip", "onnx, int4-lookup")
def test_no_way_to_draft_changes_the_text_of_onnxruntimes_forms(form: Form, way: str) -> None:
    assert not greedy_differs(form, way, "llama")


@pytest.mark.exhaustive
@needs_onnx
@pytest.mark.parametrize("form", ONNX, ids=str)
def test_no_way_to_draft_changes_the_text_of_the_trained_target(form: Form) -> None:
    """With the fault that single tokens once made it changes them: this test can fail."""
    for way in ("constant", "svip", "cost-optimal", *CHAINS):
        assert not greedy_differs(form, way, TRAINED)
    with single_rows():
        assert widths_apart(target_of(form, TRAINED), 4096) > ROUNDING[torch.float32]
        assert any(greedy_differs(form, "constant", TRAINED, seed) for seed in range(4))


@pytest.mark.parametrize("way", OTHER_WAYS)
@pytest.mark.parametrize("form", [form for form in TORCHAO if form.quantize != "fp8"], ids=str)
@pytest.mark.representatives("static, int4-hierarchy", "eager, int8-tree")
def test_no_way_to_draft_changes_the_text_of_torchaos_forms(form: Form, way: str) -> None:
    assert not greedy_differs(form, way, "llama")


@pytest.mark.crossed
@needs_onnx
@pytest.mark.parametrize("way", [*(name for name in POLICIES if name != "none"), *CHAINS])
@pytest.mark.parametrize("form", ONNX, ids=str)
@pytest.mark.exhaustive
def test_no_way_to_draft_changes_the_law_of_onnxruntimes_forms(form: Form, way: str) -> None:
    assert law_error(form, way, "T=1") < ROUNDED


@needs_onnx
@pytest.mark.parametrize("form", ONNX, ids=str)
@pytest.mark.slow
def test_block_verification_keeps_the_law_of_onnxruntimes_forms(form: Form) -> None:
    assert law_error(form, "constant", BY_BLOCK) < ROUNDED


@pytest.mark.crossed
@pytest.mark.exhaustive
@pytest.mark.parametrize("way", [*(name for name in POLICIES if name != "none"), *OTHER_WAYS])
@pytest.mark.parametrize("form", TORCHAO, ids=str)
def test_no_way_to_draft_changes_the_law_of_torchaos_forms(form: Form, way: str) -> None:
    assert law_error(form, way, "T=1") < ROUNDED


@pytest.mark.parametrize("form", [*TORCHAO, Form("eager"), Form("static")], ids=str)
def test_widths_of_passes_agree(form: Form) -> None:
    assert widths_apart(target_of(form, "llama"), 64) < ROUNDING[torch.float32] / 10


class DependsOnItsWidth(EagerPasses):
    """Single tokens are computed a little differently."""

    factor = 1.02

    def forward(self, requests: Sequence[Request]) -> list[Forward]:
        (found,) = super().forward(requests)
        single = len(requests[0].tokens) == 1
        return [Forward(found.logits * self.factor, found.hidden, found.states) if single else found]


class DependsOnBranches(EagerPasses):
    """Tokens are computed a little differently where a tree has more than one branch."""

    def forward(self, requests: Sequence[Request]) -> list[Forward]:
        (found,) = super().forward(requests)
        parents = requests[0].parents or ()
        branches = len(set(parents)) < len(parents)
        return [Forward(found.logits * 1.02, found.hidden, found.states) if branches else found]


def test_a_target_whose_branches_differ_is_noticed() -> None:
    assert widths_apart(Slot(EagerPasses(random_model("llama"), 64)), 64) < 1e-4
    assert widths_apart(Slot(DependsOnBranches(random_model("llama"), 64)), 64) > ROUNDING[torch.float32]


def test_a_target_whose_widths_differ_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = quantised(folder, "int8")
    assert width_fault(model, 64) is None
    monkeypatch.setattr(eager, "EagerPasses", DependsOnItsWidth)
    assert str(width_fault(model, 64)).startswith("its quantised weights compute something else")


def test_rounding_is_measured_on_the_model_itself_in_few_bits(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only if the model's rounding exceeds that of small models, and never in float32."""
    monkeypatch.setattr(one_function, "ROUNDING", dict.fromkeys(ROUNDING, 1e-9))
    model = quantised(folder, "int8")
    assert model.dtype == torch.float32
    assert width_fault(model, 64) is not None
    model = deepcopy(random_model("llama")).bfloat16()
    assert width_fault(model, 64) is None
    monkeypatch.setattr(eager, "EagerPasses", DependsOnItsWidth)
    monkeypatch.setattr(DependsOnItsWidth, "factor", 1.5)
    assert width_fault(model, 64) is not None


@pytest.mark.parametrize(
    "runner", [TableRunner(TARGET), Slot(EagerPasses(random_model("mistral"), 64))], ids=["table", "windows"]
)
def test_widths_of_any_runner_are_compared(runner: Slot) -> None:
    assert widths_apart(runner, 3) < 1e-5
    assert runner.length == 0


def test_a_short_context_is_read_as_far_as_it_goes() -> None:
    runner = Slot(EagerPasses(random_model("llama"), 64))
    for context in (8, 20, 70):
        runner.context = context
        assert widths_apart(runner, 64) < 1e-4


def test_what_is_no_number_is_infinitely_far_apart() -> None:
    rows = torch.tensor([1.0, 2.0, float("-inf")])
    assert apart(rows, rows) == apart(torch.ones(3), torch.ones(3)) == 0, "masked alike, or without any spread"
    assert apart(rows + torch.tensor([0, float("nan"), 0]), rows) == float("inf")
    assert apart(rows, torch.tensor([1.0, 2.0, 3.0])) == float("inf")
