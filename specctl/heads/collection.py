"""The target answers prompts; the draft, reading along, proposes a token of its own at every place."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from specctl.benchmark.suites import Suite, SuitePrompt
from specctl.decoding.answers import Answerer
from specctl.decoding.prompts import PromptFormat
from specctl.decoding.proposals import proposal_generator, propose
from specctl.decoding.sampling import Sampling
from specctl.decoding.session import Session, build_drafter
from specctl.errors import RecordError
from specctl.heads.examples import PROMPTS_PER_SHARD, DataFolder, Example
from specctl.jsonl import Record
from specctl.models.checkpoint import locate
from specctl.models.head_checkpoint import weights_hash
from specctl.models.pair import Pair
from specctl.profile.schema import PolicyTable, Profile, SamplingTable
from specctl.records import Completion, Round


@dataclass(slots=True)
class WatchedSession:
    """Generates with the pair and its policy; draft and target then read each answer.

    Attributes:
        pair: with a draft.
        policy: how the draft stops; it does not change the law of what is said.
        number: of the prompt that is being answered.
        examples: of the answers so far that have a token.
    """

    pair: Pair
    policy: PolicyTable
    number: int = 0
    examples: list[Example] = field(default_factory=list)

    def generate(
        self,
        prompt: Sequence[int],
        settings: SamplingTable,
        *,
        seed_offset: int = 0,
        on_round: Callable[[Round], None] | None = None,
    ) -> Completion:
        # A fresh policy each time: with one that remembers, an answer would depend on where a run was resumed.
        session = Session(self.pair, build_drafter(self.pair, self.policy.build()))
        completion = session.generate(prompt, settings, seed_offset=seed_offset, on_round=on_round)
        if completion.tokens:
            sampling = Sampling(settings.temperature, settings.top_k, settings.top_p, settings.min_p)
            target, draft = self.pair.target, self.pair.drafts[0]
            generator = proposal_generator(target, settings.seed, seed_offset)
            found = propose(target, draft, prompt, completion.tokens, sampling, generator)
            ids = torch.tensor(prompt, dtype=torch.int32), torch.tensor(completion.tokens, dtype=torch.int32)
            self.examples.append(
                Example(self.number, *ids, found.tokens.int(), found.acceptance, *found.signals.unbind(1))
            )
        return completion


def collect(
    folder: DataFolder,
    pair: Pair,
    prompts: Sequence[SuitePrompt],
    settings: SamplingTable,
    policy: PolicyTable,
    prompt_format: PromptFormat,
) -> Iterator[None]:
    """Answer the prompts that the folder has no answers to; yields after each of them.

    What is collected depends on the prompt's place and the seed alone, not on where an earlier run ended.
    """
    session = WatchedSession(pair, policy)
    answerer = Answerer(session, prompt_format, settings)
    chatting = Answerer(session, PromptFormat(pair.tokenizer, chat=bool(pair.tokenizer.chat_template)), settings)
    for first in range(folder.done, len(prompts), PROMPTS_PER_SHARD):
        session.examples.clear()
        left_out: dict[str, str] = {}
        began = perf_counter()
        for number, prompt in enumerate(prompts[first : first + PROMPTS_PER_SHARD], start=first):
            session.number = number
            before = len(session.examples)
            try:
                (chatting if prompt.chat else answerer).answer(Record(number + 1, prompt.id, prompt.data))
            except RecordError as error:
                del session.examples[before:]
                left_out[prompt.id] = error.message
            yield
        count = min(PROMPTS_PER_SHARD, len(prompts) - first)
        folder.add(session.examples, count, left_out, perf_counter() - began)


def describe(profile: Profile, suite: Suite) -> dict[str, Any]:
    """What an example depends on; two data sets of the same facts are the same."""
    assert profile.draft is not None
    draft = locate(profile.draft, "draft")
    draft.fetch_weights()
    sampling = profile.sampling.model_dump(mode="json")
    return {
        "target": profile.target.model,
        "draft": profile.draft.model,
        "draft_sha256": weights_hash(draft.weight_files()),
        "sampling": sampling,
        "prompts": {"name": Path(suite.name).name, "sha256": suite.sha256, "count": len(suite.prompts)},
        "prompt": profile.prompt.model_dump(mode="json"),
        "policy": profile.draft.policy.model_dump(mode="json"),
    }
