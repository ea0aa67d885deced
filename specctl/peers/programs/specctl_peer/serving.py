"""The process's side of the conversation: a line of JSON in, a line of JSON out.

The first line that it writes has the engine's ``version``. A question that loads has the models' ``folder``, the way to
``draft`` with its value, ``weights``, ``cache``, ``threads``, ``context`` and ``stop``, the ids that end a text. A
question that runs has a ``batch``, the ids of each prompt, and the ``most`` tokens that may follow each; the answer to
it has a ``batch`` too, an `Answer` for each prompt.
"""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol


@dataclass
class Answer:
    """What followed a prompt.

    Attributes:
        ids: with the id that ended the text.
        seconds, first_seconds: from the prompts' ids to the last token, and to the first.
        passes: of the target, the prompt's not counted; 0 if unknown.
        drafted: tokens that the draft wrote; 0 if unknown.
        arrivals: seconds from the prompts' ids to each token; empty if unknown.
    """

    ids: list[int]
    seconds: float
    first_seconds: float
    passes: int = 0
    drafted: int = 0
    arrivals: list[float] = field(default_factory=list)


class Loaded(Protocol):
    """An engine with its models."""

    def run(self, batch: list[list[int]], most: int) -> list[Answer]: ...


def serve(version: Callable[[], str], load: Callable[[dict[str, Any]], Loaded]) -> None:
    """Answer questions until there are no more.

    Args:
        version: imports the engine's package and gives its version.
        load: makes the engine from a question.
    """
    # What libraries print must not get between the answers.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def say(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    try:
        say({"version": version()})
    except ImportError as error:
        say({"error": f"{sys.executable} cannot import it: {error}", "hint": _hint(error)})
        return
    except Exception as error:
        say({"error": _line(error)})
        return
    engine = None
    for line in sys.stdin:
        question = json.loads(line)
        try:
            if question["do"] == "load":
                engine = load(question)
                say({})
            else:
                assert engine is not None
                answered = engine.run(question["batch"], question["most"])
                say({"batch": [asdict(each) for each in answered]})
        except Exception as error:
            say({"error": _line(error)})


def _hint(error: ImportError) -> str:
    package = (error.name or "").replace("_", "-")
    return f"{sys.executable} -m pip install {package}" if package else ""


def _line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:500]}" if text else type(error).__name__
