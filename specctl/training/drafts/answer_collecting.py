"""Collecting what draft heads learn from: the target's own answers."""

from typing import Any

import torch

from specctl.decoding.answers import Answerer
from specctl.decoding.composition import build_drafter
from specctl.decoding.prompt_format import PromptFormat
from specctl.decoding.session import Session
from specctl.models.loading.assembly import load_pair
from specctl.models.running.pair import Pair
from specctl.observing.prompt_answers import Answered
from specctl.policies import Setting
from specctl.profile.schema import PolicyTable, Profile, SamplingTable
from specctl.prompts.suites import Suite
from specctl.replicas.job import Answer as Replied
from specctl.training.collected import Lesson, prompt_facts
from specctl.training.drafts.target_answers import Answer, AnswerFolder, answered_greedily
from specctl.training.replicated_shards import answering

SHORTEST = 2
"""Tokens of an answer that anything can be learnt from: one to draft behind another."""


def lesson_of(pair: Pair, settings: SamplingTable, policy: Setting, prompt_format: PromptFormat) -> Lesson[Answer]:
    """How prompts become answers to learn from: every second one greedily, the others as sampled.

    Args:
        pair: the target, and the draft that helps it to write, if there is one.
        settings: how the target samples the answers that are not greedy.
        policy: stops the draft; it does not change the answers' distribution.
        prompt_format: turns prompts into ids.
    """

    def fresh(number: int) -> Answerer:
        own = settings.model_copy(update={"temperature": 0.0}) if answered_greedily(number) else settings
        drafter = build_drafter(pair, policy) if pair.drafts else None
        return Answerer(Session(pair, drafter), prompt_format, own)

    def answers(found: Answered) -> list[Answer]:
        greedy = found.settings.temperature == 0
        texts = [(each.prompt, each.tokens) for each in found.completions if len(each.tokens) >= SHORTEST]
        return [Answer(found.number, greedy, *(torch.tensor(part).int() for part in text)) for text in texts]

    return Lesson(fresh, answers)


def lesson_with(pair: Pair, profile: Profile) -> Lesson[Answer]:
    """`lesson_of` as a profile describes it."""
    policy = PolicyTable(name="constant") if profile.draft is None else profile.draft.policy
    return lesson_of(pair, profile.sampling, policy.setting, PromptFormat.of(pair.tokenizer, profile.prompt))


def replica(*, number: int, profile: Profile) -> Replied:  # noqa: ARG001 - all do the same
    """A replica that makes shards of answers; see `specctl.training.replicated_shards`."""
    return answering(lesson_with(load_pair(profile, with_heads=False, measured=False), profile), AnswerFolder)


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
