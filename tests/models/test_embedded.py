"""The models that ship with the package, whatever their weights say."""

import hashlib
from collections.abc import Iterator

import pytest
import torch
from transformers import GenerationConfig

from specctl.decoding.answers import Answerer
from specctl.decoding.composition import build_drafter
from specctl.decoding.prompt_format import PromptFormat
from specctl.decoding.session import Session
from specctl.jsonl import Record
from specctl.models.loading.assembly import load_pair
from specctl.models.running.pair import Pair
from specctl.policies import Setting
from specctl.profile import resolve
from specctl.profile.schema import SamplingTable, model_path
from specctl.records import StopReason
from tests.support.toys import WITHOUT_FORESIGHT

PROMPT = "Once upon a time"
LENGTH = 24
RECORDS = [Record(line, line, {"prompt": text}) for line, text in enumerate([PROMPT, "Tom has 3", "The"], start=1)]
# Lambda falls after every round, whatever was accepted: no round is a whole max_draft long.
CARRIES = {"carry_over": True, "eps": 0.5, "beta2": 0.5, "alpha": 0.0, "max_draft": 40}


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    """With a head of each kind."""
    profile = resolve("embedded").profile
    assert profile.draft is not None
    return load_pair(profile, drafts=[profile.draft], heads=[["embedded:draft-head", "embedded:disco-head"]])


@pytest.fixture(scope="module")
def said(pair: Pair) -> list[int]:
    """What transformers' own ``generate`` writes."""
    config = GenerationConfig(
        do_sample=False, max_new_tokens=LENGTH, eos_token_id=sorted(pair.eos), pad_token_id=min(pair.eos)
    )
    ids = pair.tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    (whole,) = pair.models[0].generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
    return whole[ids.shape[1] :].tolist()


def answerer(pair: Pair, policy: str, sampling: SamplingTable, **settings: object) -> Answerer:
    drafter = build_drafter(pair, Setting.of({"name": policy, **settings}))
    return Answerer(Session(pair, drafter), PromptFormat(pair.tokenizer, chat=False), sampling)


def test_the_family_shares_a_tokenizer_and_a_long_context(pair: Pair) -> None:
    assert pair.context >= 1024
    assert len(pair.tokenizer) == 4096
    assert pair.eos == {pair.tokenizer.eos_token_id}
    assert pair.tokenizer.chat_template


def test_the_head_belongs_to_the_draft(pair: Pair) -> None:
    """Loading refuses one that was trained on other weights."""
    assert pair.predictor is not None
    assert pair.predictor.hidden_size == pair.models[1].config.hidden_size


def test_the_draft_head_has_one_that_stops_its_drafts(said: list[int]) -> None:
    own = load_pair(resolve("embedded-eagle3").profile)
    (completion,) = answerer(own, "specdec++", SamplingTable(max_new_tokens=LENGTH)).answer(RECORDS[0])
    assert list(completion.tokens) == said
    assert any(played.stop is StopReason.POLICY for played in completion.rounds)
    assert {step.accept_prob for played in completion.rounds for step in played.steps[:1]} == {1.0}
    assert all(0 < step.accept_prob < 1 for played in completion.rounds for step in played.steps[1:])


def test_the_target_is_deeper_than_the_draft(pair: Pair) -> None:
    target, draft = pair.models
    assert target.config.num_hidden_layers > draft.config.num_hidden_layers


@pytest.mark.parametrize("text", ["Tom said: 'café' — 漢字 😀!\n\t  x=3*4", "  two  spaces ", "\x00\x7f"])
def test_the_tokenizer_gives_every_text_back(pair: Pair, text: str) -> None:
    assert pair.tokenizer.decode(pair.tokenizer(text, add_special_tokens=False)["input_ids"]) == text


@pytest.mark.parametrize("policy", WITHOUT_FORESIGHT)
@pytest.mark.representatives("constant", "svip", "specdec++", "cost-optimal", "disco")
def test_greedy_text_is_that_of_generate(pair: Pair, said: list[int], policy: str) -> None:
    answers = answerer(pair, policy, SamplingTable(max_new_tokens=LENGTH))
    (completion,) = answers.answer(RECORDS[0])
    assert list(completion.tokens) == said
    assert completion.text == pair.tokenizer.decode(said, skip_special_tokens=True)


# What cost-optimal drafts, and so which draws are made, hangs on what it learned before and on the clock.
@pytest.mark.parametrize("policy", [name for name in WITHOUT_FORESIGHT if name != "cost-optimal"])
@pytest.mark.representatives("bandit")
def test_a_record_is_the_same_after_others_as_alone(pair: Pair, policy: str) -> None:
    sampling = SamplingTable(max_new_tokens=LENGTH, temperature=1.0, seed=3)
    anew = {"carry_over": False} if policy == "bandit" else {}
    stream = answerer(pair, policy, sampling, **anew)
    after_others = [stream.answer(record)[0] for record in RECORDS]
    alone = [answerer(pair, policy, sampling, **anew).answer(record)[0] for record in RECORDS]
    assert [completion.tokens for completion in after_others] == [completion.tokens for completion in alone]
    assert [len(completion.rounds) for completion in after_others] == [len(completion.rounds) for completion in alone]


def thresholds(stream: Answerer) -> list[float | None]:
    return [stream.answer(record)[0].rounds[0].threshold for record in RECORDS]


def test_only_a_policy_that_carries_over_remembers_other_records(pair: Pair) -> None:
    sampling = SamplingTable(max_new_tokens=LENGTH)
    carried = thresholds(answerer(pair, "adaedl", sampling, **CARRIES))
    assert carried[0] != carried[1]
    restarted = thresholds(answerer(pair, "adaedl", sampling, **CARRIES | {"carry_over": False}))
    assert len(set(restarted)) == 1


def test_seeds_tell_texts_apart(pair: Pair) -> None:
    def say(seed: int) -> tuple[int, ...]:
        return (
            answerer(pair, "svip", SamplingTable(max_new_tokens=LENGTH, temperature=1.0, seed=seed))
            .answer(RECORDS[0])[0]
            .tokens
        )

    assert say(1) == say(1)
    assert len({say(seed) for seed in range(4)}) > 1


@pytest.mark.parametrize("name", ["target", "mid", "draft"])
def test_the_card_gives_the_checksum_of_what_ships(name: str) -> None:
    folder = model_path(name)
    checksum = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    assert checksum in (folder.parent / "MODEL_CARD.md").read_text(encoding="utf-8")
