"""Collecting examples: the target answers prompts, and the draft drafts one token at every position of the answers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from specctl.decoding.answers import Answerer
from specctl.decoding.draft_tokens import draft_token_generator, draw_draft_tokens
from specctl.decoding.prompt_format import PromptFormat
from specctl.decoding.sampling import Sampling
from specctl.decoding.session import Session, build_drafter
from specctl.heads.examples import DataFolder, Example
from specctl.learning.collecting import collect_shards
from specctl.models.loading.checkpoint import locate
from specctl.models.loading.head_checkpoint import weights_hash
from specctl.models.loading.pair import Pair
from specctl.observing.answering import Answered
from specctl.observing.progress import Advance, ignored
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
        return [_example(pair, found.number, each, sampling) for each in found.completions if each.tokens]

    collect_shards(folder, prompts, fresh, examples, advance)


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
