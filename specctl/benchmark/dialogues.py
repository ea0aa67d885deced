"""The records of a suite as requests to a server."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from specctl.prompts.suites import Suite
from specctl.record_settings import own_settings
from specctl.remote.api_settings import api_settings


@dataclass(frozen=True, slots=True)
class Dialogue:
    """The requests of one record: its turns one after the other, or only one.

    Attributes:
        prompt, category: of the record.
        turns: what the user says; empty where ``messages`` are all.
        messages: of a chat before the turns.
        chat: whether it goes through the server's chat template.
        settings: in the interface's words.
    """

    prompt: str
    category: str
    turns: tuple[str, ...]
    messages: tuple[dict[str, Any], ...]
    chat: bool
    settings: dict[str, Any]

    def body(self, answers: Sequence[str]) -> dict[str, Any]:
        """The request of the turn behind these answers."""
        said = [text for pair in zip(self.turns, [*answers, ""], strict=False) for text in pair]
        if self.chat:
            roles = ("user", "assistant")
            turns = [{"role": roles[number % 2], "content": text} for number, text in enumerate(said)]
            return {**self.settings, "messages": [*self.messages, *turns[: 2 * len(answers) + 1]]}
        text = said[0] if len(self.turns) == 1 else "\n".join(said[: 2 * len(answers) + 1]) + "\n"
        return {**self.settings, "prompt": text}


def dialogues(suite: Suite, settings: dict[str, Any], chat: bool | None) -> list[Dialogue]:
    """The requests of a suite.

    Args:
        suite: the records.
        settings: keys of the sampling table, for records that do not have their own.
        chat: whether prompts and turns go through the server's chat template; None: turns do.

    Raises:
        UsageError: a record has a setting that no request can have.
    """
    found = []
    for one in suite.prompts:
        data = one.data
        own = {key: value for key, (_, value) in own_settings(data).items()}
        through = "messages" in data or (chat if chat is not None else "turns" in data)
        turns = tuple(data.get("turns") or ([data["prompt"]] if "prompt" in data else []))
        merged = api_settings({**settings, **own}, chat=through)
        found.append(Dialogue(one.id, one.category, turns, tuple(data.get("messages", ())), through, merged))
    return found
