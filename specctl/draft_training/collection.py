"""Collecting what draft heads learn from: the target's own answers."""

from collections.abc import Sequence
from typing import Any

import torch

from specctl.decoding.answers import Answerer
from specctl.decoding.composition import build_drafter
from specctl.decoding.prompt_format import PromptFormat
from specctl.decoding.session import Session
from specctl.draft_training.answers import Answer, AnswerFolder, answered_greedily
from specctl.learning.collecting import collect_shards, prompt_facts
from specctl.models.loading.pair import Pair
from specctl.observing.answering import Answered
from specctl.observing.progress import Advance, ignored
from specctl.policies import Setting
from specctl.profile.schema import Profile, SamplingTable
from specctl.prompts.suites import Suite, SuitePrompt

SHORTEST = 2
"""Tokens of an answer that anything can be learnt from: one to draft behind another."""


def collect(
    folder: AnswerFolder,
    pair: Pair,
    prompts: Sequence[SuitePrompt],
    settings: SamplingTable,
    policy: Setting,
    prompt_format: PromptFormat,
    advance: Advance = ignored,
) -> None:
    """Answer the prompts that the folder has no answers to: every second one greedily, the others as sampled.

    Args:
        folder: receives the answers.
        pair: the target, and the draft that helps it to write, if there is one.
        prompts: all prompts of the suite.
        settings: how the target samples the answers that are not greedy.
        policy: stops the draft; it does not change the answers' distribution.
        prompt_format: turns prompts into ids.
        advance: called after each prompt.
    """

    def fresh(number: int) -> Answerer:
        own = settings.model_copy(update={"temperature": 0.0}) if answered_greedily(number) else settings
        drafter = build_drafter(pair, policy) if pair.drafts else None
        return Answerer(Session(pair, drafter), prompt_format, own)

    def answers(found: Answered) -> list[Answer]:
        greedy = found.settings.temperature == 0
        texts = [(each.prompt, each.tokens) for each in found.completions if len(each.tokens) >= SHORTEST]
        return [Answer(found.number, greedy, *(torch.tensor(part).int() for part in text)) for text in texts]

    collect_shards(folder, prompts, fresh, answers, advance)


def describe(profile: Profile, suite: Suite) -> dict[str, Any]:
    """Everything that the answers depend on; two data sets with equal facts are equal."""
    facts = {
        "target": profile.target.model,
        "draft": None if profile.draft is None else profile.draft.model,
        "policy": None if profile.draft is None else profile.draft.policy.model_dump(mode="json"),
        "sampling": profile.sampling.model_dump(mode="json"),
        "prompts": prompt_facts(suite),
        "prompt": profile.prompt.model_dump(mode="json"),
    }
    if profile.target.quantize is not None:
        facts["target_quantize"] = profile.target.quantize
    return facts
