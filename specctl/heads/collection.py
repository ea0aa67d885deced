"""Collecting examples: the target answers prompts, and the draft drafts along the answers.

A draft model drafts one token at every position, a draft head the rounds of `specctl.heads.rounds.read_rounds`; for
DISCO, whose heads read the number of a token in its round, a draft model drafts such rounds too.
"""

from collections.abc import Callable
from typing import Any

import torch

from specctl.decoding.answers import Answerer
from specctl.decoding.composition import build_drafter
from specctl.decoding.draft_tokens import draft_token_generator, draw_along
from specctl.decoding.prompt_format import PromptFormat
from specctl.decoding.sampling import Sampling
from specctl.decoding.session import Session
from specctl.heads.examples import DataFolder, Example
from specctl.heads.model_rounds import read_model_rounds
from specctl.heads.rounds import RoundTokens, read_rounds
from specctl.learning.answer_folder import Lesson, prompt_facts
from specctl.learning.replicated_shards import answering
from specctl.models.files.checkpoint import locate
from specctl.models.files.stored_weights import files_hash, stored_weights
from specctl.models.head_files.draft_head import DraftHeadCheckpoint
from specctl.models.loading.assembly import load_pair
from specctl.models.loading.profile_models import find_head
from specctl.models.predictors.head_checkpoint import KIND, Kind
from specctl.models.running.pair import Pair
from specctl.observing.prompt_answers import Answered
from specctl.policies import Setting
from specctl.profile.schema import DraftTable, Profile, SamplingTable
from specctl.prompts.suites import Suite
from specctl.records import Completion
from specctl.replicas.job import Answer


def lesson_of(
    pair: Pair, settings: SamplingTable, policy: Setting, prompt_format: PromptFormat, kind: Kind = "specdec++"
) -> Lesson[Example]:
    """How prompts become examples.

    Args:
        pair: the target and the draft.
        settings: how the target samples its answers.
        policy: stops the draft while answers are generated; it does not change the answers' distribution.
        prompt_format: turns prompts into ids.
        kind: of the heads that will read the examples.
    """

    def fresh(number: int) -> Answerer:  # noqa: ARG001 - all prompts are answered alike
        return Answerer(Session(pair, build_drafter(pair, policy)), prompt_format, settings)

    def examples(found: Answered) -> list[Example]:
        sampling = Sampling.of(found.settings)
        made = [_example(pair, found.number, each, sampling, kind) for each in found.completions if each.tokens]
        return [example for example in made if example is not None]

    return Lesson(fresh, examples)


def load_lesson(
    profile: Profile, kind: Kind = "specdec++", progress: Callable[[str], None] = lambda _: None
) -> tuple[Pair, Lesson[Example]]:
    """Load a profile's target and first draft, and how their answers become examples.

    Args:
        profile: the pair.
        kind: of the heads that will read the examples.
        progress: as in `load_pair`.
    """
    assert profile.draft is not None
    pair = load_pair(profile, drafts=[profile.draft], with_heads=False, measured=False, progress=progress)
    prompt_format = PromptFormat.of(pair.tokenizer, profile.prompt)
    return pair, lesson_of(pair, profile.sampling, profile.draft.policy.setting, prompt_format, kind)


def replica(*, number: int, profile: Profile, kind: Kind) -> Answer:  # noqa: ARG001 - all do the same
    """A replica that makes shards of examples; see `specctl.learning.replicated_shards`."""
    return answering(load_lesson(profile, kind)[1], DataFolder)


def _example(pair: Pair, number: int, completion: Completion, sampling: Sampling, kind: Kind) -> Example | None:
    target, draft, text = pair.target, pair.drafts[0], (completion.prompt, completion.tokens)
    generator = draft_token_generator(target, completion.seed)
    laws = kind == "disco"
    rounds: RoundTokens | None = None
    if draft.reads_states:
        rounds = read_rounds(target, draft, *text, sampling, generator, pair.eos, laws=laws)
        if rounds is None:
            return None
    elif laws:
        rounds = read_model_rounds(target, draft, *text, sampling, generator)
    found = draw_along(target, draft, *text, sampling, generator) if rounds is None else rounds.drawn
    ids, answer = (torch.tensor(part, dtype=torch.int32) for part in text)
    entropy, top_prob, token_prob = found.signals.unbind(1)
    drawn = found.tokens.int(), found.acceptance, entropy, top_prob, token_prob
    if rounds is None:
        return Example(number, ids, answer, *drawn)
    return Example(number, ids, answer, *drawn, rounds.hidden, rounds.top_probs, rounds.index if laws else None)


def describe(profile: Profile, suite: Suite, kind: Kind = "specdec++") -> dict[str, Any]:
    """Everything that the examples depend on; two data sets with equal facts are equal.

    Downloads the draft's weights if needed, to hash them.
    """
    assert profile.draft is not None
    head = find_head("draft", profile.draft, ("target", profile.target))
    sampling = profile.sampling.model_dump(mode="json")
    tables = {"target": profile.target, "draft": profile.draft}
    quantised = {f"{key}_quantize": table.quantize for key, table in tables.items() if table.quantize is not None}
    drafting = {} if head is None else {"draft_head": head.kind}
    return {
        "target": profile.target.model,
        "draft": profile.draft.model,
        "draft_sha256": draft_hash(profile.draft, head),
        "sampling": sampling,
        "prompts": prompt_facts(suite),
        "prompt": profile.prompt.model_dump(mode="json"),
        "policy": profile.draft.policy.model_dump(mode="json"),
        **quantised,
        **drafting,
        KIND: kind,
    }


def draft_hash(draft: DraftTable, head: DraftHeadCheckpoint | None) -> str:
    """SHA-256 of the weights of the draft or draft head, downloaded if need be."""
    if head is not None:
        head.fetch_weights()
        return files_hash(stored_weights(head.checkpoint))
    checkpoint = locate(draft, "draft")
    checkpoint.fetch_weights()
    return files_hash(stored_weights(checkpoint))
