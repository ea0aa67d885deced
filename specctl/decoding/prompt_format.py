"""Turns prompts, chats and conversations into token ids."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from specctl.errors import RecordError, UsageError
from specctl.messages import Message, argument_texts, function_of, read_messages, with_function, with_objects
from specctl.models.files.tokenizer import Tokenizer
from specctl.profile.schema import PromptTable

IDENTIFIERS = ("tool_call_id", "parsed")  # Fields that repeat or number other content, so templates need not use them
REASONING = ("reasoning_content", "reasoning", "thinking")
"""Fields that templates leave out of earlier answers on purpose, as their models are trained."""
OWN_SYSTEM = ("system", "developer")  # Roles of a message that replaces the profile's system message


@dataclass(frozen=True, slots=True)
class Part:
    """One piece of content of a message, to be looked for in the template's output."""

    place: str  # the name in error messages
    number: int  # the message's number
    marked: Callable[[dict[str, Any]], dict[str, Any]]  # the message with this content replaced by a mark
    mark: str  # the mark, as a template that uses the content writes it


class PromptFormat:
    """Turns prompts, chats and conversations into ids. The only module that decides about chat templates.

    Args:
        tokenizer: the target's.
        chat: whether a plain prompt or turn goes through the chat template as a user's message; None to do so if the
            tokenizer has a template.
        system: the system message for chats without their own.

    Attributes:
        chat: the decision.
    """

    def __init__(self, tokenizer: Tokenizer, chat: bool | None = None, system: str | None = None) -> None:
        self.tokenizer = tokenizer
        self.chat = bool(tokenizer.chat_template) if chat is None else chat
        self._system = system

    @classmethod
    def of(cls, tokenizer: Tokenizer, table: PromptTable) -> "PromptFormat":
        """The format of a profile's ``[prompt]`` table. Raises UsageError if its system message cannot be used."""
        if table.system is not None and not tokenizer.chat_template:
            raise UsageError("a system message needs a chat template, and the target has none", "leave the message out")
        return cls(tokenizer, table.chat, table.system)

    def note(self, table: PromptTable) -> str | None:
        """A note to the user, once per run, that the template is used by default."""
        if table.chat is None and self.chat:
            return "using the chat template (--raw turns it off)"
        return None

    def prompt(self, text: str) -> list[int]:
        """Ids of one prompt. Raises RecordError if it is empty or needs a missing chat template."""
        if self.chat:
            return self.messages([{"role": "user", "content": text}])
        return self._ids(text)

    def messages(self, messages: Sequence[Message]) -> list[int]:
        """Ids of a chat, up to the start of the assistant's turn.

        Where the template does not know the role ``developer``, such messages become system messages, as in OpenAI's
        API.

        Raises:
            RecordError: the input is not a list of messages, the template is missing, it rejects the messages, or it
                drops a part of them.
        """
        if not self.tokenizer.chat_template:
            raise RecordError("no_chat_template", "the target's tokenizer has no chat template; give `prompt` instead")
        read = read_messages(messages)
        first = 0
        if self._system is not None and all(message["role"] not in OWN_SYSTEM for message in read):
            read, first = [{"role": "system", "content": self._system}, *read], 1
        try:
            text = self._written(read, first)
        except RecordError as error:
            if all(message["role"] != "developer" for message in read):
                raise
            try:
                text = self._written([{**one, "role": _known_role(one["role"])} for one in read], first)
            except RecordError as other:
                raise other from error
        # The template has already added the special tokens.
        return self._ids(text, add_special_tokens=False)

    def _written(self, messages: list[dict[str, Any]], first: int) -> str:
        """The template's output for messages. Raises RecordError if it rejects them or drops a part of them.

        Args:
            messages: as `read_messages` returns them.
            first: the number of the first message that the user wrote.
        """
        texts = argument_texts(messages)
        try:
            text = self._rendered(messages)
            # A template that writes JSON itself would quote a string of JSON again.
            as_objects = any(json.dumps(one, ensure_ascii=False) in text for one in texts)
        except Exception as error:  # a template is a program and may raise anything
            if not texts:
                raise _rejected(error) from error
            as_objects = True
        if as_objects:
            messages = with_objects(messages)
            try:
                text = self._rendered(messages)
            except Exception as error:
                raise _rejected(error) from error
        if (part := self._left_out(messages, text, first)) is not None:
            raise RecordError("chat_template", f"the chat template has no place for {part.place}; leave it out")
        return text

    def _rendered(self, messages: Sequence[Message]) -> str:
        copied = [_in_parts(message) if self._reads_parts else dict(message) for message in messages]
        return self._said(copied)

    @cached_property
    def _reads_parts(self) -> bool:
        """Whether the template accepts content only as a list of parts, as many vision models' templates do."""
        mark = "Qzparts9"
        asked = {"role": "user", "content": mark}

        def says(message: dict[str, Any]) -> bool:
            try:
                return mark in self._said([message])
            except Exception:  # a template is a program and may raise anything
                return False

        return not says(asked) and says(_in_parts(asked))  # the template ignores parts; transformers writes them

    def _said(self, copied: list[dict[str, Any]]) -> str:
        return str(self.tokenizer.apply_chat_template(copied, add_generation_prompt=True, tokenize=False))

    def _left_out(self, messages: list[dict[str, Any]], text: str, first: int) -> Part | None:
        """The first part of messages without effect on the template's output; None if all have one."""
        parts = list(_parts(messages, first))
        marked = list(messages)
        for part in parts:
            marked[part.number] = part.marked(marked[part.number])
        try:
            found = self._rendered(marked)
        except Exception:  # it rejects the mark, so it does read this content
            found = ""
        return next((part for part in parts if part.mark not in found and self._silent(part, messages, text)), None)

    def _silent(self, part: Part, messages: list[dict[str, Any]], text: str) -> bool:
        """Whether changing a part leaves the template's output unchanged."""
        changed = list(messages)
        changed[part.number] = part.marked(changed[part.number])
        try:
            if self._rendered(changed) != text:
                return False
            ends = changed[: part.number + 1]
            return not (part.place.endswith(REASONING) and part.mark in self._rendered(ends))
        except Exception:
            return False

    def conversation(self, turns: Sequence[str], answers: Sequence[str]) -> list[int]:
        """Ids of a conversation up to the first turn without an answer.

        Without a chat template, turns and answers are joined, each followed by a line break.
        """
        asked = turns[: len(answers) + 1]
        if not self.chat:
            return self.plain(asked, answers)
        messages = [{"role": "user", "content": asked[0]}]
        for answer, turn in zip(answers, asked[1:], strict=True):
            messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": turn}]
        return self.messages(messages)

    def plain(self, turns: Sequence[str], answers: Sequence[str]) -> list[int]:
        """Ids of turns, each but the last followed by its answer, with a line break after each."""
        lines = [text for pair in zip(turns, [*answers, ""], strict=True) for text in pair][:-1]
        return self._ids("\n".join(lines) + "\n")

    def _ids(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            what = f"contains an unpaired surrogate ({text[error.start]!a}) that no tokenizer can read"
            raise RecordError("invalid_text", f"the prompt {what}") from error
        # Not verbose: the length is checked against the context later, and a warning would disrupt the live panel.
        ids = list(self.tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"])
        if not ids:
            raise RecordError("empty_prompt", "the prompt is empty")
        return ids


def _rejected(error: Exception) -> RecordError:
    return RecordError("chat_template", f"the chat template rejects this conversation: {error}")


def _in_parts(message: Message) -> dict[str, Any]:
    """A message with its content as a list of one part."""
    return {**message, "content": [{"type": "text", "text": message["content"]}]}


def _known_role(role: str) -> str:
    return "system" if role == "developer" else role


def _parts(messages: Sequence[dict[str, Any]], first: int) -> Iterator[Part]:
    """All content of messages."""
    called: set[str] = set()
    for number, message in enumerate(messages):
        name = f"messages.{number - first}" if number >= first else "the profile's system message"
        for key, value in message.items():
            mark = f"Qz{number}x{key}x9"
            if key == "role" or key in IDENTIFIERS or (key == "content" and not value.strip()):
                continue
            if key == "name" and message["role"] == "tool" and value in called:
                continue  # the call itself has this content
            if key == "tool_calls":
                for at, call in enumerate(value):
                    inner = function_of(call)
                    called.add(inner["name"])
                    for field in ("name", "arguments"):
                        if inner.get(field):
                            place = f"{name}.tool_calls.{at}.{'function.' * ('function' in call)}{field}"
                            yield Part(place, number, _mark_call(at, field, f"{mark}{at}{field}"), f"{mark}{at}{field}")
                continue
            told = f"{name} (role {message['role']})" if key == "content" else f"{name}.{key}"
            yield Part(told, number, _mark_field(key, mark), mark)


def _mark_field(key: str, mark: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda message: {**message, key: mark}


def _mark_call(at: int, field: str, mark: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def marked(message: dict[str, Any]) -> dict[str, Any]:
        calls = list(message["tool_calls"])
        is_object = isinstance(function_of(calls[at])[field], dict)
        calls[at] = with_function(calls[at], **{field: {mark: mark} if is_object else mark})
        return {**message, "tool_calls": calls}

    return marked
