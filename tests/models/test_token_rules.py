"""The rules of a generation_config.json hold in the target and in drafts, and change nothing about exactness."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from specctl.decoding.composition import build_drafter
from specctl.decoding.drafters import ModelDrafter
from specctl.decoding.hierarchy import PreVerifiedDrafter
from specctl.decoding.loop import decode
from specctl.decoding.round import prefill
from specctl.decoding.sampling import Sampling
from specctl.decoding.session import Session
from specctl.doctor.diagnosis import diagnose
from specctl.errors import ModelError, ProfileError
from specctl.models.loading.assembly import load_pair
from specctl.models.running.config_rules import TokenRules, config_rules
from specctl.models.running.eager import EagerPasses
from specctl.models.running.ruled import RuledPasses
from specctl.models.running.slot import Slot
from specctl.models.running.text_rules import rules_in, unsupported_in
from specctl.models.running.transforms import CheckedPasses, FixedWidthPasses
from specctl.policies import Setting
from specctl.policies.published import Constant, Svip
from specctl.profile.schema import Profile, SamplingTable
from tests.support.checkpoints import llama_config, save_model
from tests.support.recurrent_models import noisy_recurrent, recurrent_model
from tests.support.toys import noisy_copy, random_model

PROMPT, LENGTH = (7, 3, 12, 5, 7), 24
RULES: dict[str, dict[str, object]] = {
    "repetition penalty": {"repetition_penalty": 1.3},
    "no n-gram twice": {"no_repeat_ngram_size": 2},
    "suppressed": {"suppress_tokens": list(range(10, 40))},
    "bad words": {"bad_words_ids": [[50], [12, 9], [29]]},
    "bias": {"sequence_bias": [[[9], 3.0], [[44], -4.0]]},
    "forced start": {"forced_bos_token_id": 6},
    "all of them": {
        "repetition_penalty": 1.1,
        "no_repeat_ngram_size": 3,
        "suppress_tokens": [1, 2, 3],
        "min_length": 9,
    },
}


def generated(settings: dict[str, object], prompt: tuple[int, ...], eos: int | None = None) -> list[int]:
    config = GenerationConfig(do_sample=False, max_new_tokens=LENGTH, eos_token_id=eos, pad_token_id=0, **settings)
    ids = torch.tensor([prompt])
    said = random_model("llama").generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
    return said[0, len(prompt) :].tolist()


def ruled(settings: dict[str, object], eos: frozenset[int] = frozenset()) -> Callable[[Slot], Slot]:
    def wrap(runner: Slot) -> Slot:
        return Slot(RuledPasses(runner, TokenRules.of(GenerationConfig(**settings), eos, 64, runner.device)))

    return wrap


@pytest.mark.parametrize("prompt", [PROMPT, PROMPT[:1]], ids=["prompt", "one token"])
@pytest.mark.parametrize("name", RULES)
@pytest.mark.representatives(
    "repetition penalty-prompt",
    "bad words-prompt",
    "suppressed-one token",
    "forced start-one token",
    "bias-one token",
    "all of them-prompt",
)
def test_tokens_are_those_of_generate_under_the_same_rules(name: str, prompt: tuple[int, ...]) -> None:
    wrap = ruled(RULES[name])
    near, far = noisy_copy("llama"), noisy_copy("llama", 0.05)
    middle = PreVerifiedDrafter(
        ModelDrafter(wrap(Slot(EagerPasses(far, 64))), Constant(3)),
        wrap(Slot(EagerPasses(near, 64))),
        Svip(c=1.0, threshold=1.2),
    )
    expected = generated(RULES[name], prompt)
    for drafter in (None, ModelDrafter(wrap(Slot(EagerPasses(near, 64))), Constant()), middle):
        target = wrap(Slot(EagerPasses(random_model("llama"), 64)))
        with torch.inference_mode():
            prefill(target, drafter, prompt)
            rounds = list(decode(target, drafter, prompt, LENGTH, Sampling()))
        assert [token for round_ in rounds for token in round_.emitted] == expected
        if drafter is not None:
            assert sum(round_.accepted for round_ in rounds) > 3, "the draft does not follow the rules"


def test_the_rules_make_a_difference() -> None:
    plain = generated({}, PROMPT)
    for name, settings in RULES.items():
        prompt = PROMPT[:1] if name == "forced start" else PROMPT
        assert generated(settings, prompt) != (plain if prompt == PROMPT else generated({}, prompt)), name


def test_an_end_before_the_minimum_length_is_ruled_out() -> None:
    end = generated({}, PROMPT)[2]
    settings = {"min_length": len(PROMPT) + 10}
    target = ruled(settings, frozenset({end}))(Slot(EagerPasses(random_model("llama"), 64)))
    with torch.inference_mode():
        rounds = list(decode(target, None, PROMPT, LENGTH, Sampling(), frozenset({end})))
    tokens = [token for round_ in rounds for token in round_.emitted]
    assert tokens == generated(settings, PROMPT, end)
    assert end not in tokens[:10]


@pytest.mark.parametrize(
    "setting",
    [
        {"num_beams": 3},
        {"penalty_alpha": 0.6},
        {"guidance_scale": 2.0},
        {"min_new_tokens": 4},
        {"forced_eos_token_id": 3},
        {"begin_suppress_tokens": [1]},
        {"exponential_decay_length_penalty": [5, 1.2]},
        {"encoder_repetition_penalty": 0},
        {"encoder_no_repeat_ngram_size": -1},
    ],
    ids=lambda setting: next(iter(setting)),
)
@pytest.mark.representatives("num_beams", "guidance_scale", "min_new_tokens", "encoder_repetition_penalty")
def test_what_cannot_be_verified_is_refused_by_both_doctor_and_generate(
    tmp_path: Path, setting: dict[str, object]
) -> None:
    folder = save_model(tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 0, **setting}))
    profile = Profile.model_validate({"target": {"model": str(folder)}})

    with pytest.raises(ModelError, match=next(iter(setting))) as found:
        load_pair(profile)
    (problem,) = diagnose(profile).problems
    assert (problem.message, problem.hint) == (found.value.message, found.value.hint)

    free = profile.model_copy(update={"generation_config": False})
    assert load_pair(free).target.length == 0
    assert diagnose(free).ready


def test_a_profile_decides_whether_the_rules_hold(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps({"repetition_penalty": 1.2, "eos_token_id": [0, 5]}))
    profile = Profile.model_validate({"target": {"model": str(folder)}, "draft": {"model": str(folder)}})

    pair = load_pair(profile)
    assert all(isinstance(runner.passes, RuledPasses) for runner in (pair.target, *pair.drafts))
    assert pair.eos == {0, 5}
    assert diagnose(profile).models[0].rules == ["repetition_penalty = 1.2"]

    free = load_pair(profile.model_copy(update={"generation_config": False}))
    assert not isinstance(free.target.passes, RuledPasses)


def test_ids_beyond_the_shared_vocabulary_are_left_out() -> None:
    settings = {"bad_words_ids": [[50], [300]], "sequence_bias": [[[9], 3.0], [[90], 1.0]], "suppress_tokens": [4, 99]}
    target = ruled(settings)(Slot(EagerPasses(random_model("llama"), 60)))
    with torch.inference_mode():
        logits = target.extend(PROMPT, keep=2).logits
    assert logits.shape == (2, 60)
    assert logits[:, [4, 50]].eq(-torch.inf).all()


def test_words_that_can_never_be_written_are_no_rules() -> None:
    """A word with one id beyond the vocabulary bans nothing; where all are such, there is no rule."""
    words = {"bad_words_ids": [[9, 300], [50, 12]], "sequence_bias": [[[9, 300], 3.0], [[44], -4.0]]}
    target = ruled(words)(Slot(EagerPasses(random_model("llama"), 60)))
    fewer = ruled({"bad_words_ids": [[50, 12]], "sequence_bias": [[[44], -4.0]]})(
        Slot(EagerPasses(random_model("llama"), 60))
    )
    text = (*PROMPT, 9, 50)
    with torch.inference_mode():
        logits = target.extend(text, keep=len(text)).logits
        assert logits.equal(fewer.extend(text, keep=len(text)).logits)
    assert logits[-1, 12] == -torch.inf
    for none in ({"bad_words_ids": [[300], [9, 61]]}, {"sequence_bias": [[[300], 1.0]]}):
        assert not TokenRules.of(GenerationConfig(**none), frozenset(), 60, torch.device("cpu")).active


@pytest.mark.parametrize("family", ["mamba", "falcon_h1", "qwen3_next"])
@pytest.mark.parametrize("name", ["repetition penalty", "no n-gram twice"])
@pytest.mark.representatives("repetition penalty-mamba")
def test_rules_over_a_state_that_goes_back_too_far(family: str, name: str) -> None:
    """Its runner is shorter after a rollback than was asked, and reads accepted tokens again."""
    wrap = ruled(RULES[name])
    target, draft = (wrap(Slot(EagerPasses(make(family), 64))) for make in (recurrent_model, noisy_recurrent))
    drafter = ModelDrafter(draft, Constant(4))
    with torch.inference_mode():
        prefill(target, drafter, PROMPT)
        rounds = list(decode(target, drafter, PROMPT, 2 * LENGTH, Sampling()))
    model = recurrent_model(family)
    model.generation_config.eos_token_id = None
    config = GenerationConfig(do_sample=False, max_new_tokens=2 * LENGTH, pad_token_id=0, **RULES[name])
    ids = torch.tensor([PROMPT])
    said = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
    assert [token for round_ in rounds for token in round_.emitted] == said[0, len(PROMPT) :].tolist()
    assert sum(0 < round_.accepted < round_.drafted for round_ in rounds) > 2, "hardly a round was taken back in part"


@pytest.mark.parametrize("kind", [np.asarray, torch.from_numpy], ids=["numpy", "torch"])
def test_a_repetition_penalty_alone_gives_the_numbers_of_transformers(kind: Any) -> None:
    rows = np.random.default_rng(0).normal(0, 3, (4, 64)).astype(np.float32)
    rows[2, 5], text = -np.inf, [3, 60, 3, 5, 9, 9]
    settings = GenerationConfig(repetition_penalty=1.3), frozenset({1}), 64, torch.device("cpu")
    own, theirs = config_rules(*settings), TokenRules.of(*settings)
    assert own is not None
    assert not isinstance(own, TokenRules)
    assert torch.equal(torch.as_tensor(own.apply(kind(rows), text)), theirs.apply(rows, text))
    for more, made in (({"no_repeat_ngram_size": 2}, TokenRules), ({"repetition_penalty": 1.0}, type(None))):
        assert type(config_rules(GenerationConfig(**{"repetition_penalty": 1.3, **more}), *settings[1:])) is made


def test_settings_without_effect_are_no_rules() -> None:
    config = GenerationConfig(repetition_penalty=1.0, no_repeat_ngram_size=0, num_beams=1, temperature=0.6, top_p=0.9)
    assert not rules_in(config)
    assert not unsupported_in(config)


def test_the_same_around_another_runner_follows_the_same_rules_over_a_cache_of_its_own() -> None:
    model = random_model("llama", seed=1)
    vocabulary = model.config.vocab_size
    rules = TokenRules.of(GenerationConfig(repetition_penalty=1.5), frozenset(), vocabulary, "cpu")
    ruled = Slot(RuledPasses(Slot(EagerPasses(model, vocabulary)), rules))
    ruled.extend(list(PROMPT), keep=0)
    twin = Slot(CheckedPasses(ruled, lambda: None, "target")).transformed(Slot(EagerPasses(model, vocabulary)))  # type: ignore[arg-type]
    assert (twin.length, twin.engine) == (0, "eager")
    found = twin.extend(list(PROMPT), keep=1).logits
    assert torch.equal(
        found, Slot(RuledPasses(Slot(EagerPasses(model, vocabulary)), rules)).extend(list(PROMPT), keep=1).logits
    )
    assert not torch.equal(found, Slot(EagerPasses(model, vocabulary)).extend(list(PROMPT), keep=1).logits)
    blocks = Slot(FixedWidthPasses(Slot(EagerPasses(model, vocabulary)), 4)).transformed(
        Slot(EagerPasses(model, vocabulary))
    )
    assert blocks.engine == "eager, blocks of 4"


ABOUT_PROMPTS = {"encoder_repetition_penalty": 4.0, "encoder_no_repeat_ngram_size": 2}


@pytest.mark.parametrize(
    "settings",
    [
        {"encoder_repetition_penalty": 4.0},
        {"encoder_no_repeat_ngram_size": 2, "repetition_penalty": 1.3},
        {**ABOUT_PROMPTS, "no_repeat_ngram_size": 3},
    ],
    ids=lambda settings: "-".join(settings),
)
def test_rules_about_the_prompt_are_those_of_generate(tmp_path: Path, settings: dict[str, Any]) -> None:
    """Of the file, and of a sampling table that has them in the file's stead."""
    folder = save_model(tmp_path / "model", llama_config(initializer_range=0.4))
    tables = {"target": {"model": str(folder)}, "draft": {"model": str(folder), "policy": {"name": "constant"}}}
    profile = Profile.model_validate({**tables, "engine": "eager"})
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompt = (43, 20, 121, 70, *(129, 187, 205, 125, 46, 39, 78, 248, 241, 125, 120, 132), 39, 152)
    prompt += (94, 125, 127, 168, 248, 162, 187, 10, 77, 241)  # what it writes behind the first four
    table = SamplingTable(max_new_tokens=24)

    def written(table: SamplingTable) -> list[int]:
        pair = load_pair(profile)
        drafter = build_drafter(pair, Setting("constant"))
        return list(Session(pair, drafter).generate(prompt, table).tokens)

    def expected(**rules: Any) -> list[int]:
        config = GenerationConfig(do_sample=False, max_new_tokens=24, eos_token_id=0, pad_token_id=0, **rules)
        ids = torch.tensor([prompt])
        said = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
        return said[0, len(prompt) :].tolist()

    plain = written(table)
    assert plain == expected()
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 0, **settings}))
    assert written(table) == expected(**settings) != plain
    about = {name: value for name, value in settings.items() if name in ABOUT_PROMPTS}
    assert diagnose(profile).models[0].rules == [
        f"{name} = {settings[name]}" for name in sorted(settings, key=lambda name: name in ABOUT_PROMPTS)
    ]
    other = dict.fromkeys(about, 3)
    assert written(table.model_copy(update=other)) == expected(**{**settings, **{n: type(about[n])(3) for n in about}})
    with pytest.raises(ProfileError, match=f"{', '.join(about)} is in the target's generation_config.json"):
        Sampling.measured(table, load_pair(profile))
    assert written(SamplingTable(max_new_tokens=24, **about)) == expected(**settings), "the same in both places"
