"""The tokenizer in a GGUF file: llama.cpp's ids and texts, with the names that transformers gives the tokens."""

import re
from collections.abc import Callable, Iterable, Mapping
from ctypes import c_int32, create_string_buffer
from functools import cached_property, partial
from itertools import pairwise, repeat
from pathlib import Path
from threading import Lock, Thread, stack_size
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from specctl.errors import RecordError
from specctl.models.files.tokenizer import SPACE, Backend, ChatTemplate, LightTokenizer
from specctl.models.llama.model import LlamaModel

SENTENCEPIECE = (1, 4)
"""llama.cpp's numbers of the kinds of tokenizers that write a space as `SPACE`: SPM and UGM."""
UNKNOWN, UNUSED, CONTROL, USER_DEFINED, STRIPPING = 1, 2, 8, 16, 128 | 256  # llama.cpp's flags of a token
SPECIAL = UNKNOWN | CONTROL  # tokens that decoded text omits
NAMES = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "pad_token": "padding",
    "sep_token": "seperator",  # as GGUF spells it
    "cls_token": "cls",
    "mask_token": "mask",
}
"""The names of special tokens in chat templates, and in a file's metadata."""
ANCHORS = ("\n", "a", ".")
"""Prefixes by which a text is encoded as the middle of one."""
WORDS = re.compile(r"(\s+)")
LONG, LONGEST, STACK = 4096, 1 << 20, 1024
"""The characters of a word, or of the spaces between words, that are read as any text is; the most that are read; the
stack for each in bytes. With many vocabularies llama.cpp splits texts by a regular expression of the C++ library,
which takes some 350 bytes of the stack for each character of a word, and without them ends the process.
"""
_STACKS = Lock()
MARK = re.compile("<.*>", re.DOTALL)
LISTED = 4096  # Special tokens are listed when this many characters have been encoded, since that takes longer
WORD = 256  # bytes that are enough for most tokens


class AddedToken(NamedTuple):
    """A token that was added to the vocabulary as text."""

    content: str
    special: bool  # whether decoded text omits it


class Pieces(dict[int, bytes]):
    """The bytes of each token of a model; a token is read when it is first needed, and ids out of range have none.

    ``special`` is whether special tokens have theirs too.
    """

    def __init__(self, model: LlamaModel, *, special: bool) -> None:
        super().__init__()
        self._model, self._special = model, special

    def __missing__(self, token: int) -> bytes:
        model, found = self._model, b""
        if 0 <= token < model.vocabulary:
            buffer = create_string_buffer(WORD)
            read = partial(model.library.llama_token_to_piece, model.vocab, token)
            if (size := read(buffer, WORD, 0, self._special)) < 0:
                buffer = create_string_buffer(-size)
                size = read(buffer, -size, 0, self._special)
            found = buffer.raw[:size]
        self[token] = found
        return found


def tokenize(model: LlamaModel, text: str, *, begins: bool, marks: bool) -> list[int]:
    """The ids of a text.

    Args:
        model: its tokenizer's.
        text: the text.
        begins: whether to add the special tokens that the file puts before and after a text.
        marks: whether special tokens that the text spells are read as such.
    """
    if len(text) > LONG and (longest := max(map(len, WORDS.split(text)))) > LONG:
        return _with_stack(longest, partial(_tokenize, model, text, begins=begins, marks=marks))
    return _tokenize(model, text, begins=begins, marks=marks)


def _tokenize(model: LlamaModel, text: str, *, begins: bool, marks: bool) -> list[int]:
    data = text.encode("utf-8", "replace")
    read = partial(model.library.llama_tokenize, model.vocab, data, len(data))
    size = len(data) + 4
    found = (c_int32 * size)()
    if (count := read(found, size, begins, marks)) < 0:
        found = (c_int32 * -count)()
        count = read(found, -count, begins, marks)
    return found[:count]


def _with_stack(characters: int, read: Callable[[], list[int]]) -> list[int]:
    """Call ``read`` in a thread whose stack is large enough for a word of that length."""
    too_long = RecordError("invalid_text", f"a text with a word of {characters:,} characters cannot be read")
    if characters > LONGEST:
        raise too_long
    found: list[list[int]] = []
    thread = Thread(target=lambda: found.append(read()), name="long word")
    with _STACKS:
        before = stack_size(STACK * (1024 + characters))
        try:
            thread.start()
        except RuntimeError as error:  # the system gives no such stack
            raise too_long from error
        finally:
            stack_size(before)
    thread.join()
    return found[0]


def tokenize_middle(model: LlamaModel, pieces: Pieces, text: str) -> list[int]:
    """The ids of a text that follows another, where some tokenizers would put a space before it.

    ``pieces`` has the bytes of the model's tokens, of special ones too.
    """
    data = text.encode()
    read = partial(tokenize, model, begins=False, marks=False)
    for anchor in ("", *ANCHORS):
        before, found = read(anchor), read(anchor + text)
        ids = found[len(before) :]
        if found[: len(before)] == before and b"".join(map(pieces.__getitem__, ids)) == data:
            return ids
    return read(text)


class Marks:
    """Finds the special tokens that a text spells.

    llama.cpp looks for each of its special tokens in the whole text, and a vocabulary may have thousands.

    Args:
        special: special tokens' ids by text.
        added: texts of other tokens that llama.cpp looks for before it splits a text.
    """

    def __init__(self, special: Mapping[str, int], added: Iterable[str]) -> None:
        self._special = special
        self._sizes = sorted({*map(len, special)} - {0}, reverse=True)
        first = "".join(sorted({text[0] for text in special if text}))
        self._first = re.compile(f"[{re.escape(first)}]") if first else None
        self._across = {"".join(pair) for text in added for pair in pairwise(text)}

    def split(self, text: str) -> list[str | int] | None:
        """The text's parts and the ids between them; None if two tokens overlap, so that only llama.cpp knows."""
        parts: list[str | int] = []
        end = 0
        for start in map(re.Match.start, self._first.finditer(text) if self._first else ()):
            size = next((size for size in self._sizes if text[start : start + size] in self._special), 0)
            if not size:
                continue
            borders = (text[place - 1 : place + 1] for place in (start, start + size) if place)
            if start < end or not self._across.isdisjoint(borders):
                return None
            parts += [text[end:start], self._special[text[start : start + size]]]
            end = start + size
        return [*parts, text[end:]]


class LlamaTokenizer(LightTokenizer):
    """The tokenizer of a GGUF file, read by llama.cpp alone. Decoded text keeps its spaces: none are cleaned up.

    Args:
        model: the opened file.
    """

    def __init__(self, model: LlamaModel) -> None:
        super().__init__()
        self.model = model
        self.chat_template: Any = model.template
        found: int = model.library.llama_vocab_eos(model.vocab)
        self.eos_token_id: Any = found if found >= 0 else None
        self._read = 0  # characters encoded so far
        self._plain, self._whole = (Pieces(model, special=special) for special in (False, True))
        self.joins = self._bytes(tokenize(model, "a", begins=False, marks=False)) != b" a"

    @classmethod
    def open(cls, path: Path) -> Self:
        """The tokenizer of a file. Raises ModelError as `LlamaModel.open` does."""
        return cls(LlamaModel.open(path, vocab_only=True))

    def __reduce__(self) -> Any:
        return type(self).open, (self.model.path,)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        read = partial(tokenize, self.model, begins=add_special_tokens)
        self._read += len(text)
        known = self._marks if self._read > LISTED else None
        parts = None if known is None else known.split(text)
        if parts is None or (add_special_tokens and len(parts) > 1):
            return read(text, marks=True)
        found: list[int] = []
        for part in parts:
            found += [part] if isinstance(part, int) else read(part, marks=False)
        return found

    def decode(
        self,
        token_ids: list[int],
        skip_special_tokens: bool = False,
        *,
        clean_up_tokenization_spaces: bool | None = None,  # noqa: ARG002
    ) -> str:
        text = self._bytes(token_ids, skip_special_tokens).decode("utf-8", "replace")
        return text if self.joins else text.removeprefix(" ")

    def _bytes(self, ids: list[int], skip_special_tokens: bool = False) -> bytes:
        return b"".join(map((self._plain if skip_special_tokens else self._whole).__getitem__, ids))

    def get_vocab(self) -> dict[str, int]:
        return dict(self._ids)

    @cached_property
    def _ids(self) -> dict[str, int]:
        model, flags = self.model, self._flags
        read = map(model.library.llama_vocab_get_text, repeat(model.vocab), range(model.vocabulary))
        names = [text.decode("utf-8", "replace") for text in read]
        if model.library.llama_vocab_type(model.vocab) in SENTENCEPIECE:
            for token in np.flatnonzero(flags & USER_DEFINED).tolist():  # a file has the spaces themselves
                names[token] = names[token].replace(" ", SPACE)
        found = {name: token for token, name in enumerate(names)}
        for token in np.flatnonzero(flags & UNUSED).tolist():
            if names[token] == _padding(token):
                found.pop(names[token], None)
        return found

    @cached_property
    def _flags(self) -> npt.NDArray[np.int32]:
        """llama.cpp's flags of each token, ``(V,)``."""
        model = self.model
        read = map(model.library.llama_vocab_get_attr, repeat(model.vocab), range(model.vocabulary))
        return np.fromiter(read, np.int32, model.vocabulary)

    @cached_property
    def known_ids(self) -> int:
        """One more than the highest id that is not padding."""
        model, count = self.model, self.model.vocabulary
        while count and self._name(count - 1) == _padding(count - 1):
            if not model.library.llama_vocab_get_attr(model.vocab, count - 1) & UNUSED:
                break
            count -= 1
        return count

    def _name(self, token: int) -> str:
        found: bytes = self.model.library.llama_vocab_get_text(self.model.vocab, token)
        return found.decode("utf-8", "replace")

    @cached_property
    def all_special_ids(self) -> list[int]:
        found: list[int] = np.flatnonzero(self._flags & SPECIAL).tolist()
        return found

    @cached_property
    def all_special_tokens(self) -> list[str]:
        return [self._name(token) for token in self.all_special_ids]

    @cached_property
    def added_tokens_decoder(self) -> Mapping[int, Any]:
        flags = self._flags
        added = np.flatnonzero(flags & (SPECIAL | USER_DEFINED)).tolist()
        return {token: AddedToken(self._name(token), bool(flags[token] & SPECIAL)) for token in added}

    @cached_property
    def _marks(self) -> Marks | None:
        """None if special tokens take the spaces around them too, as some of Phi 3 do."""
        flags = self._flags
        if np.any(flags & STRIPPING):
            return None
        added = (self._name(token) for token in np.flatnonzero(flags & USER_DEFINED).tolist())
        special = zip(self.all_special_tokens, self.all_special_ids, strict=True)
        return Marks(dict(special), added)

    @property
    def backend(self) -> Backend:
        tokens = [self._whole[token].decode("latin-1") for token in range(self.known_ids)]
        # llguidance leaves these to grammars that name them, in tokenizers of the library ``tokenizers`` too.
        named = [
            token for token, (text, special) in self.added_tokens_decoder.items() if special or MARK.fullmatch(text)
        ]
        return Backend({"tokens": tokens, "special": named}, partial(tokenize_middle, self.model, self._whole))

    def apply_chat_template(
        self, conversation: list[dict[str, str]], *, add_generation_prompt: bool, tokenize: bool
    ) -> Any:
        """See transformers. Raises CannotRender, with the reason, where the template cannot be rendered."""
        text = self._template.render(conversation, add_generation_prompt=add_generation_prompt)
        return self.encode(text, add_special_tokens=False) if tokenize else text

    @cached_property
    def _template(self) -> ChatTemplate:
        names = {}
        for name, key in NAMES.items():
            token = int(self.model.metadata(f"tokenizer.ggml.{key}_token_id") or -1)
            if 0 <= token < self.model.vocabulary:
                names[name] = self._name(token)
        return ChatTemplate(self.chat_template or "", names)


def _padding(token: int) -> str:
    """How files name an id that no token has."""
    return f"[PAD{token}]"
