"""Every setting of HSDDW by profile, on the models that ship with the package."""

from dataclasses import dataclass

import pytest
import torch
from transformers import GenerationConfig

from specctl.decoding.answers import Answerer
from specctl.decoding.hierarchy import PreVerifiedDrafter
from specctl.decoding.prompts import PromptFormat
from specctl.decoding.session import READABLE, Session, build_drafter
from specctl.jsonl import Record, result_line, trace_line
from specctl.models.pair import load_pair
from specctl.profile import resolve
from specctl.profile.schema import DraftTable, Profile, SamplingTable

PROMPT = "Once upon a time"
LENGTH = 40
ONCE = ["draft.pre_verify=once", "draft.policy.name=constant", "draft.policy.draft_length=11"]
FOURTH = ["draft.draft.draft.model=embedded:draft", "draft.draft.draft.dtype=float32"]


@dataclass(frozen=True)
class Setting:
    profile: str
    overrides: tuple[str, ...] = ()
    levels: int = 2

    def resolved(self) -> Profile:
        return resolve(self.profile, overrides=self.overrides).profile


SETTINGS = {
    "draft by M2": Setting("embedded-hsddw", ("draft.policy.name=constant", "draft.draft.policy.name=none"), 1),
    "draft by M1": Setting("embedded-constant", (), 1),
    "self-verify": Setting("embedded-self-verify", (), 1),
    "pre-verify once": Setting("embedded-hsddw", (*ONCE, "draft.draft.policy.name=constant")),
    "pre-verify + self-verify once": Setting("embedded-hsddw", tuple(ONCE)),
    "full": Setting("embedded-hsddw"),
    "svip over max-confidence": Setting(
        "embedded-hsddw", ("draft.policy.name=svip", "draft.draft.policy.name=max-confidence")
    ),
    "max-confidence over svip": Setting(
        "embedded-hsddw", ("draft.policy.name=max-confidence", "draft.draft.policy.name=svip")
    ),
    "four levels": Setting("embedded-hsddw", (*FOURTH, "draft.draft.draft.policy.name=heuristic"), 3),
}


def answerer(setting: Setting, sampling: SamplingTable) -> tuple[Answerer, DraftTable]:
    profile = setting.resolved()
    draft = profile.draft.at_work()
    own = load_pair(profile.model_copy(update={"draft": draft}))
    assert len(own.drafts) == setting.levels
    drafter = build_drafter(own, draft.policy.build(), READABLE, draft=draft)
    assert isinstance(drafter, PreVerifiedDrafter) is (setting.levels > 1)
    return Answerer(Session(own, drafter), PromptFormat(own.tokenizer), sampling), draft


@pytest.fixture(scope="module")
def said() -> list[int]:
    """What transformers' own ``generate`` writes."""
    pair = load_pair(resolve("embedded").profile, with_drafts=False)
    config = GenerationConfig(
        do_sample=False, max_new_tokens=LENGTH, eos_token_id=sorted(pair.eos), pad_token_id=min(pair.eos)
    )
    ids = pair.tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        (whole,) = pair.models[0].generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
    return whole[ids.shape[1] :].tolist()


@pytest.mark.parametrize("name", SETTINGS)
def test_greedy_text_is_that_of_generate(said: list[int], name: str) -> None:
    answers, draft = answerer(SETTINGS[name], SamplingTable(max_new_tokens=LENGTH))
    (completion,) = answers.answer(Record(1, 1, {"prompt": PROMPT}))
    assert list(completion.tokens) == said
    for round_ in completion.rounds:
        assert bool(round_.inner) is (SETTINGS[name].levels > 1 and round_.drafted > 0)
        assert draft.pre_verify != "once" or len(round_.inner) <= 1


@pytest.mark.parametrize("name", ["full", "four levels"])
def test_a_record_is_the_same_after_others_as_alone(name: str) -> None:
    sampling = SamplingTable(max_new_tokens=24, temperature=1.0, seed=3)
    stream, _ = answerer(SETTINGS[name], sampling)
    records = [Record(line, line, {"prompt": text}) for line, text in enumerate([PROMPT, "Tom has 3"], start=1)]
    after = [stream.answer(record)[0].tokens for record in records]
    assert after == [answerer(SETTINGS[name], sampling)[0].answer(record)[0].tokens for record in records]


def test_the_output_record_and_the_trace_tell_of_both_levels() -> None:
    answers, _ = answerer(SETTINGS["full"], SamplingTable(max_new_tokens=LENGTH))
    record = Record(1, 1, {"prompt": PROMPT})
    completions = answers.answer(record)
    result = result_line(record, completions, rounds=True)
    upper, lower = result["metrics"]["levels"]
    assert (upper["draft"], lower["draft"]) == ("draft", "draft.draft")
    assert upper["forwards"] == sum(len(round_["inner"]) for round_ in result["rounds"] if round_["drafted"])
    assert lower["forwards"] == sum(i["drafted"] for r in result["rounds"] if r["drafted"] for i in r["inner"])
    first = max(completions[0].rounds, key=lambda round_: round_.drafted)
    line = trace_line(record, 0, first)
    below = [step for inner in line["inner"] for step in inner["steps"]]
    assert below
    assert all({"entropy", "top_prob", "token_prob"} <= step.keys() for step in (*below, *line["steps"]))
    emitted: list[int] = []
    for inner in line["inner"]:
        emitted += [step["token"] for step in inner["steps"] if step["accepted"]]
        emitted += [inner["extra"]] if inner["extra"] is not None else []
    assert [step["token"] for step in line["steps"]] == emitted
