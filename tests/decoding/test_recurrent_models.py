"""Models with a recurrent state: what they write is what they would have written alone, whatever was taken back."""

import warnings
from collections import Counter
from copy import deepcopy
from functools import cache

import pytest
import torch
import transformers
from transformers import GenerationConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from specctl.decoding.draft import Drafter
from specctl.decoding.drafters import ModelDrafter
from specctl.decoding.hierarchy import PreVerifiedDrafter
from specctl.decoding.loop import decode
from specctl.decoding.round import prefill
from specctl.decoding.sampling import Sampling
from specctl.models.passes.cache import CANNOT_GO_BACK
from specctl.models.passes.recurrent_state import SPACING, TESTED, untested
from specctl.models.running.eager import REREAD, EagerPasses
from specctl.models.running.slot import Slot
from specctl.policies.published import Constant, Svip
from specctl.records import Round
from tests.support.enumeration import largest_difference, law_of, walk
from tests.support.recurrent_models import CONVOLUTIONS, FAMILIES, NOT_HERE, RECURRENT, noisy_recurrent, recurrent_model
from tests.support.toys import WINDOW, random_model, seeded

pytestmark = pytest.mark.usefixtures("inference_mode")

LENGTH = 24
ONE, SHORT, LONG = (7,), (1, 5, 9), tuple(torch.randint(1, 64, (2 * WINDOW + 3,), generator=seeded(5)).tolist())
PROMPTS = (ONE, SHORT, LONG)
VOCABULARY = 60  # the models have four more, as padding
TOKENS: list[int] = torch.randint(0, VOCABULARY, (200,), generator=seeded(9)).tolist()


def written(target: Slot, drafter: Drafter | None, prompt: tuple[int, ...]) -> tuple[list[int], list[Round]]:
    target.rollback(0)
    if drafter is not None:
        drafter.rollback(0)
    prefill(target, drafter, prompt)
    rounds = list(decode(target, drafter, prompt, LENGTH, Sampling()))
    return [token for round_ in rounds for token in round_.emitted], rounds


@cache
def alone(family: str, prompt: tuple[int, ...]) -> list[int]:
    return written(Slot(EagerPasses(recurrent_model(family), 64)), None, prompt)[0]


def drafters(family: str) -> dict[str, Drafter]:
    near, far = noisy_recurrent(family), noisy_recurrent(family, 0.05)
    middle = PreVerifiedDrafter(
        ModelDrafter(Slot(EagerPasses(far, 64)), Constant(3)), Slot(EagerPasses(near, 64)), Svip(c=1.0, threshold=1.2)
    )
    return {
        "constant": ModelDrafter(Slot(EagerPasses(near, 64)), Constant()),
        "another family": ModelDrafter(Slot(EagerPasses(random_model("llama"), 64)), Constant(3)),
        "hierarchy": middle,
    }


@pytest.mark.slow
def test_every_stateful_family_is_tested_or_refused() -> None:
    stateful = set()
    for family, names in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        for name in [names] if isinstance(names, str) else names:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # of how some models use torch
                if getattr(getattr(transformers, name), "_is_stateful", False):
                    stateful.add(family)
    text = {"qwen3_5", "qwen3_5_moe", "qwen4_exp"}  # whose text models are tested
    assert stateful - text <= RECURRENT.keys() | NOT_HERE | CANNOT_GO_BACK.keys()


def test_other_families_are_checked_when_they_run() -> None:
    assert {family for family in FAMILIES if "," not in family} <= TESTED
    assert not untested(recurrent_model("mamba"))
    assert not untested(random_model("mistral"))
    model = deepcopy(recurrent_model("mamba"))
    model.config.model_type = "mamba9"
    assert untested(model)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.representatives("qwen3_next", "lfm2", slow=("mamba2", "jamba", "zaya, sliding"))
def test_target_only_decoding_is_generate(family: str) -> None:
    model = recurrent_model(family)
    config = GenerationConfig(do_sample=False, max_new_tokens=LENGTH, pad_token_id=0)
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        model.generation_config.eos_token_id = None
        said = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
        assert alone(family, prompt) == said[0, len(prompt) :].tolist()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.representatives("lfm2", slow=("mamba2", "jamba", "bamba", "olmo_hybrid", "zaya, sliding"))
def test_tokens_are_those_of_the_target_alone(family: str) -> None:
    ends: Counter[bool] = Counter()
    for name, drafter in drafters(family).items():
        for prompt in PROMPTS if name == "constant" else (LONG,):
            tokens, rounds = written(Slot(EagerPasses(recurrent_model(family), 64)), drafter, prompt)
            assert tokens == alone(family, prompt), (name, prompt)
            ends.update(0 < round_.accepted < round_.drafted for round_ in rounds)
    assert ends[True] > 5, "hardly a round was taken back in part"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.representatives("qwen3_next", "lfm2", slow=("mamba2", "jamba", "zaya, sliding"))
def test_what_it_writes_is_not_monotonous(family: str) -> None:
    assert len(set(alone(family, SHORT))) > 5


END = 120
SMALL, PROMPT, FEW = 2, (1, 0), 3


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.representatives("qwen3_next", slow=("jamba", "lfm2"))
def test_sampled_tokens_have_the_law_of_the_target(family: str) -> None:
    """Over every branch of chance, with a vocabulary of two."""
    target, draft = recurrent_model(family, vocabulary=SMALL), noisy_recurrent(family, vocabulary=SMALL)
    sampling = Sampling(temperature=1.0)

    def play(drafter: bool) -> tuple[int, ...]:
        drafts = ModelDrafter(Slot(EagerPasses(draft, SMALL)), Constant(2)) if drafter else None
        rounds = decode(Slot(EagerPasses(target, SMALL)), drafts, PROMPT, FEW, sampling)
        return tuple(token for round_ in rounds for token in round_.emitted)

    drafted, plain = (law_of(walk(lambda drafter=drafter: play(drafter))) for drafter in (True, False))
    assert sum(plain.values()) == pytest.approx(1)
    assert len(plain) == SMALL**FEW
    assert largest_difference(drafted, plain) < 2e-5


@pytest.mark.parametrize("family", RECURRENT)
@pytest.mark.representatives("qwen3_next", slow=("jamba", "mamba2"))
def test_a_rollback_re_reads_no_more_than_a_round(family: str) -> None:
    """Otherwise a long text would be read again and again."""
    target = Slot(EagerPasses(recurrent_model(family), 64))
    widths: list[int] = []
    target.passes._model.register_forward_pre_hook(  # type: ignore[no-untyped-call]
        lambda _, __, given: widths.append(given["input_ids"].shape[1]), with_kwargs=True
    )
    drafter = ModelDrafter(Slot(EagerPasses(random_model("llama"), 64)), Constant(4))
    try:
        _, rounds = written(target, drafter, LONG)
    finally:
        target.passes._model._forward_pre_hooks.clear()
    assert max(widths[2:]) <= REREAD + 1 + 4
    assert sum(widths) < len(LONG) + sum(1 + round_.drafted + REREAD for round_ in rounds)


@pytest.mark.parametrize("family", ["qwen3_next", "falcon_h1", "jamba", "zaya, sliding", "lfm2"])
@pytest.mark.parametrize("back", [1, SPACING, 2 * SPACING + 5, 100])
@pytest.mark.representatives(
    "1-qwen3_next", f"{2 * SPACING + 5}-lfm2", "100-qwen3_next", slow=("1-falcon_h1", "32-jamba", "69-zaya, sliding")
)
def test_a_far_rollback(family: str, back: int) -> None:
    """The cache may end up shorter than asked, but what follows must be right."""
    runner = Slot(EagerPasses(recurrent_model(family), VOCABULARY))
    for start in range(0, END, 6):
        runner.rollback(start)
        runner.extend(TOKENS[runner.length : start + 6], keep=5)
    text = [*TOKENS[: END - back], 7, 8]
    runner.rollback(END - back)
    assert runner.length <= END - back
    if family not in ("zaya, sliding", "lfm2"):  # what they trimmed is gone
        assert back > 2 * SPACING or runner.length > 0
    logits = runner.extend(text[runner.length :], keep=2).logits
    fresh = Slot(EagerPasses(recurrent_model(family), VOCABULARY))
    fresh.extend(text[:1], keep=0)
    steps = [fresh.extend([token], keep=1).logits for token in text[1:]]
    torch.testing.assert_close(logits, torch.cat(steps[-2:]), atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("family", CONVOLUTIONS)
def test_convolutions_go_back_without_reading_again(family: str) -> None:
    runner = Slot(EagerPasses(recurrent_model(family), VOCABULARY))
    runner.extend(TOKENS[:20], keep=0)
    runner.rollback(20)
    runner.extend(TOKENS[20:26], keep=6)
    runner.rollback(22)
    assert runner.length == 22
