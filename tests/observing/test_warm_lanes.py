"""A lane that was warmed up has ended all that it began."""

from collections.abc import Iterator
from typing import Any

from specctl.observing.results import Skipped
from specctl.observing.round_robin import RoundRobin


def test_rows_of_a_lane_that_skips_a_prompt_end_before_the_next_lanes() -> None:
    lanes, ended = object.__new__(RoundRobin), list[int]()
    lanes._batch, lanes._prompts = 3, [None]  # type: ignore[list-item]

    def outcomes(_: Any, numbers: list[int], *__: Any) -> Iterator[Any]:
        for row, _number in enumerate(numbers):
            ended.append(row)
            yield Skipped("a", "too long")

    lanes._outcomes = outcomes  # type: ignore[method-assign, assignment]
    assert not lanes._warm(None, 0)  # type: ignore[arg-type]
    assert ended == [0, 1, 2]
