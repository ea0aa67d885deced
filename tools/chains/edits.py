"""Edits of code and of stories, with what they ask for: texts that a model which follows them copies for the most part.

``python -m tools.chains.edits > edits.jsonl`` writes the prompts that `tools.chains.copying_pair` does not learn from.
"""

import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

THINGS = [
    "apple",
    "ball",
    "box",
    "cake",
    "car",
    "cat",
    "dog",
    "fish",
    "flower",
    "hat",
    "house",
    "kite",
    "lamp",
    "milk",
    "rain",
    "river",
    "ship",
    "sky",
    "star",
    "toy",
    "tree",
]
MEASURES = ["cost", "count", "height", "length", "number", "price", "score", "size", "total", "weight"]
DEEDS = ["add", "count", "find", "give", "keep", "make", "move", "pack", "sort", "take"]
NAMES = ["Ben", "Lily", "Mia", "Sam", "Sue", "Tim", "Tom", "Anna", "Max", "Lucy", "Jack", "Sara"]
PLACES = ["park", "garden", "house", "school", "forest", "kitchen", "farm", "beach"]
HELD_OUT = 24
"""Prompts that are written."""


@dataclass(frozen=True, slots=True)
class Edit:
    """A text, what is to become of it, and the text that follows it."""

    text: str
    wish: str
    edited: str

    @property
    def prompt(self) -> str:
        return f"{self.text}\n\n# {self.wish}\n\n"


def edit(chooser: random.Random, stories: Sequence[str]) -> Edit:
    """An edit of code, or of the beginning of one of these stories."""
    return _of_code(chooser) if chooser.random() < 0.5 else _of_story(chooser, chooser.choice(stories))


def _of_code(chooser: random.Random) -> Edit:
    code = "\n\n".join(_function(chooser) for _ in range(chooser.choice((1, 2, 2))))
    names = sorted(set(re.findall(r"[a-z]+_[a-z]+", code)))
    numbers = sorted(set(re.findall(r"\b[0-9]+\b", code)))
    if chooser.random() < 0.6:
        old, new = chooser.choice(names), _name(chooser, names)
        return Edit(code, f"Call {old} {new}.", re.sub(rf"\b{old}\b", new, code))
    old, new = chooser.choice(numbers), str(chooser.randint(2, 99))
    return Edit(code, f"Write {new} for {old}.", re.sub(rf"\b{old}\b", new, code))


def _of_story(chooser: random.Random, story: str) -> Edit:
    sentences = re.split(r"(?<=[.!?]) ", " ".join(story.split()))
    text = " ".join(sentences[: chooser.randint(4, 8)])
    words = [word for word in (*NAMES, *THINGS, *PLACES) if re.search(rf"\b{word}\b", text)]
    if not words:
        return Edit(text, "Say it again.", text)
    old = chooser.choice(words)
    new = chooser.choice([word for word in (NAMES if old in NAMES else THINGS) if word not in words])
    return Edit(text, f"Write {new} for {old}.", re.sub(rf"\b{old}\b", new, text))


def _name(chooser: random.Random, taken: Sequence[str] = ()) -> str:
    while (name := f"{chooser.choice(THINGS)}_{chooser.choice(MEASURES)}") in taken:
        pass
    return name


def _function(chooser: random.Random) -> str:
    given = [_name(chooser)]
    given.append(_name(chooser, given))
    made = _name(chooser, given)
    lines = [f"def {chooser.choice(DEEDS)}_{chooser.choice(THINGS)}({', '.join(given)}):"]
    known = list(given)
    for step in range(chooser.randint(2, 5)):
        first, number = chooser.choice(known), chooser.randint(2, 99)
        sign = chooser.choice("+-*")
        if step == 0:
            lines.append(f"    {made} = {given[0]} {sign} {given[1]}")
            known.append(made)
            continue
        lines += chooser.choice(
            (
                [f"    {made} = {first} {sign} {number}"],
                [f"    if {first} > {number}:", f"        return {chooser.choice(known)}"],
                [f"    for {given[1]} in range({number}):", f"        {made} += {first}"],
                [f"    print({first}, {number})"],
            )
        )
    return "\n".join([*lines, f"    return {made}"])


def main() -> None:
    chooser = random.Random("held out")
    for number in range(HELD_OUT):
        one = _of_code(chooser)
        print(json.dumps({"id": f"edit-{number}", "category": "code", "prompt": one.prompt, "edited": one.edited}))


if __name__ == "__main__":
    main()
