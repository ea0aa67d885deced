"""`specctl train-head` and `specctl train-draft`: networks that predict acceptance, or that draft."""

from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import typer

from specctl.commands.flags import (
    FewReplicaOptions,
    LimitOptions,
    PairOptions,
    PromptOptions,
    RunOptions,
    SamplingOptions,
    ShowOptions,
    TemplateOption,
    protect_profile,
    warn,
)
from specctl.commands.loading import start_replicas
from specctl.commands.requests import But, grouped, option, require_unused
from specctl.errors import UsageError
from specctl.models.draft_heads.kinds import HEAD_KINDS, RECIPES, Recipe
from specctl.outputs import Outputs

if TYPE_CHECKING:
    from specctl.profile import Profile
    from specctl.terminal.progress import TerminalProgress
    from specctl.training.draft_heads import DraftHeads
    from specctl.training.model_card import Report
    from specctl.training.predictors import Predictors
    from specctl.training.subject import Source, Subject


class _TrainRequest:
    """Options of both commands: training data, output and devices."""

    __slots__ = ()
    # of the flag that takes material of an earlier run, without dashes; followed by ``-only`` it is the flag that stops
    # once the material is there
    material: ClassVar[str]
    ctx: typer.Context
    output: Path
    models: PairOptions
    run: RunOptions
    replicas: FewReplicaOptions
    prompts: PromptOptions
    seed: int
    chat: bool | None
    resume: bool
    show: ShowOptions

    @property
    def earlier(self) -> Path | None:
        """The folder with data of an earlier run."""
        found: Path | None = getattr(self, self.material)
        return found

    @property
    def only(self) -> bool:
        """Whether to stop once the data is collected."""
        return bool(getattr(self, f"{self.material}_only"))

    @property
    def sampling(self) -> SamplingOptions:
        """The sampling settings."""
        raise NotImplementedError

    def subject(self, profile: "Profile") -> "Subject[Any, Any]":
        """The trainable network and its data; imports torch."""
        raise NotImplementedError

    def finish(self, subject: Any, source: "Source[Any, Any]", progress: "TerminalProgress") -> "Report":
        """Train, and write the result."""
        raise NotImplementedError

    def check(self) -> None:
        """Raise UsageError unless the flags name one source and valid replicas."""
        flag = f"--{self.material}"
        self.replicas.check_one()
        if self.earlier is not None and self.only:
            raise UsageError(f"use either {flag}-only or {flag}, not both")
        if self.earlier is not None:
            require_unused(self.ctx, self.material, "replaces the prompts", only=PromptOptions)
        elif self.prompts.suite is None and self.prompts.input_ is None:
            # No default: training on the prompts of bench would make bench evaluate on training data.
            hint = f"give --input FILE or --suite NAME (embedded for a trial), or {flag} DIR"
            raise UsageError("there are no prompts to train on", hint)

    def train(self) -> None:
        """Collect, train, write and show."""
        from specctl.terminal.progress import resumable

        found = self.run.resolve(self.models, {**self.sampling.flags, "prompt.chat": self.chat})
        progress = self.show.bars()
        with progress.doing("starting"):
            from specctl.models.running.threads import use

            use(found.profile.threads)
            subject = self.subject(found.profile)
        with Outputs(force=self.run.force) as outputs, resumable(progress.console, self.output):
            self.prompts.read_by(outputs)
            protect_profile(outputs, found, heads=False)
            outputs.protect(self.material, self.earlier)
            outputs.folder("output", self.output, resumed=self.resume)
            if self.resume and subject.is_finished(self.output):
                progress.say(f"{self.output} is finished")
                return
            source = self._source(subject, progress)
            if self.only:
                return
            report = self.finish(subject, source, progress)
        self.show.outcome(report.document, report.tables)

    def _source(self, subject: "Subject[Any, Any]", progress: "TerminalProgress") -> "Source[Any, Any]":
        """Data of an earlier run, or newly collected from the prompts."""
        if self.earlier is not None:
            source = subject.open(self.earlier, progress)
            if not self.resume:
                subject.start_over(self.output)
            return source
        replicas = None
        if (replication := self.replicas.replication) is not None:
            replicas = partial(start_replicas, replication, subject.profile, subject.maker, subject.setup, progress)
        suite, batch = self.prompts.chosen(self.seed), self.replicas.at_once or 1
        source = subject.collect(self.output, suite, progress, resume=self.resume, batch=batch, replicas=replicas)
        for identity, reason in source.material.left_out.items():
            warn(f"prompt {identity} is left out: {reason}")
        return source


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainHeadRequest(_TrainRequest):
    """The flags of `specctl train-head`; UsageError for conflicting ones."""

    material: ClassVar[str] = "examples"
    ctx: typer.Context
    output: Path = option("Folder for the head and the state to resume from.", "-o --output DIR", default=...)
    kind: Literal["specdec++", "disco"] = option(
        "What the head reads: the draft's hidden states, or its likeliest tokens' probabilities. disco's is trained on "
        "drafted rounds, as is that of a draft which is itself a head on the target's states.",
        default="specdec++",
    )
    models: PairOptions
    run: Annotated[RunOptions, But(("check", "foreign_head"))]
    replicas: FewReplicaOptions
    prompts: PromptOptions
    limit: LimitOptions
    temperature: float = option("Temperature of answers and draft tokens.", "-t --temperature T", default=1.0, min=0)
    top_k: int = option("Top-k of answers and draft tokens; 0 keeps all.", "K", default=50, min=0)
    examples_only: bool = option("Collect training examples and stop.", "--examples-only", default=False)
    examples: Path | None = option("Examples of an earlier run; the target is not loaded.", "DIR")
    depth: int | None = option("Residual blocks; 0 is a linear head. Default: 3.", "N", min=0)
    reject_weight: float | None = option(
        "Weight of a rejection in the loss; an acceptance weighs 1. Default: 6, of disco 1.", "X"
    )
    mix: float | None = option(
        "Share of the target's tokens in the text that a draft model reads. Default: 0.15.", "X", min=0, max=0.99
    )
    signals: bool = option(
        "Let the head read the draft's entropy and probabilities too, unlike in the paper.", "--signals", default=False
    )
    epochs: int | None = option("Passes over the data, each with a new mix. Default: 3, of disco 20.", "N", min=1)
    batch_size: int = option("Answers per step.", "N", default=32, min=1)
    lr: float | None = option(
        "Adam's initial learning rate; it falls to 0 along a cosine. Default: 5e-05, of disco 0.01.", "X"
    )
    seed: int = option("Seed of answers, draft tokens, mixing and the head.", "N", default=0, min=0)
    chat: TemplateOption = None
    sweep: bool = option(
        "Train depths 0 to 4 with rejection weights 1, 3, 6 and 12, each in a folder.", "--sweep", default=False
    )
    resume: bool = option("Continue an interrupted run.", "--resume", default=False)
    show: Annotated[ShowOptions, But(("report",))]

    def __post_init__(self) -> None:
        shape = {
            "--depth": self.depth,
            "--mix": self.mix,
            "--signals": self.signals or None,
            "--sweep": self.sweep or None,
        }
        if self.kind == "disco" and (given := [flag for flag, value in shape.items() if value is not None]):
            raise UsageError(f"{given[0]} needs a head on hidden states, unlike --kind disco", "leave it out")
        weight, _, rate = self.schedule
        if weight <= 0 or rate <= 0:
            raise UsageError("--reject-weight and --lr must be more than 0")
        self.check()

    @property
    def sampling(self) -> SamplingOptions:
        return replace(self.limit, temperature=self.temperature, top_k=self.top_k, seed=self.seed)

    @property
    def schedule(self) -> tuple[float, int, float]:
        """The weight of a rejection, epochs and learning rate; defaults are SpecDec++'s, or suit DISCO."""
        weight, passes, rate = (1.0, 20, 1e-2) if self.kind == "disco" else (6.0, 3, 5e-5)
        return (
            weight if self.reject_weight is None else self.reject_weight,
            passes if self.epochs is None else self.epochs,
            rate if self.lr is None else self.lr,
        )

    def subject(self, profile: "Profile") -> "Predictors":
        from specctl.training.predictors import Predictors

        return Predictors(profile, self.kind, self.mix)

    def finish(self, subject: "Predictors", source: "Source[Any, Any]", progress: "TerminalProgress") -> "Report":
        from specctl.training.epochs import Schedule
        from specctl.training.predictor_learner import PredictorRecipe
        from specctl.training.predictors import sweep_recipes

        weight, passes, rate = self.schedule
        depth = None if self.kind == "disco" else 3 if self.depth is None else self.depth
        one = PredictorRecipe(depth, weight, self.signals)
        recipes = sweep_recipes(signals=self.signals) if self.sweep else [one]
        return subject.make(self.output, source, recipes, Schedule(passes, self.batch_size, rate, self.seed), progress)


@grouped(usual="kind output profile target draft suite input_ max_new_tokens examples depth epochs sweep resume")
def train_head(request: TrainHeadRequest) -> None:
    """Train a head on the draft that predicts acceptance, for the policy specdec++ or disco.

    The target answers the prompts, the draft drafts a token at every position, and the head learns from the draft's
    hidden states which draft tokens the target accepts. Every tenth prompt is held out to evaluate the head.

    Examples:

    [cyan]specctl train-head -p my-profile -i prompts.jsonl -o my-head[/]

    [cyan]specctl train-head --examples my-head/examples -o sweep --sweep[/]
    """
    request.train()


if TYPE_CHECKING:
    Kind = str
else:
    Kind = StrEnum("Kind", [(kind, kind) for kind in RECIPES])


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainDraftRequest(_TrainRequest):
    """The flags of `specctl train-draft`; UsageError for conflicting ones."""

    material: ClassVar[str] = "answers"
    ctx: typer.Context
    kind: Kind = option("What to train.", default=...)
    output: Path = option("Folder for the head and the state to resume from.", "-o --output DIR", default=...)
    models: PairOptions
    run: Annotated[RunOptions, But(("check", "foreign_head"))]
    replicas: FewReplicaOptions
    prompts: PromptOptions
    limit: LimitOptions
    temperature: float = option("Temperature of every second answer.", "-t --temperature T", default=1.0, min=0)
    answers_only: bool = option("Collect answers and stop.", "--answers-only", default=False)
    answers: Path | None = option("Answers of an earlier run, such as of another kind's.", "DIR")
    depth: int | None = option("Decoder layers of the head. Default: 1; 5 for dflash and dspark.", "N", min=1)
    steps: int | None = option(
        "Tokens drafted from each place in training. Default: 7; eagle1 1, mtp 3, glide 5, dflash 15.",
        "N",
        min=1,
    )
    draft_vocabulary: int | None = option(
        "Most frequent tokens that an eagle3 head can draft, or that an eagle1 head learns. Default: 32000, or all; "
        "all for eagle1.",
        "N",
        min=1,
    )
    anchors: int | None = option("Blocks of an answer in an epoch, for dflash and dspark. Default: 512.", "N", min=1)
    epochs: int = option("Passes over the answers.", "N", default=3, min=1)
    batch_size: int = option("Answers per step.", "N", default=8, min=1)
    lr: float = option("Highest learning rate; it rises at first and falls to 0 along a cosine.", "X", default=1e-4)
    optimizer: Literal["adamw", "muon"] = option(
        "adamw as published, or muon for the matrices of the head's layers.", default="adamw"
    )
    seed: int = option("Seed of answers, weights and order.", "N", default=0, min=0)
    chat: TemplateOption = None
    resume: bool = option("Continue an interrupted run.", "--resume", default=False)
    show: Annotated[ShowOptions, But(("report",))]

    def __post_init__(self) -> None:
        if self.lr <= 0:
            raise UsageError("--lr must be more than 0")
        self.check()
        _ = self.recipe

    @property
    def sampling(self) -> SamplingOptions:
        return replace(self.limit, temperature=self.temperature, seed=self.seed)

    @property
    def recipe(self) -> Recipe:
        """The published settings of the kind, changed by the flags; UsageError for a setting that the kind lacks."""
        names = ("depth", "steps", "draft_vocabulary", "anchors")
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        if foreign := [name for name in given if name not in HEAD_KINDS[self.kind].flags]:
            flag = foreign[0].replace("_", "-")
            raise UsageError(f"--{flag} does not apply to --kind {self.kind}", "leave it out")
        return replace(RECIPES[self.kind], **given, optimizer=self.optimizer)

    def subject(self, profile: "Profile") -> "DraftHeads":
        from specctl.training.draft_heads import DraftHeads

        return DraftHeads(profile)

    def finish(self, subject: "DraftHeads", source: "Source[Any, Any]", progress: "TerminalProgress") -> "Report":
        from specctl.training.epochs import Schedule

        schedule = Schedule(self.epochs, self.batch_size, self.lr, self.seed)
        return subject.make(self.output, source, self.recipe, schedule, progress)


@grouped(usual="kind output profile target draft suite input_ max_new_tokens answers depth epochs resume")
def train_draft(request: TrainDraftRequest) -> None:
    """Train a draft head: a small network that drafts from the target's hidden states.

    The target answers the prompts, every second one greedily, and the head learns to draft these answers from what the
    target's layers held when it wrote them. Every tenth prompt is held out to compare the head with the profile's draft
    model.

    Examples:

    [cyan]specctl train-draft --kind eagle3 --target my-model -i prompts.jsonl -o my-eagle[/]

    [cyan]specctl train-draft --kind dspark --target my-model --answers my-eagle/answers -o my-dspark[/]
    """
    request.train()
