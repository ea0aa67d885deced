"""`specctl train-draft`: train a small network that drafts from the target's hidden states."""

from dataclasses import replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from specctl.commands.grouped_command import But, grouped, option
from specctl.commands.option_groups import LimitOptions, PairOptions, RunOptions, ShowOptions
from specctl.commands.options import TemplateOption
from specctl.commands.prompt_options import PromptOptions
from specctl.commands.tasks.replication import FewReplicaOptions
from specctl.commands.training import TrainingFlags
from specctl.errors import UsageError
from specctl.models.draft_heads.kinds import HEAD_KINDS, RECIPES, Recipe

if TYPE_CHECKING:
    from specctl.profile import Profile
    from specctl.terminal.progress import TerminalProgress
    from specctl.training.draft_heads import DraftHeads
    from specctl.training.model_card import Report
    from specctl.training.subject import Source


if TYPE_CHECKING:
    Kind = str
else:
    Kind = StrEnum("Kind", [(kind, kind) for kind in RECIPES])


USUAL = "kind output profile target draft suite input_ max_new_tokens answers depth epochs resume"
"""The parameters that --help shows."""


@grouped(usual=USUAL)
def train_draft(
    *,
    ctx: typer.Context,
    kind: Kind = option("What to train.", default=...),
    output: Path = option("Folder for the head and the state to resume from.", "-o --output DIR", default=...),
    models: PairOptions,
    run: Annotated[RunOptions, But(("check", "foreign_head"))],
    replicas: FewReplicaOptions,
    prompts: PromptOptions,
    limit: LimitOptions,
    temperature: float = option("Temperature of every second answer.", "-t --temperature T", default=1.0, min=0),
    answers_only: bool = option("Collect answers and stop.", "--answers-only", default=False),
    answers: Path | None = option("Answers of an earlier run, such as of another kind's.", "DIR"),
    depth: int | None = option("Decoder layers of the head. Default: 1; 5 for dflash and dspark.", "N", min=1),
    steps: int | None = option(
        "Tokens drafted from each place in training. Default: 7; 3 for mtp, 5 for glide, 15 for dflash.", "N", min=1
    ),
    draft_vocabulary: int | None = option(
        "Most frequent tokens that an eagle3 head can draft. Default: 32000, or all.", "N", min=1
    ),
    anchors: int | None = option("Blocks of an answer in an epoch, for dflash and dspark. Default: 512.", "N", min=1),
    epochs: int = option("Passes over the answers.", "N", default=3, min=1),
    batch_size: int = option("Answers per step.", "N", default=8, min=1),
    lr: float = option("Highest learning rate; it rises at first and falls to 0 along a cosine.", "X", default=1e-4),
    optimizer: Literal["adamw", "muon"] = option(
        "adamw as published, or muon for the matrices of the head's layers.", default="adamw"
    ),
    seed: int = option("Seed of answers, weights and order.", "N", default=0, min=0),
    chat: TemplateOption = None,
    resume: bool = option("Continue an interrupted run.", "--resume", default=False),
    show: Annotated[ShowOptions, But(("report",))],
) -> None:
    """Train a draft head: a small network that drafts from the target's hidden states.

    The target answers the prompts, every second one greedily, and the head learns to draft these answers from what the
    target's layers held when it wrote them. Every tenth prompt is held out to compare the head with the profile's draft
    model.

    Examples:

    [cyan]specctl train-draft --kind eagle3 --target my-model -i prompts.jsonl -o my-eagle[/]

    [cyan]specctl train-draft --kind dspark --target my-model --answers my-eagle/answers -o my-dspark[/]
    """
    if lr <= 0:
        raise UsageError("--lr must be more than 0")
    flags = TrainingFlags("answers", answers, answers_only, prompts, seed, output, resume, run, replicas, show)
    flags.check(ctx)
    sampling = replace(limit, temperature=temperature, seed=seed)
    found = run.resolve(models, {**sampling.flags, "prompt.chat": chat})
    recipe = partial(_recipe, kind, depth=depth, steps=steps, draft_vocabulary=draft_vocabulary, anchors=anchors)

    def begin(found: "Profile") -> "DraftHeads":
        from specctl.training.draft_heads import DraftHeads

        recipe()  # a setting that the kind does not have is told before anything is read
        return DraftHeads(found)

    def finish(subject: "DraftHeads", source: "Source[Any, Any]", progress: "TerminalProgress") -> "Report":
        from specctl.training.epochs import Schedule

        schedule = Schedule(epochs, batch_size, lr, seed)
        return subject.make(output, source, replace(recipe(), optimizer=optimizer), schedule, progress)

    flags.train(found, begin, finish)


def _recipe(kind: Kind, **own: int | None) -> Recipe:
    """The published settings of a kind, with those that the user gave.

    Raises:
        UsageError: the user gave one that the kind does not have.
    """
    row = HEAD_KINDS[kind]
    given = {name: value for name, value in own.items() if value is not None}
    if foreign := [name for name in given if name not in row.flags]:
        raise UsageError(f"--{foreign[0].replace('_', '-')} has no meaning for --kind {kind}", "leave it out")
    return replace(RECIPES[kind], **given)  # type: ignore[arg-type]
