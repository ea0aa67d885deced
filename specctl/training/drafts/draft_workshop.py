"""Draft heads: from a target's own answers to a trained head in a folder."""

import json
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from specctl.decoding.sampling import Sampling
from specctl.errors import UsageError
from specctl.models.draft_heads.block import BlockHead
from specctl.models.draft_heads.chain import ChainHead
from specctl.models.draft_heads.file_layout import Verifier, write_head
from specctl.models.draft_heads.kinds import HEAD_KINDS
from specctl.models.running.pair import Pair
from specctl.observing.progress import Progress
from specctl.observing.prompt_answers import Answered
from specctl.outputs import write_whole
from specctl.profile.model_table import require_whole
from specctl.profile.schema import Profile, SamplingTable
from specctl.training.drafts.courses import COURSES, new_head
from specctl.training.drafts.draft_evaluation import (
    DEPTH,
    Drafts,
    acceptance_in_rounds,
    drafts_of_head,
    drafts_of_model,
)
from specctl.training.drafts.draft_learner import DraftLearner
from specctl.training.drafts.draft_report import Result, draft_card, result_tables
from specctl.training.drafts.lessons import Teacher
from specctl.training.drafts.recipes import Recipe
from specctl.training.drafts.target_answers import Answer, AnswerFolder, answered_greedily, frequent_tokens
from specctl.training.epochs import Schedule
from specctl.training.material import Material
from specctl.training.model_card import Made, Report
from specctl.training.subject import STATE, Source, Subject

RESULTS, CARD, CONFIG = "evaluation.json", "README.md", "config.json"
SHORTEST = 2
"""Tokens of an answer that anything can be learnt from: one to draft behind another."""


class DraftHeads(Subject[Answer, Pair]):
    """Networks that draft from a target's hidden states.

    They learn from its answers, every second one greedy, the others as sampled. The profile's draft model, if there is
    one, helps to answer and is what a head is compared with; its policy does not change the answers' distribution.
    """

    command, folder = "train-draft", AnswerFolder
    ends, others = (CONFIG,), (RESULTS,)

    def __init__(self, profile: Profile) -> None:
        super().__init__(profile)
        require_whole(profile.target, "target", self.command)
        if profile.draft is not None:
            require_whole(profile.draft, "draft", self.command)

    def sampling(self, number: int) -> SamplingTable:
        changes = {"temperature": 0.0} if answered_greedily(number) else {}
        return super().sampling(number).model_copy(update=changes)

    def items(self, pair: Pair, found: Answered) -> list[Answer]:  # noqa: ARG002 - the texts are all
        greedy = found.settings.temperature == 0
        texts = [(each.prompt, each.tokens) for each in found.completions if len(each.tokens) >= SHORTEST]
        return [Answer(found.number, greedy, *(torch.tensor(part).int() for part in text)) for text in texts]

    def check(self, material: Material[Answer]) -> None:
        if material.facts["target"] != self.profile.target.model:
            raise UsageError(
                f"{material.path} holds answers of another target ({material.facts['target']}) than "
                f"{self.profile.target.model!r}",
                "collect answers of this target first",
            )

    def models(self, pair: Pair | None, progress: Progress) -> Pair:
        return self.load(progress) if pair is None else pair

    def make(
        self, output: Path, source: Source[Answer, Pair], recipe: Recipe, schedule: Schedule, progress: Progress
    ) -> Report:
        """Train a head, evaluate it on prompts that were not used in training, and write it with its card.

        Args:
            output: its folder.
            source: the target's answers, and the models.
            recipe: kind and size.
            schedule: the course of the training.
            progress: receives the stages.
        """
        target, material = source.models.models[0], source.material
        split, vocabulary = material.split(), target.config.get_text_config(decoder=True).vocab_size
        # A block head's tokens are the target's: its output layer is.
        size = recipe.draft_vocabulary if "draft_vocabulary" in COURSES[recipe.kind].flags else vocabulary
        tokens = frequent_tokens(split.train, vocabulary, size)
        head = new_head(recipe, target, tokens, _mask_token(source.models), schedule.seed)
        teacher = Teacher(target, head.layers)
        learner = DraftLearner(head, recipe, teacher, split.train, schedule.seed)
        seconds = self.train(output, learner, schedule, split.train, progress)
        began = perf_counter()
        results = self._compare(source, head.bfloat16().float(), recipe, teacher, split.dev, progress)
        made = Made.of(material.seconds, seconds, perf_counter() - began)
        documents = [result.document for result in results]
        write_whole(output / RESULTS, json.dumps(documents, indent=1) + "\n")
        write_whole(output / CARD, draft_card(results, recipe, schedule, material.facts, made))
        verifier = Verifier.of(material.facts["target"], target)
        write_head(output, head.bfloat16(), verifier)  # its last file says that all is written
        (output / STATE).unlink(missing_ok=True)
        progress.say(f"wrote {output}")
        return Report({"drafts": documents}, result_tables(results))

    def _compare(
        self,
        source: Source[Answer, Pair],
        head: ChainHead | BlockHead,
        recipe: Recipe,
        teacher: Teacher,
        answers: list[Answer],
        progress: Progress,
    ) -> list[Result]:
        """The head beside the profile's draft model, on greedy answers and on drawn ones."""
        depth = min(DEPTH, head.longest or DEPTH)
        drafts: dict[str, Drafts] = {HEAD_KINDS[recipe.kind].title: drafts_of_head(head, depth)}
        if self.profile.draft is not None and len(source.models.models) > 1:
            drafts[self.profile.draft.model] = drafts_of_model(source.models.models[1], depth)
        drawn = Sampling.of(SamplingTable.model_validate(source.material.facts["sampling"]))
        results: list[Result] = []
        with progress.counting("evaluated answers", len(answers)) as advance:
            for name, sampling in (("greedy", Sampling()), (f"temperature {drawn.temperature:g}", drawn)):
                some = [answer for answer in answers if answer.greedy == sampling.greedy]
                if some and not (sampling is drawn and drawn.greedy):
                    found = acceptance_in_rounds(teacher, list(drafts.values()), some, sampling, depth, advance)
                    results += [
                        Result(draft, name, each) for draft, each in zip(drafts, found, strict=True) if each.rounds
                    ]
        if not results:
            raise UsageError(f"no answer kept for evaluation has {depth} tokens", "let --max-new-tokens be larger")
        return results


def _mask_token(pair: Pair) -> int:
    """An id that no draft begins behind: a special token of the tokenizer."""
    tokenizer: Any = pair.tokenizer
    known = (tokenizer.mask_token_id, tokenizer.pad_token_id, *sorted(pair.eos))
    return next((int(token) for token in known if token is not None), 0)
