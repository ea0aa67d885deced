"""The reports of a training: tables for the terminal, and a model card."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specctl.reporting.table import Table, as_markdown, inert
from specctl.versions import versions


@dataclass(frozen=True, slots=True)
class Report:
    """The final report: JSON values, and the same values as tables."""

    document: dict[str, Any]
    tables: Sequence[Table]


@dataclass(frozen=True, slots=True)
class Made:
    """The facts of a training: wall time in seconds by stage, over all runs, and versions of specctl and torch."""

    seconds: dict[str, float]
    versions: dict[str, str]

    @classmethod
    def of(cls, data: float, training: float, evaluation: float) -> "Made":
        stages, known = {"data": data, "training": training, "evaluation": evaluation}, versions()
        seconds = {stage: round(spent, 1) for stage, spent in stages.items()}
        return cls(seconds, {name: known[name] for name in ("specctl", "torch")})


def card(
    title: str,
    about: str,
    facts: Mapping[str, Any],
    answered: str,
    points: Sequence[str],
    settings: Mapping[str, Any],
    made: Made,
    tables: Sequence[Table],
) -> str:
    """A model card, in Markdown.

    Args:
        title: of the page.
        about: what the model is and how to use it.
        facts: of the material: the answered ``prompts`` and the ``sampling`` settings.
        answered: how the answers were sampled.
        points: further sentences.
        settings: of the training.
        made: how long it took.
        tables: its evaluation.
    """
    prompts, longest = facts["prompts"], facts["sampling"]["max_new_tokens"]
    training = ", ".join(
        f"{name.replace('_', ' ')} {value:g}" if isinstance(value, float) else f"{name.replace('_', ' ')} {value}"
        for name, value in settings.items()
    )
    seconds = ", ".join(f"{stage} {spent:.0f} s" for stage, spent in made.seconds.items())
    data = f"the target's answers to {prompts['count']} prompts ({inert(prompts['name'])}) of at most {longest} tokens"
    listed = [f"Data: {data}, {answered}.", *points, f"Training: {training}."]
    listed += [f"Time: {seconds}; {', '.join(f'{name} {version}' for name, version in made.versions.items())}.\n"]
    shown = [
        f"## {inert(table.title)}\n\n{as_markdown(table)}" if table.columns else f"**{inert(table.title)}**\n"
        for table in tables
    ]
    return "\n".join([f"# {title}\n", f"{about}\n", *(f"- {each}" for each in listed), *shown])
