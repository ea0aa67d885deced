"""Reports of a trained draft head: tables, its record, and its card."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from specctl.draft_training.courses import COURSES
from specctl.draft_training.evaluation import Acceptance
from specctl.draft_training.recipes import Recipe, Schedule
from specctl.models.head_files.formats import FORMATS
from specctl.reporting.table import DEFINITIONS, UP, Table, as_markdown, inert


@dataclass(frozen=True, slots=True)
class Result:
    """One draft on the answers of one kind.

    Attributes:
        draft: what it is called.
        answers: ``greedy``, or how they were drawn.
        acceptance: of its rounds.
    """

    draft: str
    answers: str
    acceptance: Acceptance


def result_tables(results: Sequence[Result]) -> list[Table]:
    """Acceptance by position, and the tokens accepted of a round."""
    depth = len(results[0].acceptance.reached)
    rounds = {result.answers: result.acceptance.rounds for result in results}
    counted = ", ".join(f"{count} rounds of {answers} answers" for answers, count in rounds.items())
    positions = tuple(f"token {number}{UP}" for number in range(1, depth + 1))
    counts = tuple(f"of {number}{UP}" for number in range(1, depth + 1))
    return [
        Table(
            "Acceptance by position in the round",
            ("draft", "answers", *positions),
            tuple(
                (result.draft, result.answers, *(f"{share:.1%}" for share in result.acceptance.by_position))
                for result in results
            ),
            labels=2,
            note=f"{DEFINITIONS} {counted}, to prompts that were not used in training.",
        ),
        Table(
            "Tokens accepted of a round",
            ("draft", "answers", *counts),
            tuple(
                (result.draft, result.answers, *(f"{length:.2f}" for length in result.acceptance.lengths))
                for result in results
            ),
            labels=2,
        ),
    ]


def as_document(results: Sequence[Result]) -> list[dict[str, Any]]:
    """The results as values that JSON can hold."""
    return [
        {
            "draft": result.draft,
            "answers": result.answers,
            "rounds": result.acceptance.rounds,
            "acceptance": list(result.acceptance.by_position),
            "accepted": list(result.acceptance.lengths),
        }
        for result in results
    ]


def head_card(
    results: Sequence[Result], recipe: Recipe, schedule: Schedule, facts: dict[str, Any], more: dict[str, Any]
) -> str:
    """The model card of a head, in Markdown.

    Args:
        results: of the head and what it was compared with.
        recipe, schedule: of its training.
        facts: models, prompts and settings of the answers.
        more: ``seconds`` by stage, and ``versions``.
    """
    sampling, prompts = facts["sampling"], facts["prompts"]
    kind = recipe.kind
    unused = {"kind"} | frozenset().union(*(course.flags for course in COURSES.values())) - COURSES[kind].flags
    told = {**asdict(recipe), **asdict(schedule)}
    shown = {name: value for name, value in told.items() if name not in unused and value != 0}
    settings = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in shown.items())
    seconds = ", ".join(f"{stage} {spent:.0f} s" for stage, spent in more["seconds"].items())
    tables = [f"## {inert(table.title)}\n\n{as_markdown(table)}" for table in result_tables(results)]
    return "\n".join(
        [
            f"# {FORMATS[kind].title} for {inert(facts['target'])}\n",
            f"A draft head that reads the hidden states of {inert(facts['target'])} ({FORMATS[kind].paper}), made by "
            "`specctl train-draft`. Use it with `model` in `[draft]` set to this folder.\n",
            f"- Data: the target's answers to {prompts['count']} prompts ({inert(prompts['name'])}) of at most "
            f"{sampling['max_new_tokens']} tokens, every second one greedy, the others at temperature "
            f"{sampling['temperature']:g}. Every tenth prompt was kept for evaluation.",
            f"- Training: {settings}.",
            f"- Time: {seconds}; {', '.join(f'{name} {version}' for name, version in more['versions'].items())}.\n",
            *tables,
        ]
    )
