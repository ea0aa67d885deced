"""What is asked of a tokenizer, and a form of it that needs nothing of transformers."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol, cast

from specctl.models.files.chat_template import CannotRender, ChatTemplate

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PROBES = (
    "The quick brown fox jumps over the lazy dog, doesn't it?",
    "def f(x):\n    return [x ** 2 for _ in range(10)]\n\n\tprint(f(3))",
    "In 2024, 1234567.89 + 0.001 = ? 10%",
    "naïve café, 你好世界, Привет, 🙂🚀",
    "  two  spaces\r\nand lines \n\n\n",
)
"""Texts that tokenizers split differently."""
CHATS = tuple(
    [{"role": role, "content": text} for role, text in zip(roles, PROBES, strict=False)]
    for roles in (("user",), ("system", "user"), ("user", "assistant", "user"), ("system", "user", "assistant", "user"))
)
"""Conversations that templates write differently, or refuse."""
TOGETHER = 64
"""Neighbouring ids that are decoded together where two forms of a tokenizer are compared."""
OWN = ("__call__", "encode", "decode", "get_vocab", "_encode_plus", "_decode", "_switch_to_input_mode")
"""Methods by which a tokenizer of transformers could be more than the library below it."""


class Tokenizer(Protocol):
    """The part of transformers' tokenizers that decoding reads; their signatures are wider.

    Attributes:
        chat_template: as transformers has it; false where there is none.
        all_special_tokens, all_special_ids: the special tokens, as text and ids in one order.
        eos_token_id: the id that ends a sequence; None if there is none.
        added_tokens_decoder: by id, the tokens that were added to a vocabulary as text.
    """

    @property
    def chat_template(self) -> Any: ...

    @property
    def all_special_tokens(self) -> list[str]: ...

    @property
    def all_special_ids(self) -> list[int]: ...

    @property
    def eos_token_id(self) -> Any: ...

    @property
    def added_tokens_decoder(self) -> Mapping[int, Any]: ...

    def __call__(self, text: str, *, add_special_tokens: bool = True, verbose: bool = True) -> Any:
        """The ids of a text as ``input_ids``."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def decode(
        self,
        token_ids: list[int],
        skip_special_tokens: bool = False,
        *,
        clean_up_tokenization_spaces: bool | None = None,
    ) -> Any: ...

    def get_vocab(self) -> dict[str, int]: ...

    def apply_chat_template(
        self, conversation: list[dict[str, str]], *, add_generation_prompt: bool, tokenize: bool
    ) -> Any: ...


@dataclass(frozen=True, slots=True)
class Spelling:
    """All that a `BareTokenizer` is made from.

    Attributes:
        backend: a tokenizer of the library ``tokenizers`` as JSON, as transformers set it up.
        specials: text and id of each special token.
        eos: the id that ends a sequence.
        cleans: whether spaces are cleaned up in decoded text unless that is refused.
        splits: whether special tokens are split in a text like other words.
        chats: whether there is a chat template.
        template: it; None where there is none, or only transformers writes what it says.
        names: special tokens by the names that templates know them by.
    """

    backend: str
    specials: list[tuple[str, int]]
    eos: int | None
    cleans: bool
    splits: bool
    chats: bool
    template: str | None
    names: dict[str, Any]

    @classmethod
    def of(cls, tokenizer: "PreTrainedTokenizerBase") -> "Spelling | None":
        """That of a tokenizer of transformers; None where it is more than the library below it, or differs from it."""
        from transformers import PreTrainedTokenizerFast

        kind: Any = type(tokenizer)
        whole: Any = tokenizer
        if not isinstance(tokenizer, PreTrainedTokenizerFast) or any(
            getattr(kind, name, None) is not getattr(PreTrainedTokenizerFast, name, None) or name in vars(tokenizer)
            for name in OWN
        ):
            return None
        try:
            found = cls(
                backend=whole.backend_tokenizer.to_str(),
                specials=list(zip(whole.all_special_tokens, whole.all_special_ids, strict=True)),
                eos=whole.eos_token_id,
                cleans=bool(whole.clean_up_tokenization_spaces),
                splits=bool(whole.split_special_tokens),
                chats=bool(whole.chat_template),
                template=whole.chat_template if _chats_alike(whole) else None,
                names=dict(whole.special_tokens_map),
            )
            return found if alike(whole, BareTokenizer(found)) else None
        except Exception:  # parts written in Python cannot be kept, and raise errors of every kind
            return None

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> "Spelling":
        """Raises KeyError, TypeError or ValueError for anything but a spelling as JSON writes it."""
        specials = [(str(token), int(index)) for token, index in told["specials"]]
        return cls(**{**told, "specials": specials})


class BareTokenizer:
    """A `Tokenizer` of the library ``tokenizers``: the ids and texts of transformers' tokenizer without transformers.

    Args:
        spelling: of transformers' tokenizer.
        whole: gives that one, for what `ChatTemplate` cannot write and where spaces are cleaned up.

    Attributes:
        joins: whether the bytes of a text are those of its tokens, whatever stands beside them, as in byte-level BPE.

    Raises:
        Exception: the spelling is damaged; the library raises nothing narrower.
    """

    def __init__(self, spelling: Spelling, whole: Callable[[], Tokenizer] | None = None) -> None:
        import tokenizers

        self._backend: Any = tokenizers.Tokenizer.from_str(spelling.backend)
        self._backend.no_truncation()
        self._backend.no_padding()
        self._backend.encode_special_tokens = spelling.splits
        self._spelled: dict[int, str] = {}
        self.joins = isinstance(self._backend.decoder, tokenizers.decoders.ByteLevel)
        self._whole = whole or _no_other
        self._cleans = spelling.cleans
        self.chat_template: Any = spelling.chats
        self.spelling = spelling
        self.all_special_tokens = [token for token, _ in spelling.specials]
        self.all_special_ids = [index for _, index in spelling.specials]
        self.eos_token_id = spelling.eos
        self.added_tokens_decoder: Mapping[int, Any] = self._backend.get_added_tokens_decoder()

    def __call__(self, text: str, *, add_special_tokens: bool = True, verbose: bool = True) -> Mapping[str, Any]:  # noqa: ARG002 - it says nothing
        return {"input_ids": self.encode(text, add_special_tokens=add_special_tokens)}

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        found: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return found

    def decode(
        self,
        token_ids: list[int],
        skip_special_tokens: bool = False,
        *,
        clean_up_tokenization_spaces: bool | None = None,
    ) -> Any:
        cleans = self._cleans if clean_up_tokenization_spaces is None else clean_up_tokenization_spaces
        if cleans:
            return self._whole().decode(token_ids, skip_special_tokens, clean_up_tokenization_spaces=True)
        return str(self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens))

    def spell(self, token: int) -> str:
        """The text of one token, nothing for a special one; kept, for streams ask for each of theirs."""
        if token not in self._spelled:
            self._spelled[token] = str(self._backend.decode([token], skip_special_tokens=True))
        return self._spelled[token]

    @property
    def backend(self) -> str:
        """The tokenizer of the library as JSON."""
        found: str = self._backend.to_str()
        return found

    def get_vocab(self) -> dict[str, int]:
        found: dict[str, int] = self._backend.get_vocab(with_added_tokens=True)
        return found

    def apply_chat_template(
        self, conversation: list[dict[str, str]], *, add_generation_prompt: bool, tokenize: bool
    ) -> Any:
        if self.spelling.template is not None and not tokenize:
            with suppress(CannotRender):
                return self._template.render(conversation, add_generation_prompt=add_generation_prompt)
        return self._whole().apply_chat_template(
            conversation, add_generation_prompt=add_generation_prompt, tokenize=tokenize
        )

    @cached_property
    def _template(self) -> ChatTemplate:
        return ChatTemplate(self.spelling.template or "", self.spelling.names)


def _no_other() -> Tokenizer:
    raise AssertionError("only transformers knows templates and cleans up")


def _chats_alike(whole: "PreTrainedTokenizerBase") -> bool:
    """Whether a `ChatTemplate` writes `CHATS` as a tokenizer of transformers does, wherever it writes anything."""
    if not isinstance(whole.chat_template, str):
        return False
    try:
        own = ChatTemplate(whole.chat_template, whole.special_tokens_map)
    except CannotRender:
        return False
    for chat in CHATS:
        for opened in (False, True):
            try:
                text = own.render(chat, add_generation_prompt=opened)
            except CannotRender:
                continue
            try:
                asked: Any = chat
                if whole.apply_chat_template(asked, add_generation_prompt=opened, tokenize=False) != text:
                    return False
            except Exception:  # a template is a program, and transformers lets it raise anything
                return False
    return True


def light(tokenizer: Tokenizer) -> Tokenizer:
    """A tokenizer that does less about each text: the library's own where transformers' is no more than that."""
    if isinstance(tokenizer, BareTokenizer):
        return tokenizer
    spelling = Spelling.of(cast("PreTrainedTokenizerBase", tokenizer))
    return tokenizer if spelling is None else BareTokenizer(spelling, lambda: tokenizer)


def backend_of(tokenizer: Tokenizer) -> str:
    """A tokenizer as the library ``tokenizers`` writes it down, without padding and truncation.

    Raises:
        ValueError: it is not of that library.
    """
    import tokenizers

    if isinstance(tokenizer, BareTokenizer):
        return tokenizer.backend
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, tokenizers.Tokenizer):
        raise ValueError("it is none of the library tokenizers")
    copy = tokenizers.Tokenizer.from_str(backend.to_str())
    copy.no_truncation()
    copy.no_padding()
    return copy.to_str()


def alike(one: Tokenizer, other: Tokenizer) -> bool:
    """Whether two tokenizers have one vocabulary, split `PROBES` into the same ids and decode all ids to one text."""
    if (known := one.get_vocab()) != other.get_vocab():
        return False
    for special in (False, True):
        for text in (*PROBES, " ".join(one.all_special_tokens)):
            ids = one.encode(text, add_special_tokens=special)
            if ids != other.encode(text, add_special_tokens=special):
                return False
    every = sorted(known.values())
    groups = [every[start : start + TOGETHER] for start in range(0, len(every), TOGETHER)]
    return all(
        one.decode(ids, skips, clean_up_tokenization_spaces=False)
        == other.decode(ids, skips, clean_up_tokenization_spaces=False)
        for ids in (*groups, *([index] for index in every[:TOGETHER]))
        for skips in (False, True)
    )
