"""From a profile and prompts to trained heads in a folder; every stage can resume after an interruption."""

import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import torch

from specctl.decoding.prompt_format import PromptFormat
from specctl.errors import UsageError
from specctl.models.loading.model import load_model
from specctl.models.loading.profile_models import find_head
from specctl.models.predictors.head_checkpoint import CONFIG, KIND, WEIGHTS, Kind, save_head, save_weights
from specctl.observing.progress import Progress
from specctl.outputs import write_whole
from specctl.profile.lookup_policies import require_models
from specctl.profile.model_table import require_whole
from specctl.profile.schema import DraftTable, Profile
from specctl.prompts.suites import Suite
from specctl.replicas.replica import Replicas
from specctl.training import plain_draft
from specctl.training.collected import Lesson
from specctl.training.material import INDEX
from specctl.training.output_folder import STATE, OutputFolder
from specctl.training.predictors.disco_network import DiscoNetwork
from specctl.training.predictors.draft_states import DraftStates, Laws, ModelStates, StoredStates
from specctl.training.predictors.example_collecting import describe, draft_hash, load_lesson
from specctl.training.predictors.examples import DataFolder, Example
from specctl.training.predictors.predictor_evaluation import SEQUENCES_AT_ONCE, Evaluation, evaluate
from specctl.training.predictors.predictor_learner import Recipe, Schedule, Training
from specctl.training.predictors.predictor_report import as_document, head_card, head_config
from specctl.training.predictors.reliability_figure import write_reliability
from specctl.training.replicated_shards import collect
from specctl.versions import versions

EXAMPLES, SWEEP = "examples", "sweep.json"
OUTPUT = OutputFolder("train-head", EXAMPLES, ends=(CONFIG, SWEEP), others=(WEIGHTS, SWEEP))


@dataclass(frozen=True, slots=True)
class Source:
    """The examples and the draft that heads are trained on.

    Attributes:
        folder: the examples, completely collected.
        draft: gives the hidden states that the heads read, or what is read in their place.
    """

    folder: DataFolder
    draft: DraftStates


def without_head(profile: Profile) -> Profile:
    """The profile without a head on its draft; a policy that reads a head is replaced by ``constant``.

    Raises:
        UsageError: the profile has no draft.
    """
    return profile.model_copy(update={"draft": plain_draft.without_head(_draft(profile))})


def open_examples(path: Path, profile: Profile, progress: Progress, kind: Kind = "specdec++") -> Source:
    """The examples that an earlier run collected, with a draft model, the only one that is loaded.

    Of a draft head nothing is loaded, for its hidden states are among the examples, and for DISCO nothing at all.

    Raises:
        UsageError: the examples cannot be read, or were collected with another draft or for heads of another kind.
    """
    draft = _draft(profile)
    with progress.doing(f"loading {draft.model}"):
        folder = DataFolder.open(path)
        head = find_head("draft", draft, ("target", profile.target))
        if folder.facts["draft_sha256"] != draft_hash(draft, head):
            raise UsageError(
                f"{path} was collected with another draft ({folder.facts['draft']}) than {draft.model!r}",
                "collect examples with this draft first",
            )
        if (collected := folder.facts[KIND]) != kind:
            raise UsageError(
                f"{path} was collected for heads of the kind {collected}, not {kind}",
                f"collect examples for this kind, or train with --kind {collected}",
            )
        if kind == "disco":
            return Source(folder, Laws())
        states = _stored_states(draft) if head is not None else ModelStates(load_model(draft, role="draft").model)
    return Source(folder, states)


def collect_examples(
    output: Path,
    profile: Profile,
    suite: Suite,
    progress: Progress,
    *,
    resume: bool,
    kind: Kind = "specdec++",
    replicas: Callable[[], AbstractContextManager[Replicas]] | None = None,
) -> Source:
    """The examples of these prompts; missing ones are collected first. The target is loaded only to collect.

    Args:
        output: folder of the head; the examples are in a folder inside it.
        profile: the pair.
        suite: the prompts.
        progress: receives the stages.
        resume: continue what an earlier run left in the folder, instead of starting over.
        kind: of the heads that will read the examples.
        replicas: starts replicas that collect (`example_collecting.replica`); None to collect in this process.

    Raises:
        UsageError: the folder holds examples of other models, prompts or settings, or for another kind of heads.
    """
    draft, path = _draft(profile), output / EXAMPLES
    with progress.doing("hashing the draft's weights"):
        facts = describe(profile, suite, kind)
    folder = DataFolder.open(path) if resume and (path / INDEX).exists() else None
    if folder is not None:
        folder.require_same(facts)
        if folder.done == folder.prompts:
            return open_examples(path, profile, progress, kind)
    with ExitStack() as stack:
        source: Lesson[Example] | Replicas
        if replicas is not None:
            source = stack.enter_context(replicas())
        else:
            with progress.doing("loading") as say:
                pair, source = load_lesson(profile, kind, lambda what: say(f"loading {what}"))
            if told := PromptFormat.of(pair.tokenizer, profile.prompt).note(profile.prompt):
                progress.say(f"note: {told}")
        if folder is None:
            OUTPUT.start_over(output)
            folder = DataFolder.create(path, facts, len(suite.prompts))
        collect(folder, suite.prompts, source, progress)
    progress.say(f"examples: {folder.prompts} prompts in {folder.seconds:.1f} s, in {path}")
    if replicas is not None:
        return open_examples(path, profile, progress, kind)
    if kind == "disco":
        return Source(folder, Laws())
    return Source(folder, ModelStates(pair.models[1]) if len(pair.models) > 1 else _stored_states(draft))


def train_heads(
    output: Path, source: Source, recipes: Sequence[Recipe], schedule: Schedule, progress: Progress
) -> list[Evaluation]:
    """Train a head for each recipe, evaluate it on prompts that were not used in training, and write it with its card.

    Args:
        output: folder for a single head; several heads get one subfolder each, named by their recipes.
        source: the examples and the draft.
        recipes: depth and loss weight of each head.
        schedule: settings shared by all heads.
        progress: receives the stages.
    """
    split = source.folder.split()
    training = Training(source.draft, recipes, schedule, split.train, output / STATE)
    with progress.counting("steps", training.steps, training.step) as advance:
        training.run(advance)
    progress.say(f"training: {training.steps} steps in {training.seconds:.1f} s")
    began = perf_counter()
    with progress.counting("evaluation batches", -(-len(split.dev) // SEQUENCES_AT_ONCE)) as advance:
        evaluations = evaluate(source.draft, training.heads, recipes, split, schedule.mix, schedule.seed, advance)
    seconds = {"data": source.folder.seconds, "training": training.seconds, "evaluation": perf_counter() - began}
    progress.say(f"evaluation: {evaluations[0].tokens} tokens in {seconds['evaluation']:.1f} s")
    more = {
        "seconds": {stage: round(spent, 1) for stage, spent in seconds.items()},
        "versions": {name: version for name, version in versions().items() if name in ("specctl", "torch")},
    }
    for head, evaluation in zip(training.heads, evaluations, strict=True):
        folder = output if len(recipes) == 1 else output / evaluation.recipe.name
        config = head_config(evaluation, schedule, source.folder.facts, more)
        write_reliability(evaluation, folder)
        card = head_card(evaluation, config)
        if isinstance(head, DiscoNetwork):  # the last file says that all is written
            save_weights(folder, head.weights(), {KIND: "disco", **config}, card)
        else:
            save_head(folder, head, config, card)
        progress.say(f"wrote {folder}")
    if len(recipes) > 1:
        write_whole(output / SWEEP, json.dumps(as_document(evaluations), indent=1) + "\n")
    (output / STATE).unlink(missing_ok=True)
    return evaluations


def is_draft_head(profile: Profile) -> bool:
    """Whether the draft is a head on the target's states, told from its files without loading it.

    Raises:
        UsageError: the profile has no draft.
        ModelError: the draft cannot be found.
    """
    return find_head("draft", _draft(profile), ("target", profile.target)) is not None


def _stored_states(draft: DraftTable) -> StoredStates:
    """States of a draft head: heads are trained where it is told to run, else on the first GPU, if there is one."""
    if isinstance(draft.device, str) and draft.device != "auto":
        return StoredStates(torch.device(draft.device))
    return StoredStates(torch.device("cuda" if torch.cuda.is_available() else "cpu"))


def _draft(profile: Profile) -> DraftTable:
    if profile.draft is None:
        hint = "name one with --draft or in the profile"
        raise UsageError("the profile has no draft to train a head on", hint)
    require_models([profile.draft], "train-head", "name a draft model with --draft")
    if profile.draft.is_registered:
        raise UsageError("train-head reads hidden states, and a registered drafter has none", "name a draft model")
    require_whole(profile.draft, "draft", "train-head")
    return profile.draft
