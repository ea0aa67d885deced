"""Prompts, chats and conversations become token ids."""

from collections.abc import Mapping, Sequence

from transformers import PreTrainedTokenizerBase

from specctl.errors import RecordError
from specctl.profile.schema import PromptTable

Message = Mapping[str, str]


class PromptFormat:
    """Turns prompts, chats and conversations into ids.

    Args:
        tokenizer: the target's.
        chat: whether a plain prompt goes through the chat template as a user's message.
        system: the system message of a chat that has none of its own.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, chat: bool = False, system: str | None = None) -> None:
        self.tokenizer = tokenizer
        self._chat = chat
        self._system = system

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, table: PromptTable) -> "PromptFormat":
        """What a profile's ``[prompt]`` table asks for."""
        return cls(tokenizer, table.chat, table.system)

    def for_chat(self) -> "PromptFormat":
        """The same tokenizer through its chat template if it has one, without a system message."""
        return PromptFormat(self.tokenizer, chat=bool(self.tokenizer.chat_template))

    def prompt(self, text: str) -> list[int]:
        """Ids of one prompt; raises RecordError if it is empty or needs a chat template that is missing."""
        if self._chat:
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

        Without a chat template, turns and answers are joined with one line break after each.
        """
        asked = turns[: len(answers) + 1]
        if not self.tokenizer.chat_template and self._system is None:
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
