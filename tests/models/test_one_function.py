"""A target that makes something else of a text when it reads it in parts is refused, whatever its family."""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BertConfig,
    BertLMHeadModel,
    PreTrainedModel,
    RobertaConfig,
    RobertaForCausalLM,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from specctl.decoding.composition import build_drafter
from specctl.decoding.draft_tokens import read_along
from specctl.decoding.drafters import ModelDrafter
from specctl.decoding.loop import decode, read_prompt
from specctl.decoding.round import NOTHING
from specctl.decoding.sampling import Sampling
from specctl.decoding.session import Session
from specctl.doctor.diagnosis import diagnose
from specctl.errors import ModelError
from specctl.models.files.checkpoint import locate
from specctl.models.loading import model_check
from specctl.models.loading.assembly import assembled, in_memory, load_pair
from specctl.models.loading.model_check import check_model, stored_check
from specctl.models.passes import masks
from specctl.models.passes.cache import cannot_go_back
from specctl.models.passes.masks import mask_obstacle
from specctl.models.running import one_function
from specctl.models.running.eager import EagerPasses
from specctl.models.running.one_function import over_cache, over_rows
from specctl.models.running.pair import Pair
from specctl.models.running.slot import Slot
from specctl.policies import Setting
from specctl.policies.published import Constant
from specctl.profile.schema import DraftTable, ModelTable, PolicyTable, Profile, SamplingTable
from tests.support.checkpoints import save_model, tiny_tokenizer
from tests.support.recurrent_models import noisy_recurrent, recurrent_model
from tests.support.toys import WINDOW, generated, random_model

SHAPE: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
SHAPE |= {"num_attention_heads": 4, "max_position_embeddings": 128, "initializer_range": 0.3, "pad_token_id": 0}
SHAPE |= {"bos_token_id": None, "eos_token_id": None}
DORY = {**SHAPE, "num_key_value_heads": 2, "head_dim": 8, "num_hidden_layers": 4, "n_input_layers": 1}
DORY |= {"n_recurrent_layers": 2, "n_output_layers": 1, "n_recurrent_loops": 2, "layer_types": ["full_attention"] * 4}
GEMMA: dict[str, Any] = {**SHAPE, "sliding_window": WINDOW, "head_dim": 8, "num_key_value_heads": 2}
GEMMA |= {"layer_types": ["sliding_attention", "full_attention"], "use_bidirectional_attention": True}
WRONG = AutoConfig.for_model("gemma3_text", **{**GEMMA, "vocab_size": 258})
HALVES = (torch.float32, torch.bfloat16, torch.float16)
RIGHT = ("llama", "mistral", "gemma2")
STATEFUL = ("qwen3_next", "nemotron_h", "zamba2", "zaya, sliding", "jamba", "lfm2")


def made(family: str, **settings: Any) -> PreTrainedModel:
    with torch.inference_mode(False), torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **settings))
    return model.float().eval()


def encoder(kind: str) -> PreTrainedModel:
    with torch.inference_mode(False), torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        found = BertLMHeadModel(BertConfig(**SHAPE)) if kind == "bert" else RobertaForCausalLM(RobertaConfig(**SHAPE))
    return found.float().eval()


def dory(mode: str) -> PreTrainedModel:
    if "dory" not in CONFIG_MAPPING_NAMES:
        pytest.skip("this version of transformers has no Dory")
    return made("dory", **DORY, recurrent_kv_cache_mode=mode)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("family", [*RIGHT, *STATEFUL])
@pytest.mark.representatives("llama", "zamba2", "zaya, sliding", slow=("mistral", "jamba"))
def test_right_models_differ_by_no_more_than_rounding(family: str, dtype: torch.dtype) -> None:
    model = recurrent_model(family) if family in STATEFUL else random_model(family)
    model = deepcopy(model).to(dtype)  # type: ignore[no-untyped-call]
    reading = over_cache(model, 64)
    assert not reading.wrong, reading
    assert reading.apart < reading.most / 2, "near its bound it would be refused on another machine"
    rows = over_rows(model, 64, reading.most)
    assert (rows is None) is (mask_obstacle(model) is not None)
    assert rows is None or not rows.wrong, rows


def test_a_copy_of_a_model_that_was_read_computes_with_its_own_weights() -> None:
    model = recurrent_model.__wrapped__("jamba")
    assert not over_cache(model, 64).wrong
    reading = over_cache(deepcopy(model).to(torch.bfloat16), 64)
    assert not reading.wrong, reading


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("kind", ["bert", "roberta", "bidirectional"])
def test_what_sees_later_tokens_is_found_out(kind: str, dtype: torch.dtype) -> None:
    model = made("gemma3_text", **GEMMA) if kind == "bidirectional" else encoder(kind)
    reading = over_cache(deepcopy(model).to(dtype), 64)  # type: ignore[no-untyped-call]
    assert reading.wrong
    assert "% of their spread between one pass over a text and passes of 1 and 5 tokens" in reading.told()


def test_a_cache_that_fails_is_found_out() -> None:
    reading = over_cache(dory("last_loop"), 64)
    assert reading.wrong
    assert "its passes over a cache fail (RuntimeError: " in reading.told()


def test_what_a_rollback_leaves_behind_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    rollback = EagerPasses.rollback

    def damaging(self: EagerPasses, slot: int, length: int) -> int:
        back = 0 < length < self.length
        found = rollback(self, slot, length)
        if back:
            self._cache.layers[0].keys[:, :, length - 1] *= 0.5  # type: ignore[index]
        return found

    assert not over_cache(random_model("llama"), 64).wrong
    monkeypatch.setattr(EagerPasses, "rollback", damaging)
    assert over_cache(random_model("llama"), 64).wrong


def test_ties_that_depend_on_the_pass_are_told_before_loading() -> None:
    if "doge" not in CONFIG_MAPPING_NAMES:
        pytest.skip("this version of transformers has no Doge")
    short = AutoConfig.for_model("doge", keep_window_size=8, max_position_embeddings=64)
    assert "beyond 8 tokens it chooses between equal ones" in str(cannot_go_back(short, None))
    assert cannot_go_back(AutoConfig.for_model("doge"), None) is None, "published ones never choose"


def test_a_model_that_differs_over_rows_alone_runs_one_text_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    model = dory("per_loop")
    monkeypatch.setattr(masks, "takes_masks", lambda _: True)  # as of a family that is not known to copy layers
    assert not over_cache(model, 64).wrong
    assert Slot(EagerPasses(model, 64)).no_rows is None
    check_model(in_memory(model, "target"), None, 64)
    assert "its passes over buffers of fixed size fail" in str(Slot(EagerPasses(model, 64)).no_rows)
    assert mask_obstacle(model) is not None, "nor over fixed buffers, nor in trees"


def test_a_draft_may_differ_but_not_fail() -> None:
    table = DraftTable(model="given", policy=PolicyTable(name="constant"))
    target, differs = in_memory(random_model("llama"), "target"), made("gemma3_text", **GEMMA)
    runner = assembled(target, table, differs).drafts[0]
    drafter = ModelDrafter(runner, Constant(4))
    with torch.inference_mode():
        rounds = list(decode(Slot(EagerPasses(random_model("llama"), 64)), drafter, (7, 3, 12), 12, Sampling()))
    assert [token for round_ in rounds for token in round_.emitted] == generated(random_model("llama"), (7, 3, 12), 12)
    with pytest.raises(ModelError, match=r"cannot draft: its passes over a cache fail \(RuntimeError"):
        assembled(target, table, dory("last_loop"))
    copies = dory("per_loop")
    assembled(target, table, copies)
    assert mask_obstacle(copies) is not None


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    save_model(tmp_path / "model", WRONG)
    save_model(tmp_path / "right")
    return tmp_path


def profile(model: Path, **target: Any) -> Profile:
    return Profile(target=ModelTable(model=str(model), device="cpu", dtype="float32", **target), engine="eager")


def test_it_is_refused_with_the_number_and_known_from_then_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = profile(folder / "model")
    with pytest.raises(ModelError, match=r"cannot be a target: its logits differ by [\d.]+% of their spread") as first:
        load_pair(refused)
    assert first.value.exit_code == 3
    assert "Choose a causal language model" in first.value.hint
    kept = stored_check(locate(refused.target, "target"), refused.target, "cpu", "float32", None)
    assert kept is not None
    assert kept.fault in str(first.value.message)
    load_pair(profile(folder / "right"))

    def never(*_: object) -> None:
        raise AssertionError("it was checked before")

    monkeypatch.setattr(one_function, "over_cache", never)
    model_check._MADE.clear()
    with pytest.raises(ModelError) as second:
        load_pair(refused)
    assert second.value.message == first.value.message
    load_pair(profile(folder / "right"))


def test_doctor_finds_it_out_too(folder: Path) -> None:
    refused, right = profile(folder / "model"), profile(folder / "right")
    quick = diagnose(refused)
    assert quick.ready
    assert quick.models[0].checked is False, "it is checked when it is loaded"
    report = diagnose(refused, tries=True)
    assert not report.ready
    (problem,) = report.problems
    with pytest.raises(ModelError) as loaded:
        load_pair(refused)
    assert (problem.message, problem.hint) == (loaded.value.message, loaded.value.hint)
    assert not diagnose(refused).ready, "it is known now"
    assert diagnose(right, tries=True).models[0].checked is False, "an ordinary model is not loaded for that"
    load_pair(right)
    assert diagnose(right).models[0].checked


def test_an_error_that_may_pass_is_not_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(one_function, "_whole", Mock(side_effect=RuntimeError("a device fell off")))
        with pytest.raises(ModelError, match="its passes over a cache fail"):
            load_pair(profile(folder / "right"))
    model_check._MADE.clear()
    load_pair(profile(folder / "right"))


@pytest.mark.parametrize("damage", ["", "[]", "{}", '{"schema_version": 3, "fault": 3}', '{"schema_version": 0}'])
def test_a_kept_check_that_is_damaged_is_made_again(folder: Path, damage: str) -> None:
    right = profile(folder / "right")
    load_pair(right)
    (kept,) = (folder / "cache" / "specctl" / "checks").iterdir()
    told = json.loads(kept.read_text())
    kept.write_text(damage)
    model_check._MADE.clear()
    load_pair(right)
    assert json.loads(kept.read_text()) == told


def test_other_files_are_checked_anew(folder: Path) -> None:
    load_pair(profile(folder / "right"))
    save_model(folder / "right", WRONG)
    with pytest.raises(ModelError, match="cannot be a target"):
        load_pair(profile(folder / "right"))


def test_a_folder_that_cannot_be_written_to_is_no_obstacle(folder: Path) -> None:
    (folder / "cache").write_text("no folder")
    load_pair(profile(folder / "right"))


@pytest.mark.parametrize("family", ["nemotron_h", "zamba2"])
def test_a_prompt_is_read_in_one_pass_with_its_draft_too(family: str) -> None:
    """Their time step is limited in wide passes alone: in parts a prompt gives other logits."""
    model, prompt, draft = recurrent_model(family), [7, 3, 12, 5, 9, 22], [1, 2, 3]
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([prompt])).logits[0, -1]
        runner = Slot(EagerPasses(model, 64))
        assert runner.whole_prompts
        found = torch.as_tensor(runner.extend([*prompt, *draft], 4).logits)
        apart = float((found[0] - expected).abs().max())
        runner.rollback(len(prompt))
        assert runner.length == len(prompt), "the state behind the prompt is kept"
        runner.rollback(0)
        runner.extend(prompt[:-1], 0)
        parts = torch.as_tensor(runner.extend(prompt[-1:], 1).logits)
        assert apart < float((parts[0] - expected).abs().max()) / 5


@pytest.mark.parametrize("prompt", [(7,), (1, 5, 9), tuple(range(1, 20))], ids=len)
@pytest.mark.parametrize("family", ["nemotron_h", "zamba2"])
@pytest.mark.representatives("nemotron_h", slow=("zamba2",))
def test_texts_of_such_models_are_generates(family: str, prompt: tuple[int, ...]) -> None:
    with torch.inference_mode():
        target = Slot(EagerPasses(recurrent_model(family), 64))
        drafter = ModelDrafter(Slot(EagerPasses(noisy_recurrent(family, 0.05), 64)), Constant(4))
        read_prompt(target, drafter, prompt)
        rounds = list(decode(target, drafter, prompt, 24, Sampling()))
    assert [token for round_ in rounds for token in round_.emitted] == generated(recurrent_model(family), prompt, 24)


@pytest.mark.parametrize(("family", "length"), [("nemotron_h", 8), ("zamba2", 8), ("qwen3_next", 40)])
@pytest.mark.representatives("nemotron_h", slow=("zamba2", "qwen3_next"))
def test_only_a_beginning_that_can_be_read_by_itself_is_kept(family: str, length: int) -> None:
    target, draft = Slot(EagerPasses(recurrent_model(family), 64)), Slot(EagerPasses(noisy_recurrent(family, 0.05), 64))
    pair = Pair(target, (draft,), tiny_tokenizer(), frozenset(), 1 << 20, (), ({},))
    session = Session(pair, build_drafter(pair, Setting("constant")), keep_caches=True)
    table = SamplingTable(max_new_tokens=length)
    said = session.generate((7, 3, 12), table).tokens
    prompt = (7, 3, 12, *said, 5)
    assert list(session.generate(prompt, table).tokens) == generated(recurrent_model(family), prompt, length)
    assert (session.kept == 0) is target.whole_prompts


def test_a_head_does_not_have_such_a_prompt_read_in_parts() -> None:
    target = Slot(EagerPasses(recurrent_model("zamba2"), 64))
    head = Mock(observed=0, rests=Mock(return_value=0))
    head.draft.return_value = NOTHING
    prompt = (7, 3, 12, 5)
    with torch.inference_mode():
        read_prompt(target, head, prompt)
        assert target.length == 0
        rounds = decode(target, head, prompt, 8, Sampling())
        first, second = next(rounds), next(rounds)
    assert [call.args[1] for call in head.draft.call_args_list] == [0, 6], "what it drafts from was not there at first"
    assert [*first.emitted, *second.emitted] == generated(recurrent_model("zamba2"), prompt, 8)[:2]


def test_a_text_that_is_read_again_has_the_logits_that_it_was_written_with() -> None:
    target, prompt = Slot(EagerPasses(recurrent_model("zamba2"), 64)), (7, 3, 12, 5)
    text = generated(recurrent_model("zamba2"), prompt, 6)
    with torch.inference_mode():
        expected = [torch.as_tensor(target.extend(prompt, 1).logits)]
        expected += [torch.as_tensor(target.extend([token], 1).logits) for token in text[:-1]]
        for cached in (False, True):
            ((part, (forward,)),) = read_along([target], prompt, text, cached=cached)
            assert part == slice(0, 6)
            assert (torch.as_tensor(forward.logits) - torch.cat(expected)).abs().max() < 1e-4
