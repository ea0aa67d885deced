"""From a profile and prompts to a trained draft head in a folder; every stage can resume after an interruption."""

import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from specctl.decoding.prompt_format import PromptFormat
from specctl.decoding.sampling import Sampling
from specctl.draft_training.answers import Answer, AnswerFolder, frequent_tokens
from specctl.draft_training.collection import describe, lesson_with
from specctl.draft_training.courses import COURSES, new_head
from specctl.draft_training.evaluation import DEPTH, Drafts, drafts_of_head, drafts_of_model, evaluate
from specctl.draft_training.lessons import Teacher
from specctl.draft_training.recipes import Recipe, Schedule
from specctl.draft_training.report import Result, as_document, head_card
from specctl.draft_training.training import Training
from specctl.errors import UsageError
from specctl.learning.data_shards import INDEX
from specctl.learning.output_folder import STATE, OutputFolder
from specctl.learning.plain_draft import without_head
from specctl.learning.replicated_shards import collect
from specctl.models.draft_heads.block import BlockHead
from specctl.models.draft_heads.chain import ChainHead
from specctl.models.head_files.formats import FORMATS
from specctl.models.head_files.network_files import Verifier, write_head
from specctl.models.loading.assembly import load_pair
from specctl.models.running.pair import Pair
from specctl.observing.progress import Progress
from specctl.outputs import write_whole
from specctl.profile.model_table import require_whole
from specctl.profile.schema import Profile, SamplingTable
from specctl.prompts.suites import Suite
from specctl.replicas.replica import Replicas
from specctl.versions import versions

ANSWERS, RESULTS, CARD, CONFIG = "answers", "evaluation.json", "README.md", "config.json"
OUTPUT = OutputFolder("train-draft", ANSWERS, ends=(CONFIG,), others=(RESULTS,))


@dataclass(frozen=True, slots=True)
class Source:
    """A target and its answers.

    Attributes:
        folder: the answers, completely collected.
        pair: the loaded models, the target's first.
        draft: the name of the draft that a head is compared with; None if the profile has no draft model.
    """

    folder: AnswerFolder
    pair: Pair
    draft: str | None


def plain(profile: Profile) -> Profile:
    """The profile without acceptance heads and hierarchies, which training needs none of."""
    if profile.draft is None:
        return profile
    return profile.model_copy(update={"draft": without_head(profile.draft).model_copy(update={"draft": None})})


def open_answers(path: Path, profile: Profile, progress: Progress) -> Source:
    """The answers that an earlier run collected, with the models.

    Raises:
        UsageError: they cannot be read, or are another target's.
    """
    folder = AnswerFolder.open(path)
    if folder.facts["target"] != profile.target.model:
        raise UsageError(
            f"{path} holds answers of another target ({folder.facts['target']}) than {profile.target.model!r}",
            "collect answers of this target first",
        )
    return Source(folder, *_loaded(profile, progress))


def collect_answers(
    output: Path,
    profile: Profile,
    suite: Suite,
    progress: Progress,
    *,
    resume: bool,
    replicas: Callable[[], AbstractContextManager[Replicas]] | None = None,
) -> Source:
    """The target's answers to these prompts; missing ones are collected first.

    Args:
        output: folder of the head; the answers are in a folder inside it.
        profile: the target, and the draft to compare with, which also helps to answer.
        suite: the prompts.
        progress: receives the stages.
        resume: continue what an earlier run left in the folder, instead of starting over.
        replicas: starts replicas that answer (`specctl.draft_training.collection.replica`) and end before the models
            are loaded here; None to answer in this process.

    Raises:
        UsageError: the folder holds answers of other models, prompts or settings.
    """
    path, facts = output / ANSWERS, describe(profile, suite)
    folder = AnswerFolder.open(path) if resume and (path / INDEX).exists() else None
    if folder is not None:
        folder.require_same(facts)
    if replicas is None:
        pair, draft = _loaded(profile, progress)
        if told := PromptFormat.of(pair.tokenizer, profile.prompt).note(profile.prompt):
            progress.say(f"note: {told}")
    if folder is None:
        OUTPUT.start_over(output)
        folder = AnswerFolder.create(path, facts, len(suite.prompts))
    if folder.done < folder.prompts:
        with replicas() if replicas is not None else nullcontext(lesson_with(pair, profile)) as source:
            collect(folder, suite.prompts, source, progress)
        progress.say(f"answers: {folder.prompts} prompts in {folder.seconds:.1f} s, in {path}")
    if replicas is not None:
        pair, draft = _loaded(profile, progress)
    return Source(folder, pair, draft)


def train_head(output: Path, source: Source, recipe: Recipe, schedule: Schedule, progress: Progress) -> list[Result]:
    """Train a head, evaluate it on prompts that were not used in training, and write it with its card.

    Args:
        output: its folder.
        source: the target and its answers.
        recipe: kind and size.
        schedule: the course of the training.
        progress: receives the stages.
    """
    target, split = source.pair.models[0], source.folder.split()
    vocabulary = target.config.get_text_config(decoder=True).vocab_size
    # A block head's tokens are the target's: its output layer is.
    size = recipe.draft_vocabulary if "draft_vocabulary" in COURSES[recipe.kind].flags else vocabulary
    tokens = frequent_tokens(split.train, vocabulary, size)
    head = new_head(recipe, target, tokens, _mask_token(source.pair), schedule.seed)
    teacher = Teacher(target, head.layers)
    training = Training(head, recipe, schedule, teacher, split.train, output / STATE)
    with progress.counting("steps", training.steps, training.step) as advance:
        training.run(advance)
    progress.say(f"training: {training.steps} steps in {training.seconds:.1f} s")
    began = perf_counter()
    results = _compare(source, head.bfloat16().float(), recipe, teacher, split.dev, progress)
    seconds = {"answers": source.folder.seconds, "training": training.seconds, "evaluation": perf_counter() - began}
    more = {
        "seconds": seconds,
        "versions": {name: version for name, version in versions().items() if name in ("specctl", "torch")},
    }
    write_whole(output / RESULTS, json.dumps(as_document(results), indent=1) + "\n")
    write_whole(output / CARD, head_card(results, recipe, schedule, source.folder.facts, more))
    verifier = Verifier.of(source.folder.facts["target"], target)
    write_head(output, head.bfloat16(), verifier)  # its last file says that all is written
    (output / STATE).unlink(missing_ok=True)
    progress.say(f"wrote {output}")
    return results


def _loaded(profile: Profile, progress: Progress) -> tuple[Pair, str | None]:
    require_whole(profile.target, "target", "train-draft")
    if profile.draft is not None:
        require_whole(profile.draft, "draft", "train-draft")
    with progress.doing("loading") as say:
        pair = load_pair(profile, with_heads=False, measured=False, progress=lambda what: say(f"loading {what}"))
    draft = profile.draft.model if profile.draft is not None and len(pair.models) > 1 else None
    return pair, draft


def _mask_token(pair: Pair) -> int:
    """An id that no draft begins behind: a special token of the tokenizer."""
    tokenizer: Any = pair.tokenizer
    known = (tokenizer.mask_token_id, tokenizer.pad_token_id, *sorted(pair.eos))
    return next((int(token) for token in known if token is not None), 0)


def _compare(
    source: Source,
    head: ChainHead | BlockHead,
    recipe: Recipe,
    teacher: Teacher,
    answers: list[Answer],
    progress: Progress,
) -> list[Result]:
    """The head beside the profile's draft model, on greedy answers and on drawn ones."""
    depth = min(DEPTH, head.longest or DEPTH)
    drafts: dict[str, Drafts] = {FORMATS[recipe.kind].title: drafts_of_head(head, depth)}
    if source.draft is not None:
        drafts[source.draft] = drafts_of_model(source.pair.models[1], depth)
    drawn = Sampling.of(SamplingTable.model_validate(source.folder.facts["sampling"]))
    results: list[Result] = []
    with progress.counting("evaluated answers", len(answers)) as advance:
        for name, sampling in (("greedy", Sampling()), (f"temperature {drawn.temperature:g}", drawn)):
            some = [answer for answer in answers if answer.greedy == sampling.greedy]
            if some and not (sampling is drawn and drawn.greedy):
                found = evaluate(teacher, list(drafts.values()), some, sampling, depth, advance)
                results += [Result(draft, name, each) for draft, each in zip(drafts, found, strict=True) if each.rounds]
    if not results:
        raise UsageError(f"no answer kept for evaluation has {depth} tokens", "let --max-new-tokens be larger")
    return results
