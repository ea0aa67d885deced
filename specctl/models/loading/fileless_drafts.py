"""Lookups and registered drafters among the drafts of a pair: they have no files."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from specctl.models.running.lookup_runner import LookupRunner
from specctl.models.running.pair import Pair
from specctl.models.running.registered_runner import RegisteredRunner
from specctl.models.running.slot import Slot
from specctl.profile.schema import ModelTable


def runner_without_files(table: ModelTable, vocabulary: int) -> Slot:
    """The runner of a lookup or a registered drafter.

    Args:
        table: names it.
        vocabulary: V, the pair's shared vocabulary.

    Raises:
        PluginError: a registered drafter cannot be made.
    """
    return LookupRunner(vocabulary) if table.is_lookup else RegisteredRunner(table.model, vocabulary)


@dataclass(frozen=True, slots=True)
class Places:
    """Which of several drafts are models or draft heads, and which have no files.

    Attributes:
        drafts: their tables.
    """

    drafts: Sequence[ModelTable]

    @property
    def loaded(self) -> list[int]:
        """The indices of those that have files."""
        return [index for index, table in enumerate(self.drafts) if table.has_files]

    def above(self, above: Sequence[int | None]) -> list[int | None]:
        """For each draft that is loaded the index among them of the draft above it; None for the target."""
        numbers = {index: number for number, index in enumerate(self.loaded)}
        return [None if (upper := above[index]) is None else numbers[upper] for index in self.loaded]

    def filled(self, pair: Pair, above: Sequence[int | None], vocabulary: int) -> Pair:
        """The pair of the drafts that are loaded, with a runner for each draft without files at its place.

        Args:
            pair: of the target and the drafts with files.
            above: as in `Pair`, for all drafts.
            vocabulary: the pair's shared vocabulary.
        """
        runners, heads = iter(pair.drafts), iter(pair.named_predictors)
        return replace(
            pair,
            drafts=tuple(
                next(runners) if one.has_files else runner_without_files(one, vocabulary) for one in self.drafts
            ),
            named_predictors=tuple(next(heads) if one.has_files else {} for one in self.drafts),
            above=tuple(above),
        )
