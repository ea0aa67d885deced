"""Reports of a trained draft head: tables, its record, and its card."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from specctl.models.draft_heads.kinds import HEAD_KINDS
from specctl.reporting.table import DEFINITIONS, UP, Table, inert
from specctl.training.drafts.courses import COURSES
from specctl.training.drafts.draft_evaluation import Acceptance
from specctl.training.drafts.recipes import Recipe
from specctl.training.epochs import Schedule
from specctl.training.model_card import Made, card


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

    @property
    def document(self) -> dict[str, Any]:
        """Values that JSON can hold."""
        return {
            "draft": self.draft,
            "answers": self.answers,
            "rounds": self.acceptance.rounds,
            "acceptance": list(self.acceptance.by_position),
            "accepted": list(self.acceptance.lengths),
        }


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


def draft_card(results: Sequence[Result], recipe: Recipe, schedule: Schedule, facts: dict[str, Any], made: Made) -> str:
    """The model card of a head, in Markdown.

    Args:
        results: of the head and what it was compared with.
        recipe, schedule: of its training.
        facts: models, prompts and settings of the answers.
        made: how long it took.
    """
    kind, target = HEAD_KINDS[recipe.kind], inert(facts["target"])
    flags = [course.flags for course in COURSES.values()]
    unused = {"kind"} | frozenset().union(*flags) - COURSES[recipe.kind].flags
    settings = {**asdict(recipe), **asdict(schedule)}
    return card(
        f"{kind.title} for {target}",
        f"A draft head that reads the hidden states of {target} ({kind.paper}), made by `specctl train-draft`. Use "
        "it with `model` in `[draft]` set to this folder.",
        facts,
        f"every second one greedy, the others at temperature {facts['sampling']['temperature']:g}. Every tenth prompt "
        "was kept for evaluation",
        (),
        {name: value for name, value in settings.items() if name not in unused and value != 0},
        made,
        result_tables(results),
    )
