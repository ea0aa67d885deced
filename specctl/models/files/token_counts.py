"""Token counts in texts, from which a limited draft vocabulary is chosen."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from specctl.errors import ModelError
from specctl.models.files.tokenizer import Tokenizer

SCHEMA_VERSION = 1


def shipped_texts(tokenizer: Tokenizer) -> list[list[int]]:
    """The prompts that ship with the package, as ids without special tokens."""
    lines = (files("specctl") / "prompts" / "embedded_suite.jsonl").read_text(encoding="utf-8").splitlines()
    return [tokenizer.encode(json.loads(line)["prompt"], add_special_tokens=False) for line in lines]


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """Occurrences in texts by token id."""

    counts: Mapping[int, int]

    @classmethod
    def of(cls, texts: Iterable[Iterable[int]]) -> "TokenCounts":
        """Count the ids in texts."""
        return cls(Counter(token for text in texts for token in text))

    @classmethod
    def shipped(cls, tokenizer: Tokenizer) -> "TokenCounts":
        """Counts in the packaged prompts, for pairs without counts of their own."""
        return cls.of(shipped_texts(tokenizer))

    @classmethod
    def read(cls, path: Path) -> "TokenCounts":
        """Read counts from a file that `text` wrote; raises ModelError for a missing or different file."""
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            if found["schema_version"] != SCHEMA_VERSION:
                raise ValueError(f"schema_version is {found['schema_version']!r}, not {SCHEMA_VERSION}")
            counts = {int(token): number for token, number in found["counts"].items()}
            if not all(token >= 0 and isinstance(number, int) and number > 0 for token, number in counts.items()):
                raise ValueError("counts are whole numbers above 0, by ids from 0 on")
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            why = error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
            raise ModelError(
                f"{path} does not hold token counts ({why}).",
                "Run `specctl calibrate -o FILE` with draft.tokens to write one, or leave token_counts out.",
            ) from error
        return cls(counts)

    def text(self) -> str:
        """The contents of a file for `read`."""
        counts = {str(token): self.counts[token] for token in sorted(self.counts)}
        return json.dumps({"schema_version": SCHEMA_VERSION, "counts": counts}) + "\n"

    def likeliest(self, count: int, whole: int, always: Iterable[int] = ()) -> list[int]:
        """The ``count`` most frequent ids below ``whole``; ids in ``always``, such as ends of sequence, come before all
        others.

        Tokenizers number ids in merge order, so of equally frequent ids the lowest are the likeliest.
        """
        first = {id_ for id_ in always if id_ < whole}
        order = sorted(range(whole), key=lambda id_: (id_ not in first, -self.counts.get(id_, 0), id_))
        return order[:count]

    def covered(self, ids: Iterable[int]) -> float:
        """These ids' share of all occurrences; 1 without occurrences."""
        total = sum(self.counts.values())
        return sum(self.counts.get(id_, 0) for id_ in ids) / total if total else 1.0

    def expected(self, ids: Iterable[int], whole: int) -> float:
        """The expected `covered` on other texts, for distinct ids out of V, ``whole``.

        Good-Turing estimate: the ids that occur once estimate the mass of unseen ids, spread over all V ids.
        """
        total, ids = sum(self.counts.values()), set(ids)
        if not total:
            return len(ids) / whole
        once = sum(number == 1 for number in self.counts.values())
        again = sum(number for id_, number in self.counts.items() if number > 1 and id_ in ids)
        return (again + once * len(ids) / whole) / total
