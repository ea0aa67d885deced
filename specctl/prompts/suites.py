"""Prompt suites: public ones by name, the embedded one, and the user's own files."""

import hashlib
import json
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path
from typing import IO, Any, TypedDict, Unpack

from specctl.errors import UsageError
from specctl.jsonl import Record, deciding, read_records
from specctl.profile.wording import did_you_mean
from specctl.prompts.data_sources import fetched_rows, local_rows
from specctl.prompts.suite_formats import SUITES, FormatError

EMBEDDED = "embedded"
NO_CATEGORY = "all"


@dataclass(frozen=True, slots=True)
class SuitePrompt:
    """One prompt of a suite.

    Attributes:
        id: unique in its suite.
        category: results are grouped by it.
        data: an input record of ``generate`` with ``prompt``, ``messages`` or ``turns``, and its own settings.
    """

    id: str
    category: str
    data: dict[str, Any]

    def record(self, line: int) -> Record:
        """The prompt as input line number ``line``."""
        return Record(line, self.id, self.data)


@dataclass(frozen=True, slots=True)
class Suite:
    """The prompts to run, in the order of their source.

    Attributes:
        sha256: hash of the prompts' ids, categories and texts, to recognise equal suites.
    """

    name: str
    prompts: tuple[SuitePrompt, ...]
    sha256: str

    def categories(self) -> list[str]:
        """The categories, in order of first appearance."""
        return list(dict.fromkeys(prompt.category for prompt in self.prompts))


class Selection(TypedDict, total=False):
    """Which prompts of a source to take; all of them by default.

    Attributes:
        categories: take only these categories.
        samples_per_category: number of prompts to draw from each category; a smaller category is taken whole. With the
            same seed a larger sample contains every smaller one, and each category is drawn independently.
        seed: seed of the samples; 0 by default.
        limit: number of prompts to keep, after the other selections; the first ones are kept.
    """

    categories: Sequence[str]
    samples_per_category: int | None
    seed: int
    limit: int | None


def suite_names() -> list[str]:
    return [EMBEDDED, *SUITES]


def load_suite(name: str, *, data: Path | None = None, **selection: Unpack[Selection]) -> Suite:
    """Load a named suite.

    Args:
        name: one of `suite_names`.
        data: a local copy in the data set's own format, read instead of the public source.
        selection: see `Selection`.

    Raises:
        UsageError: the suite or a category is unknown, or the prompts cannot be read.
    """
    if name == EMBEDDED:
        if data is not None:
            raise UsageError(f"the suite '{EMBEDDED}' takes no --data", "give prompts of your own with -i FILE")
        with as_file(files("specctl.prompts") / "embedded_suite.jsonl") as path:
            return _suite(name, load_records(path).prompts, selection)
    if name not in SUITES:
        raise UsageError(f"there is no suite '{name}'{did_you_mean(name, suite_names())}")
    return _suite(name, _questions(name, data), selection)


def load_records(source: Path | IO[bytes], **selection: Unpack[Selection]) -> Suite:
    """Load a file or stream in the input format of ``generate``; records without a category get the category ``all``.

    Raises:
        UsageError: the source cannot be read, a record is bad (the message names its line), or a category is unknown.
    """
    if not isinstance(source, Path):
        return _suite("-", _records(source, "standard input"), selection)
    try:
        with source.open("rb") as stream:
            return _suite(str(source), _records(stream, str(source)), selection)
    except OSError as error:
        raise UsageError(f"cannot read {source}: {error.strerror}") from error


def sample(suite: Suite, count: int, seed: int = 0) -> Suite:
    """``count`` prompts, spread over the categories as evenly as possible, drawn as `Selection` draws samples."""
    categories = suite.categories()
    each, more = divmod(min(count, len(suite.prompts)), len(categories))
    prompts = list(suite.prompts)
    while True:
        chosen = _selected(prompts, samples_per_category=each + bool(more), seed=seed)
        if len(chosen) >= min(count, len(prompts)) or each >= len(prompts):
            break
        each += 1  # some category is smaller than its share
    taken = dict.fromkeys(categories, 0)
    # One prompt of each category in turn, so that the cut does not remove prompts of the last category only.
    order = sorted(chosen, key=lambda prompt: _turn(taken, prompt.category))
    kept = {prompt.id for prompt in order[:count]}
    return _whole(suite.name, [prompt for prompt in chosen if prompt.id in kept])


def _turn(taken: dict[str, int], category: str) -> int:
    taken[category] += 1
    return taken[category]


def _records(stream: IO[bytes], place: str) -> Iterator[SuitePrompt]:
    for record in read_records(stream):
        if record.error is not None:
            raise UsageError(f"{place}:{record.line}: {record.error}")
        category = record.data.get("category", NO_CATEGORY)
        if not isinstance(category, str):
            raise UsageError(f"{place}:{record.line}: category must be a string")
        yield SuitePrompt(str(record.id), category, deciding(record.data))


def _questions(name: str, path: Path | None) -> Iterator[SuitePrompt]:
    suite = SUITES[name]
    for number, row in local_rows(path) if path else fetched_rows(name, suite.source):
        try:
            question = suite.question(row)
        except FormatError as error:
            place = f"{path}:{number}" if path else f"row {number} of its source"
            raise UsageError(f"{place} is not in the format of the suite '{name}': {error}") from error
        identity = question.id or f"{name}/{number}"
        yield SuitePrompt(identity, question.category or name, question.data)


def _suite(name: str, source: Iterable[SuitePrompt], selection: Selection) -> Suite:
    prompts = list(source)
    if not prompts:
        raise UsageError(f"there are no prompts in {name}")
    if twice := [identity for identity, count in Counter(prompt.id for prompt in prompts).items() if count > 1]:
        raise UsageError(f"more than one prompt of {name} has the id {twice[0]}", "make the ids unique")
    return _whole(name, _selected(prompts, **selection))


def _whole(name: str, prompts: Sequence[SuitePrompt]) -> Suite:
    facts = [[prompt.id, prompt.category, prompt.data] for prompt in prompts]
    return Suite(name, tuple(prompts), hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest())


def _selected(
    prompts: list[SuitePrompt],
    categories: Sequence[str] = (),
    samples_per_category: int | None = None,
    seed: int = 0,
    limit: int | None = None,
) -> list[SuitePrompt]:
    known = list(dict.fromkeys(prompt.category for prompt in prompts))
    for category in categories:
        if category not in known:
            raise UsageError(f"there is no category '{category}'{did_you_mean(category, known)}")
    taken: set[str] = set()
    for category in categories or known:
        ids = [prompt.id for prompt in prompts if prompt.category == category]
        # Shuffle all, then cut: a larger sample then contains every smaller one.
        order = random.Random(f"{seed}/{category}").sample(ids, len(ids))
        taken.update(order[:samples_per_category])
    return [prompt for prompt in prompts if prompt.id in taken][:limit]
