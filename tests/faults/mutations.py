"""Mutated texts, the same for the same seed, and the counting of what they led to."""

import argparse
import random
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from specctl.errors import SpecctlError

CHARACTERS = "\"'\\[]{}=:,.#-+0123456789eE \t\n\r\x00\x1b\x7f\x85\u2028\u2029\ufeff\u202e\U0001f600éx"
"""Those that have a meaning somewhere, and those that are easily forgotten."""


@dataclass
class Tally:
    """How many cases were valid, refused properly, and neither, with the first reports of the last kind."""

    counts: Counter[str] = field(default_factory=Counter)
    reports: list[str] = field(default_factory=list)

    def case(self, name: str, run: Callable[[], bool]) -> None:
        """Run a case: true is valid, false or one of our errors is refused, any other exception uncaught."""
        try:
            self.counts["valid" if run() else "refused"] += 1
        except SpecctlError:
            self.counts["refused"] += 1
        except Exception:
            self.uncaught(f"{name}\n{traceback.format_exc(limit=-6)}")

    def uncaught(self, report: str) -> None:
        self.counts["uncaught"] += 1
        if len(self.reports) < 20:
            self.reports.append(report[-3000:])

    def __str__(self) -> str:
        counts = ", ".join(f"{self.counts[what]:,} {what}" for what in ("valid", "refused", "uncaught"))
        return f"{self.counts.total():,} cases: {counts}"


def mutated(draw: random.Random, text: str, words: Sequence[str], others: Sequence[str]) -> str:
    """A text with one to four random changes.

    Args:
        draw: makes the choices.
        text: to change.
        words: to put in somewhere.
        others: texts from which lines are taken.
    """
    for _ in range(draw.choice((1, 1, 2, 4))):
        at = draw.randrange(len(text) + 1)
        end = min(len(text), at + draw.choice((0, 1, 1, 2, 5, 30)))
        lines = text.split("\n")
        line = draw.randrange(len(lines))
        match draw.randrange(9):
            case 0:
                text = text[:at] + text[end:]
            case 1:
                text = text[:at] + draw.choice(CHARACTERS) + text[end:]
            case 2 | 3:
                text = text[:at] + draw.choice(words) + text[end:]
            case 4:  # a value
                head, equals, _ = lines[line].partition("=")
                text = "\n".join([*lines[:line], head + equals + draw.choice(words), *lines[line + 1 :]])
            case 5:
                text = "\n".join([*lines[:line], *lines[line + 1 :]])
            case 6:
                text = "\n".join([*lines[: line + 1], *lines[line:]])
            case 7:
                text = "\n".join([*lines[:line], draw.choice(draw.choice(others).split("\n")), *lines[line:]])
            case 8:
                text = text[:at] + text[at:end] * draw.choice((2, 50, 3000)) + text[end:]
    return text


def main(fuzz: Callable[[int, int], Tally], about: str) -> None:
    """The command line of a fuzzer; exits with 1 if anything was not caught."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--count", type=int, default=1000, help="number of cases")
    parser.add_argument("--seed", type=int, default=0, help="seed of all changes")
    options = parser.parse_args()
    tally = fuzz(options.count, options.seed)
    for report in tally.reports:
        print(report, "-" * 80, sep="\n")
    print(tally)
    sys.exit(1 if tally.counts["uncaught"] else 0)
