"""Collecting examples: the target answers prompts, and the draft drafts along the answers.

A draft model drafts one token at every position, a draft head the rounds of `specctl.heads.rounds.read_rounds`.
"""

from collections.abc import Sequence
from typing import Any

import torch

from specctl.decoding.answers import Answerer
from specctl.decoding.draft_tokens import draft_token_generator, draw_draft_tokens
from specctl.decoding.prompt_format import PromptFormat
from specctl.decoding.sampling import Sampling
from specctl.decoding.session import Session, build_drafter
from specctl.heads.examples import DataFolder, Example
from specctl.heads.rounds import read_rounds
from specctl.learning.collecting import collect_shards, prompt_facts
from specctl.models.loading.checkpoint import locate
from specctl.models.loading.draft_head import DraftHeadCheckpoint
from specctl.models.loading.found import find_head
from specctl.models.loading.head_checkpoint import stored_weights, weights_hash
from specctl.models.loading.pair import Pair
from specctl.models.running.runner import StateReader
from specctl.observing.answering import Answered
from specctl.observing.progress import Advance, ignored
from specctl.policies import Setting
from specctl.profile.schema import DraftTable, Profile, SamplingTable
from specctl.prompts.suites import Suite, SuitePrompt
from specctl.records import Completion


def collect(
    folder: DataFolder,
    pair: Pair,
    prompts: Sequence[SuitePrompt],
    settings: SamplingTable,
    policy: Setting,
    prompt_format: PromptFormat,
    advance: Advance = ignored,
) -> None:
    """Answer the prompts that the folder has no answers to, and add their examples; see `collect_shards`.

    Args:
        folder: receives the examples.
        pair: the target and the draft.
        prompts: all prompts of the suite.
        settings: how the target samples its answers.
        policy: stops the draft while answers are generated; it does not change the answers' distribution.
        prompt_format: turns prompts into ids.
        advance: called after each prompt.
    """

    def fresh(number: int) -> Answerer:  # noqa: ARG001 - all prompts are answered alike
        return Answerer(Session(pair, build_drafter(pair, policy)), prompt_format, settings)

    def examples(found: Answered) -> list[Example]:
        sampling = Sampling.of(found.settings)
        made = [_example(pair, found.number, each, sampling) for each in found.completions if each.tokens]
        return [example for example in made if example is not None]

    collect_shards(folder, prompts, fresh, examples, advance)


def _example(pair: Pair, number: int, completion: Completion, sampling: Sampling) -> Example | None:
    target, draft, text = pair.target, pair.drafts[0], (completion.prompt, completion.tokens)
    generator = draft_token_generator(target, completion.seed)
    hidden = None
    if isinstance(draft, StateReader):
        rounds = read_rounds(target, draft, *text, sampling, generator, pair.eos)
        if rounds is None:
            return None
        found, hidden = rounds.drawn, rounds.hidden
    else:
        found = draw_draft_tokens(target, draft, *text, sampling, generator)
    ids, answer = (torch.tensor(part, dtype=torch.int32) for part in text)
    entropy, top_prob, token_prob = found.signals.unbind(1)
    drawn = found.tokens.int(), found.acceptance, entropy, top_prob, token_prob
    return Example(number, ids, answer, *drawn, hidden)


def describe(profile: Profile, suite: Suite) -> dict[str, Any]:
    """Everything that the examples depend on; two data sets with equal facts are equal.

    Downloads the draft's weights if needed, to hash them.
    """
    assert profile.draft is not None
    head = find_head("draft", profile.draft, ("target", profile.target))
    sampling = profile.sampling.model_dump(mode="json")
    tables = {"target": profile.target, "draft": profile.draft}
    quantised = {f"{key}_quantize": table.quantize for key, table in tables.items() if table.quantize is not None}
    kind = {} if head is None else {"draft_head": head.kind.value}
    return {
        "target": profile.target.model,
        "draft": profile.draft.model,
        "draft_sha256": draft_hash(profile.draft, head),
        "sampling": sampling,
        "prompts": prompt_facts(suite),
        "prompt": profile.prompt.model_dump(mode="json"),
        "policy": profile.draft.policy.model_dump(mode="json"),
        **quantised,
        **kind,
    }


def draft_hash(draft: DraftTable, head: DraftHeadCheckpoint | None) -> str:
    """SHA-256 of the weights of the draft or draft head, downloaded if need be."""
    if head is not None:
        head.fetch_weights()
        return weights_hash(stored_weights(head.checkpoint))
    checkpoint = locate(draft, "draft")
    checkpoint.fetch_weights()
    return weights_hash(stored_weights(checkpoint))
