"""Reports of trained heads: tables, the fields of config.json, and the model card."""

from collections.abc import Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from specctl.policies import DISTRIBUTION_SIGNALS, SIGNAL_NAMES, TOP_PROBS
from specctl.reporting.document import render, write_files
from specctl.reporting.style import Picture, page, panels, style
from specctl.reporting.table import DEFINITIONS, DOWN, UP, Columns, Table, inert, number
from specctl.training.epochs import Schedule
from specctl.training.model_card import Made, card
from specctl.training.predictors.predictor_evaluation import Evaluation, Score
from specctl.training.predictors.predictor_learner import PredictorRecipe

SWEEP_DEPTHS = (0, 1, 2, 3, 4)
SWEEP_WEIGHTS = (1.0, 3.0, 6.0, 12.0)
_HEAD = "the head"
_SPECDEC = "SpecDec++: Huang, Guo, Wang 2024, arXiv 2405.19715"
_DISCO = "DISCO: Mamou and others 2024, arXiv 2405.04304"


def sweep_recipes(*, signals: bool = False) -> list[PredictorRecipe]:
    """The recipes of all heads in SpecDec++'s Table 3, which read no signals."""
    return [PredictorRecipe(depth, weight, signals) for depth in SWEEP_DEPTHS for weight in SWEEP_WEIGHTS]


def predictor_tables(evaluation: Evaluation) -> list[Table]:
    """Tables of one head: scores of the head and of single signals, the verdict, and the head's reliability."""
    weight = evaluation.recipe.reject_weight
    depth = "" if evaluation.recipe.depth is None else f"depth {evaluation.recipe.depth}, "
    scores = {_HEAD: evaluation.predictor, **{SIGNAL_NAMES[name]: found for name, found in evaluation.signals.items()}}
    rows = tuple((name, *_cells(found)) for name, found in scores.items())
    return [
        Table(
            f"How well acceptance is predicted ({depth}rejection weight {weight:g})",
            ("by", f"KL (nats){DOWN}", f"weighted loss (nats){DOWN}", f"calibration error{DOWN}", f"AUROC{UP}"),
            rows,
            note=f"{DEFINITIONS} {evaluation.tokens} tokens of {evaluation.prompts} prompts that were not used "
            f"in training, {evaluation.accepted:.1%} of them accepted.",
        ),
        _verdict(evaluation),
        Table(
            "Reliability",
            ("predicted", "tokens", "mean prediction", "accepted"),
            tuple(
                (f"{each.low:.1f} to {each.high:.1f}", str(each.count), f"{each.middle:.3f}", f"{each.value:.3f}")
                for each in evaluation.reliability
            ),
            note=""
            if weight == 1
            else f"Predictions are too low by design: in training a rejection weighs {weight:g} times an acceptance.",
        ),
    ]


def sweep_tables(evaluations: Sequence[Evaluation]) -> list[Table]:
    """All heads of a sweep: KL as in SpecDec++'s Table 3, then every score."""
    kl = {(e.recipe.depth, e.recipe.reject_weight): e.predictor.kl for e in evaluations}
    plain = next(e.signals for e in evaluations if e.recipe.reject_weight == 1)
    signals = ", ".join(f"{SIGNAL_NAMES[name]} {found.kl:.4f}" for name, found in plain.items())
    return [
        Table(
            f"KL (nats) by depth and rejection weight{DOWN}",
            ("depth", *(f"{weight:g}" for weight in SWEEP_WEIGHTS)),
            tuple((str(d), *(f"{kl[d, weight]:.4f}" for weight in SWEEP_WEIGHTS)) for d in SWEEP_DEPTHS),
            note=f"{DEFINITIONS} {evaluations[0].tokens} tokens of {evaluations[0].prompts} prompts that were not "
            f"used in training. KL of single signals: {signals}.",
        ),
        Table.of("Every head compared with the best single signal", _COMPARED, evaluations),
    ]


def predictor_config(
    evaluation: Evaluation, mixed: float, schedule: Schedule, facts: dict[str, Any], made: Made
) -> dict[str, Any]:
    """The fields of config.json about the draft, the data, the training and the metrics.

    Args:
        evaluation: scores of the predictor.
        mixed: share of the target's tokens in what the draft read in training.
        schedule: of its training.
        facts: models, prompts and settings of the training data.
        made: how long it took.
    """
    return {
        "draft_model": facts["draft"],
        "draft_sha256": facts["draft_sha256"],
        "target_model": facts["target"],
        "sampling": facts["sampling"],
        "prompts": facts["prompts"],
        "training": {**asdict(evaluation.recipe), "mix": mixed, **asdict(schedule)},
        "metrics": evaluation.metrics,
        **asdict(made),
    }


def predictor_card(evaluation: Evaluation, config: dict[str, Any], made: Made) -> str:
    """The model card of the predictor, in Markdown; ``config`` as `predictor_config` gives it."""
    sampling, settings = config["sampling"], config["training"]
    draft, target = inert(config["draft_model"]), inert(config["target_model"])
    disco = settings["depth"] is None
    unused = {"signals", "depth", "mix"} if disco else {"signals"}
    policy, paper = ("disco", _DISCO) if disco else ("specdec++", _SPECDEC)
    reads = "the draft's last hidden state"
    if disco:
        reads = (
            f"the {TOP_PROBS} largest probabilities of the draft's distribution behind the token, its entropy, and the "
            "number of the token in its round"
        )
    if settings["signals"]:
        signals = ", ".join(SIGNAL_NAMES[name] for name in DISTRIBUTION_SIGNALS)
        reads += f", and the {signals} of the step that drew the token"
    return card(
        f"An acceptance head for {draft}",
        f"Predicts whether {target} will accept a token that {draft} drafted ({paper}). Made by `specctl train-head`; "
        f"for the policy `{policy}`, set `head` in `[draft]` to this folder. It belongs to one set of draft weights, "
        f"SHA-256 `{config['draft_sha256']}`.",
        config,
        f"temperature {sampling['temperature']:g}, top-k {sampling['top_k']}",
        [f"It reads {reads}."],
        {name: value for name, value in settings.items() if name not in unused},
        made,
        predictor_tables(evaluation),
    )


def _verdict(evaluation: Evaluation) -> Table:
    by = "KL" if evaluation.recipe.reject_weight == 1 else "weighted loss"
    if beaten_by := [SIGNAL_NAMES[name] for name in evaluation.beaten_by]:
        return Table(
            f"The head is no better than {' or '.join(beaten_by)} alone, by {by}.",
            (),
            (),
            note="Train on more prompts, or use a policy that reads this signal: it predicts as well and costs less.",
            alarm=True,
        )
    return Table(f"The head is better than each single signal by {by}.", (), ())


def _cells(found: Score) -> tuple[str, ...]:
    return f"{found.kl:.4f}", f"{found.loss:.4f}", f"{found.ece:.3f}", number(found.auroc, 3)


def _best(evaluation: Evaluation) -> str:
    return min(evaluation.signals, key=lambda name: evaluation.signals[name].loss)


_COMPARED: Columns[Evaluation] = {
    "head": lambda one: one.recipe.name,
    f"weighted loss{DOWN}": lambda one: f"{one.predictor.loss:.4f}",
    "best signal's loss": lambda one: f"{one.signals[_best(one)].loss:.4f}",
    "best signal": lambda one: SIGNAL_NAMES[_best(one)],
    f"calibration error{DOWN}": lambda one: f"{one.predictor.ece:.3f}",
    f"AUROC{UP}": lambda one: number(one.predictor.auroc, 3),
}


def write_reliability(evaluation: Evaluation, folder: Path) -> list[Path]:
    """Write reliability.png and .svg and return their paths; without matplotlib, write nothing."""
    if find_spec("matplotlib") is None:
        return []
    drawn = render(draw_reliability(evaluation))
    return write_files({f"{drawn.name}.png": drawn.png, f"{drawn.name}.svg": drawn.svg}, folder)


def draw_reliability(evaluation: Evaluation) -> Picture:
    """Draw predicted against true acceptance."""
    weight = evaluation.recipe.reject_weight
    design = (
        ""
        if weight == 1
        else f" The rejection weight in training is {weight:g}, so points lie above the diagonal by design."
    )
    with style():
        picture = page(
            "reliability",
            "Predicted and true acceptance",
            "What to see: on the diagonal, predictions are right on average. A line spans the middle half of a bin's "
            f"tokens, the area of a point shows their number. {evaluation.tokens} tokens of "
            f"{evaluation.prompts} prompts.{design}",
            3.6,
        )
        (axes,) = panels(picture, 1, 1, "predicted acceptance", "acceptance probability")
        axes.plot([0, 1], [0, 1], "--", color="#777777", linewidth=1)
        bins = evaluation.reliability
        across = [each.middle for each in bins]
        lower, upper = [each.lower for each in bins], [each.upper for each in bins]
        axes.vlines(across, lower, upper, color="#0072B2", linewidth=1.5)
        sizes = [20 + 400 * each.count / evaluation.tokens for each in bins]
        axes.scatter(across, [each.value for each in bins], s=sizes, color="#0072B2", zorder=3)
        axes.set(xlim=(0, 1), ylim=(0, 1.02))
        axes.grid()
    return picture
