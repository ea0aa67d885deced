"""Collecting examples: the target answers prompts, and the draft drafts one token at every position of the answers."""

from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from specctl.decoding.answers import Answerer
from specctl.decoding.draft_tokens import draft_token_generator, draw_draft_tokens
from specctl.decoding.prompt_format import PromptFormat
from specctl.decoding.sampling import Sampling
from specctl.decoding.session import Session, build_drafter
from specctl.heads.examples import DataFolder, Example
from specctl.learning.shards import PROMPTS_PER_SHARD
from specctl.models.loading.checkpoint import locate
from specctl.models.loading.head_checkpoint import weights_hash
from specctl.models.loading.pair import Pair
from specctl.observing.answering import answer_each
from specctl.observing.progress import Advance, ignored
from specctl.observing.results import Skipped
from specctl.policies import Setting
from specctl.profile.schema import Profile, SamplingTable
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
    """Answer the prompts that the folder has no answers to, and add their examples shard by shard.

    The examples of a prompt depend on its position in the suite and the seed only, not on where an earlier run ended.

    Args:
        folder: receives the examples.
        pair: the target and the draft.
        prompts: all prompts of the suite, including those that are already answered.
        settings: how the target samples its answers.
        policy: stops the draft while answers are generated; it does not change the answers' distribution.
        prompt_format: turns prompts into ids.
        advance: called after each prompt.
    """

    def fresh() -> Answerer:
        # If a policy kept its state, an answer would depend on where a run was resumed.
        return Answerer(Session(pair, build_drafter(pair, policy)), prompt_format, settings)

    for first in range(folder.done, len(prompts), PROMPTS_PER_SHARD):
        shard = prompts[first : first + PROMPTS_PER_SHARD]
        examples: list[Example] = []
        left_out: dict[str, str] = {}
        began = perf_counter()
        for found in answer_each(fresh, shard, first=first, advance=advance):
            if isinstance(found, Skipped):
                left_out[found.prompt] = found.reason
                continue
            sampling = Sampling.of(found.settings)
            examples += [_example(pair, found.number, each, sampling) for each in found.completions if each.tokens]
        folder.add(examples, len(shard), left_out, perf_counter() - began)


def _example(pair: Pair, number: int, completion: Completion, sampling: Sampling) -> Example:
    target, text = pair.target, (completion.prompt, completion.tokens)
    generator = draft_token_generator(target, completion.seed)
    found = draw_draft_tokens(target, pair.drafts[0], *text, sampling, generator)
    ids, answer = (torch.tensor(part, dtype=torch.int32) for part in text)
    return Example(number, ids, answer, found.tokens.int(), found.acceptance, *found.signals.unbind(1))


def describe(profile: Profile, suite: Suite) -> dict[str, Any]:
    """Everything that the examples depend on; two data sets with equal facts are equal.

    Downloads the draft's weights if needed, to hash them.
    """
    assert profile.draft is not None
    draft = locate(profile.draft, "draft")
    draft.fetch_weights()
    sampling = profile.sampling.model_dump(mode="json")
    tables = {"target": profile.target, "draft": profile.draft}
    quantised = {f"{key}_quantize": table.quantize for key, table in tables.items() if table.quantize is not None}
    return {
        "target": profile.target.model,
        "draft": profile.draft.model,
        "draft_sha256": weights_hash(draft.weight_files()),
        "sampling": sampling,
        "prompts": {"name": Path(suite.name).name, "sha256": suite.sha256, "count": len(suite.prompts)},
        "prompt": profile.prompt.model_dump(mode="json"),
        "policy": profile.draft.policy.model_dump(mode="json"),
        **quantised,
    }
