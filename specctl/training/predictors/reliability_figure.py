"""The reliability diagram of a head. Matplotlib is imported only when the diagram is drawn."""

from importlib.util import find_spec
from pathlib import Path

from specctl.reporting.document import render, write_files
from specctl.reporting.style import Picture, page, panels, style
from specctl.training.predictors.predictor_evaluation import Evaluation


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
