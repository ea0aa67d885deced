"""What differs between the conditions under which two results files were measured."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from specctl.observing.candidate import Candidate, candidate_record
from specctl.observing.results import Header, as_record

NOT_COMPARED = frozenset(
    {"created", "argv", "candidates", "oracle", "others_busy", "papers", "schema_version", "threads"}
)
"""Header fields that say nothing about how the runs were measured, or that others say too, as the devices do how many
threads there were; candidates are compared one by one."""
NOT_OF_THE_MODELS = frozenset({"sampling", "policy", "description", "provenance", "schema_version", "threads"})
"""Tables of a profile that the header or the candidates have too, and what changes no run."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A fact about how the files were measured, with its value in each; None where one does not have it."""

    fact: str
    a: Any
    b: Any


def header_differences(a: Header, b: Header) -> Iterator[Difference]:
    """What differs between the conditions that two results files tell of."""
    drawn = all(header.sampling.get("temperature") for header in (a, b))
    ours, theirs = (
        {**as_record(header), "drafts": header.drafts, "sampling": _sampling(header, drawn=drawn)} for header in (a, b)
    )
    for name in ours:
        if name not in NOT_COMPARED:
            yield from _differences(name, ours[name], theirs[name])


def setting_differences(pairs: Iterable[tuple[Candidate, Candidate]]) -> Iterator[Difference]:
    """Values of equal labels that differ, as where another version has other defaults."""
    for a, b in pairs:
        if a.label == b.label:
            yield from _differences(a.label, candidate_record(a), candidate_record(b))


def _sampling(header: Header, *, drawn: bool) -> dict[str, Any]:
    """The sampling table, ``verification`` where both files drew tokens."""
    table = header.sampling
    return table if drawn else {key: value for key, value in table.items() if key != "verification"}


def _differences(name: str, a: Any, b: Any) -> Iterator[Difference]:
    """The leaves of two values that differ, each with its dotted name; a missing table has no leaves."""
    tables = [isinstance(value, dict) for value in (a, b)]
    if all(tables) or (any(tables) and None in (a, b)):
        a, b = a or {}, b or {}
        for key in dict.fromkeys([*a, *b]):
            if not (name.startswith("profile") and key in NOT_OF_THE_MODELS):
                yield from _differences(f"{name}.{key}", a.get(key), b.get(key))
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b) and any(isinstance(one, dict) for one in a):
        for index, (ours, theirs) in enumerate(zip(a, b, strict=True)):
            yield from _differences(f"{name}.{index}", ours, theirs)
    elif a != b:
        yield Difference(name, a, b)
