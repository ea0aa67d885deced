"""Every setting of HSDDW by profile, on the models that ship with the package."""

import pytest
import torch
from transformers import GenerationConfig

from specctl.decoding.answers import Answerer
from specctl.decoding.composition import build_drafter, readable
from specctl.decoding.hierarchy import PreVerifiedDrafter
from specctl.decoding.prompt_format import PromptFormat
from specctl.decoding.session import Session
from specctl.jsonl import Record, result_line
from specctl.models.loading.assembly import load_pair
from specctl.profile import resolve
from specctl.profile.schema import DraftTable, Profile, SamplingTable
from specctl.round_trace import trace_line
from tests.support.hsddw_settings import PAPERS_WINDOW, settings, write_settings

PROMPT = "Once upon a time"
LENGTH = 40
FOURTH = ("draft.draft.draft.model=embedded:draft", "draft.draft.draft.dtype=float32")
LEVELS = {"draft-by-m2": 1, "draft-by-m1": 1, "self-verify-m2": 1, "self-verify-m1": 1}
"""Of settings that have not two."""
OVERRIDES = {
    "m1-never-drafts": ("draft.draft.policy.name=none",),
    "svip-over-max-confidence": ("draft.policy.name=svip", "draft.draft.policy.name=max-confidence"),
    "max-confidence-over-svip": ("draft.policy.name=max-confidence", "draft.draft.policy.name=svip"),
    "svip-over-specdec++": (
        "draft.policy.name=svip",
        "draft.draft.policy.name=specdec++",
        "draft.draft.head=embedded:draft-head",
    ),
    "four-levels": (*FOURTH, "draft.draft.draft.policy.name=heuristic"),
}
"""Of `embedded-hsddw`, beyond the paper's settings."""
LEVELS |= {"m1-never-drafts": 1, "four-levels": 3}
SETTINGS = [*settings(), *OVERRIDES]


@pytest.fixture(scope="module")
def profiles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Profile]:
    paths = write_settings(tmp_path_factory.mktemp("settings"), [PAPERS_WINDOW], list(settings()))
    papers = {name: resolve(str(path)).profile for name, path in zip(settings(), paths, strict=True)}
    mixed = {name: resolve("embedded-hsddw", overrides=given).profile for name, given in OVERRIDES.items()}
    return papers | mixed


def answerer(profile: Profile, sampling: SamplingTable) -> tuple[Answerer, DraftTable]:
    draft = profile.draft.at_work()
    pair = load_pair(profile.model_copy(update={"draft": draft}))
    assert len(pair.drafts) == len(draft.levels)
    drafter = build_drafter(pair, draft.setting, readable(pair))
    assert isinstance(drafter, PreVerifiedDrafter) is (len(draft.levels) > 1)
    return Answerer(Session(pair, drafter), PromptFormat(pair.tokenizer, chat=False), sampling), draft


@pytest.fixture(scope="module")
def said() -> list[int]:
    """What transformers' own ``generate`` writes."""
    pair = load_pair(resolve("embedded").profile, drafts=[])
    config = GenerationConfig(
        do_sample=False, max_new_tokens=LENGTH, eos_token_id=sorted(pair.eos), pad_token_id=min(pair.eos)
    )
    ids = pair.tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        (whole,) = pair.models[0].generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
    return whole[ids.shape[1] :].tolist()


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.representatives(
    "full", "svip-over-specdec++", slow=("svip-over-max-confidence", "four-levels", "draft-by-m2")
)
def test_greedy_text_is_that_of_generate(profiles: dict[str, Profile], said: list[int], name: str) -> None:
    answers, draft = answerer(profiles[name], SamplingTable(max_new_tokens=LENGTH))
    assert len(draft.levels) == LEVELS.get(name, 2)
    (completion,) = answers.answer(Record(1, 1, {"prompt": PROMPT}))
    assert list(completion.tokens) == said
    for round_ in completion.rounds:
        assert bool(round_.inner) is (len(draft.levels) > 1 and round_.drafted > 0)
        assert draft.pre_verify != "once" or len(round_.inner) <= 1


@pytest.mark.parametrize("name", ["full", "four-levels"])
@pytest.mark.representatives(slow=("full",))
def test_a_record_is_the_same_after_others_as_alone(profiles: dict[str, Profile], name: str) -> None:
    sampling = SamplingTable(max_new_tokens=24, temperature=1.0, seed=3)
    stream, _ = answerer(profiles[name], sampling)
    records = [Record(line, line, {"prompt": text}) for line, text in enumerate([PROMPT, "Tom has 3"], start=1)]
    after = [stream.answer(record)[0].tokens for record in records]
    assert after == [answerer(profiles[name], sampling)[0].answer(record)[0].tokens for record in records]


def test_the_output_record_and_the_trace_tell_of_both_levels(profiles: dict[str, Profile]) -> None:
    answers, _ = answerer(profiles["full"], SamplingTable(max_new_tokens=LENGTH))
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
