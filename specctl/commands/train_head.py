"""`specctl train-head`: train a network on the draft that predicts acceptance, for `specdec++` or `disco`."""

from dataclasses import replace
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

if TYPE_CHECKING:
    from specctl.profile import Profile
    from specctl.terminal.progress import TerminalProgress
    from specctl.training.model_card import Report
    from specctl.training.predictors import Predictors
    from specctl.training.subject import Source


USUAL = "kind output profile target draft suite input_ max_new_tokens examples depth epochs sweep resume"
"""The parameters that --help shows."""


@grouped(usual=USUAL)
def train_head(
    *,
    ctx: typer.Context,
    output: Path = option("Folder for the head and the state to resume from.", "-o --output DIR", default=...),
    kind: Literal["specdec++", "disco"] = option(
        "What the head reads: the draft's hidden states, or its likeliest tokens' probabilities. disco's is trained on "
        "drafted rounds, as is that of a draft which is itself a head on the target's states.",
        default="specdec++",
    ),
    models: PairOptions,
    run: Annotated[RunOptions, But(("check", "foreign_head"))],
    replicas: FewReplicaOptions,
    prompts: PromptOptions,
    limit: LimitOptions,
    temperature: float = option("Temperature of answers and draft tokens.", "-t --temperature T", default=1.0, min=0),
    top_k: int = option("Top-k of answers and draft tokens; 0 keeps all.", "K", default=50, min=0),
    examples_only: bool = option("Collect training examples and stop.", "--examples-only", default=False),
    examples: Path | None = option("Examples of an earlier run; the target is not loaded.", "DIR"),
    depth: int | None = option("Residual blocks; 0 is a linear head. Default: 3.", "N", min=0),
    reject_weight: float | None = option(
        "Weight of a rejection in the loss; an acceptance weighs 1. Default: 6, of disco 1.", "X"
    ),
    mix: float | None = option(
        "Share of the target's tokens in the text that a draft model reads. Default: 0.15.", "X", min=0, max=0.99
    ),
    signals: bool = option(
        "Let the head read the draft's entropy and probabilities too, unlike in the paper.", "--signals", default=False
    ),
    epochs: int | None = option("Passes over the data, each with a new mix. Default: 3, of disco 20.", "N", min=1),
    batch_size: int = option("Answers per step.", "N", default=32, min=1),
    lr: float | None = option(
        "Adam's initial learning rate; it falls to 0 along a cosine. Default: 5e-05, of disco 0.01.", "X"
    ),
    seed: int = option("Seed of answers, draft tokens, mixing and the head.", "N", default=0, min=0),
    chat: TemplateOption = None,
    sweep: bool = option(
        "Train depths 0 to 4 with rejection weights 1, 3, 6 and 12, each in a folder.", "--sweep", default=False
    ),
    resume: bool = option("Continue an interrupted run.", "--resume", default=False),
    show: Annotated[ShowOptions, But(("report",))],
) -> None:
    """Train a head on the draft that predicts acceptance, for the policy specdec++ or disco.

    The target answers the prompts, the draft drafts a token at every position, and the head learns from the draft's
    hidden states which draft tokens the target accepts. Every tenth prompt is held out to evaluate the head.

    Examples:

    [cyan]specctl train-head -p my-profile -i prompts.jsonl -o my-head[/]

    [cyan]specctl train-head --examples my-head/examples -o sweep --sweep[/]
    """
    shape = {"--depth": depth, "--mix": mix, "--signals": signals or None, "--sweep": sweep or None}
    if kind == "disco" and (given := [flag for flag, value in shape.items() if value is not None]):
        raise UsageError(f"{given[0]} is for heads on hidden states, which --kind disco has not", "leave it out")
    weight, passes, rate = _defaults(kind, reject_weight, epochs, lr)
    if weight <= 0 or rate <= 0:
        raise UsageError("--reject-weight and --lr must be more than 0")
    flags = TrainingFlags("examples", examples, examples_only, prompts, seed, output, resume, run, replicas, show)
    flags.check(ctx)
    sampling = replace(limit, temperature=temperature, top_k=top_k, seed=seed)
    found = run.resolve(models, {**sampling.flags, "prompt.chat": chat})

    def begin(found: "Profile") -> "Predictors":
        from specctl.training.predictors import Predictors

        return Predictors(found, kind, mix)

    def finish(subject: "Predictors", source: "Source[Any, Any]", progress: "TerminalProgress") -> "Report":
        from specctl.training.epochs import Schedule
        from specctl.training.predictor_learner import PredictorRecipe
        from specctl.training.predictors import sweep_recipes

        own = None if kind == "disco" else 3 if depth is None else depth
        recipes = sweep_recipes(signals=signals) if sweep else [PredictorRecipe(own, weight, signals)]
        return subject.make(output, source, recipes, Schedule(passes, batch_size, rate, seed), progress)

    flags.train(found, begin, finish)


def _defaults(kind: str, reject_weight: float | None, epochs: int | None, lr: float | None) -> tuple[float, int, float]:
    """The weight of a rejection, the passes and the learning rate: SpecDec++'s own, or some that fit a DISCO head."""
    weight, passes, rate = (1.0, 20, 1e-2) if kind == "disco" else (6.0, 3, 5e-5)
    return (
        weight if reject_weight is None else reject_weight,
        passes if epochs is None else epochs,
        rate if lr is None else lr,
    )
