"""Lookups among the drafts of a pair: there is nothing of them to load."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from specctl.models.running.lookup import LookupRunner
from specctl.profile.schema import ModelTable

if TYPE_CHECKING:
    from specctl.models.loading.pair import Pair


@dataclass(frozen=True, slots=True)
class Places:
    """Which of several drafts are lookups, and which are models or draft heads.

    Attributes:
        drafts: their tables.
    """

    drafts: Sequence[ModelTable]

    @property
    def loaded(self) -> list[int]:
        """The indices of those that have files."""
        return [index for index, table in enumerate(self.drafts) if not table.is_lookup]

    def above(self, above: Sequence[int | None]) -> list[int | None]:
        """For each draft that is loaded the index among them of the draft above it; None for the target."""
        numbers = {index: number for number, index in enumerate(self.loaded)}
        return [None if (upper := above[index]) is None else numbers[upper] for index in self.loaded]

    def filled(self, pair: "Pair", above: Sequence[int | None], vocabulary: int) -> "Pair":
        """The pair of the drafts that are loaded, with a runner for each lookup at its place.

        Args:
            pair: of the target and the drafts with files.
            above: as in `Pair`, for all drafts.
            vocabulary: the pair's shared vocabulary.
        """
        runners, heads = iter(pair.drafts), iter(pair.named_heads)
        return replace(
            pair,
            drafts=tuple(LookupRunner(vocabulary) if one.is_lookup else next(runners) for one in self.drafts),
            named_heads=tuple({} if one.is_lookup else next(heads) for one in self.drafts),
            above=tuple(above),
        )
