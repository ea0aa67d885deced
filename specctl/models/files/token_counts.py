"""How often ids occur in texts: a draft of few tokens should be able to write the likeliest."""

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
        """Those in texts of ids."""
        return cls(Counter(token for text in texts for token in text))

    @classmethod
    def shipped(cls, tokenizer: Tokenizer) -> "TokenCounts":
        """Counts in the prompts that ship with the package, where nothing is known about a pair's own texts."""
        return cls.of(shipped_texts(tokenizer))

    @classmethod
    def read(cls, path: Path) -> "TokenCounts":
        """Counts in a file that `text` wrote; raises ModelError if there is no such file or it holds something else."""
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
                "Let `specctl calibrate -o FILE` write one for a profile with draft.tokens, or leave token_counts out.",
            ) from error
        return cls(counts)

    def text(self) -> str:
        """The contents of a file for `read`."""
        counts = {str(token): self.counts[token] for token in sorted(self.counts)}
        return json.dumps({"schema_version": SCHEMA_VERSION, "counts": counts}) + "\n"

    def likeliest(self, count: int, whole: int, always: Iterable[int] = ()) -> list[int]:
        """The ``count`` ids below ``whole`` that occur most; some, such as those that end a text, come before all
        others.

        Tokenizers number their ids by how early they were merged, so among ids that occur equally often the lowest are
        the likeliest.
        """
        first = {id_ for id_ in always if id_ < whole}
        order = sorted(range(whole), key=lambda id_: (id_ not in first, -self.counts.get(id_, 0), id_))
        return order[:count]

    def covered(self, ids: Iterable[int]) -> float:
        """The share of all occurrences that are of these ids; 1 where there are none."""
        total = sum(self.counts.values())
        return sum(self.counts.get(id_, 0) for id_ in ids) / total if total else 1.0

    def expected(self, ids: Iterable[int], whole: int) -> float:
        """`covered` as expected of other texts, for different ids out of V, ``whole``.

        Ids that occur once here stand for those that other texts have and these have not, any of the V ids (Good and
        Turing).
        """
        total, ids = sum(self.counts.values()), set(ids)
        if not total:
            return len(ids) / whole
        once = sum(number == 1 for number in self.counts.values())
        again = sum(number for id_, number in self.counts.items() if number > 1 and id_ in ids)
        return (again + once * len(ids) / whole) / total
