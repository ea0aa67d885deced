"""The reliability diagram of a head. Matplotlib is imported when it is drawn."""

from importlib.util import find_spec
from pathlib import Path

from specctl.heads.evaluation import Evaluation
from specctl.reporting.document import render, write_files
from specctl.reporting.style import Picture, page, panels, style


def write_reliability(evaluation: Evaluation, folder: Path) -> list[Path]:
    """Write reliability.png and .svg; nothing where matplotlib is not installed."""
    if find_spec("matplotlib") is None:
        return []
    drawn = render(draw_reliability(evaluation))
    return write_files({f"{drawn.name}.png": drawn.png, f"{drawn.name}.svg": drawn.svg}, folder)


def draw_reliability(evaluation: Evaluation) -> Picture:
    """Predicted against true acceptance."""
    weight = evaluation.recipe.reject_weight
    design = (
        ""
        if weight == 1
        else f" A rejection weighs {weight:g} in training, so points lie above the diagonal by design."
    )
    with style():
        picture = page(
            "reliability",
            "Predicted and true acceptance",
            "What to see: on the diagonal, predictions are right on average. Lines are the middle half of the tokens, "
            f"areas of the points their number; {evaluation.tokens} tokens of "
            f"{evaluation.prompts} prompts.{design}",
            3.6,
        )
        (axes,) = panels(picture, 1, 1, "predicted acceptance", "acceptance probability")
        axes.plot([0, 1], [0, 1], "--", color="#777777", linewidth=1)
        bins = evaluation.reliability
        across = [one.middle for one in bins]
        axes.vlines(across, [one.lower for one in bins], [one.upper for one in bins], color="#0072B2", linewidth=1.5)
        sizes = [20 + 400 * one.count / evaluation.tokens for one in bins]
        axes.scatter(across, [one.value for one in bins], s=sizes, color="#0072B2", zorder=3)
        axes.set(xlim=(0, 1), ylim=(0, 1.02))
        axes.grid()
    return picture
