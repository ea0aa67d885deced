"""Prompts, chats and conversations become token ids."""

from collections.abc import Mapping, Sequence

from specctl.errors import RecordError, UsageError
from specctl.models.files.tokenizer import Tokenizer
from specctl.profile.schema import PromptTable

Message = Mapping[str, str]


class PromptFormat:
    """Turns prompts, chats and conversations into ids. What decides about chat templates is here and nowhere else.

    Args:
        tokenizer: the target's.
        chat: whether a plain prompt or turn goes through the chat template as a user's message; None for the rule:
            it does where the tokenizer has a template.
        system: the system message of a chat that has none of its own.

    Attributes:
        chat: what was decided.
    """

    def __init__(self, tokenizer: Tokenizer, chat: bool | None = None, system: str | None = None) -> None:
        self.tokenizer = tokenizer
        self.chat = bool(tokenizer.chat_template) if chat is None else chat
        self._system = system

    @classmethod
    def of(cls, tokenizer: Tokenizer, table: PromptTable) -> "PromptFormat":
        """What a profile's ``[prompt]`` table asks for; raises UsageError if its system message has no place."""
        if table.system is not None and not tokenizer.chat_template:
            raise UsageError("a system message needs a chat template, and the target has none", "leave the message out")
        return cls(tokenizer, table.chat, table.system)

    def note(self, table: PromptTable) -> str | None:
        """What to tell a user once a run: that the rule, and nobody, chose the template."""
        if table.chat is None and self.chat:
            return "asked through the target's chat template; --raw sends the text as it is"
        return None

    def prompt(self, text: str) -> list[int]:
        """Ids of one prompt; raises RecordError if it is empty or needs a chat template that is missing."""
        if self.chat:
            return self.messages([{"role": "user", "content": text}])
        return self._ids(text)

    def messages(self, messages: Sequence[Message]) -> list[int]:
        """Ids of a chat with the assistant's turn opened."""
        if not self.tokenizer.chat_template:
            raise RecordError("no_chat_template", "the target's tokenizer has no chat template; give `prompt` instead")
        if self._system is not None and all(message["role"] != "system" for message in messages):
            messages = [{"role": "system", "content": self._system}, *messages]
        try:
            text = self.tokenizer.apply_chat_template(
                [dict(message) for message in messages], add_generation_prompt=True, tokenize=False
            )
        except Exception as error:  # a template is a program of its own and may raise anything
            raise RecordError("chat_template", f"the chat template rejects this conversation: {error}") from error
        # The template has already added the special tokens.
        return self._ids(str(text), add_special_tokens=False)

    def conversation(self, turns: Sequence[str], answers: Sequence[str]) -> list[int]:
        """Ids of a conversation up to the first turn that has no answer yet.

        Not through a chat template, turns and answers are joined with one line break after each.
        """
        asked = turns[: len(answers) + 1]
        if not self.chat:
            return self.plain(asked, answers)
        messages = [{"role": "user", "content": asked[0]}]
        for answer, turn in zip(answers, asked[1:], strict=True):
            messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": turn}]
        return self.messages(messages)

    def plain(self, turns: Sequence[str], answers: Sequence[str]) -> list[int]:
        """Ids of turns, each but the last with its answer, joined with one line break after each."""
        lines = [text for pair in zip(turns, [*answers, ""], strict=True) for text in pair][:-1]
        return self._ids("\n".join(lines) + "\n")

    def _ids(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            what = f"contains an unpaired surrogate ({text[error.start]!a}) that no tokenizer can read"
            raise RecordError("invalid_text", f"the prompt {what}") from error
        # Not verbose: the length is checked against the context later, and a warning would tear the live panel.
        ids = list(self.tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"])
        if not ids:
            raise RecordError("empty_prompt", "the prompt is empty")
        return ids
