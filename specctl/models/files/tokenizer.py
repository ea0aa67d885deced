"""Tokenizers: the interface used here, a form without transformers, chat templates, and comparison."""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

from specctl.errors import ModelError, pip_install
from specctl.models.files.checkpoint import Checkpoint

if TYPE_CHECKING:
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from transformers import PreTrainedTokenizerBase

OLDEST_JINJA = (3, 1, 6)  # Sandboxes of earlier versions have known escapes
LEFT_OUT = ("dict", "lipsum", "cycler", "joiner")
"""Jinja's functions that few templates call, and that an untrusted program should not have."""
PARTS = {"role", "content"}


class CannotRender(Exception):  # noqa: N818 - it is a finding
    """Only transformers can render this conversation or report its fault."""


class ChatTemplate:
    """A chat template, rendered as transformers does. Jinja's sandbox runs it, because templates are untrusted code.

    ``names`` maps names in the template to special tokens. Raises CannotRender, with the reason, if Jinja is missing or
    cannot parse the template.
    """

    def __init__(self, source: str, names: Mapping[str, Any]) -> None:
        try:
            self._template = _environment().from_string(source)
        except Exception as error:
            raise CannotRender(str(error)) from error
        self._names = names

    def render(self, conversation: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool) -> str:
        """The text of a conversation, not empty, of messages with a role, a content and what else the template reads.

        ``add_generation_prompt`` opens the assistant's turn at the end. Raises CannotRender, with the reason, if the
        template raises an error.
        """
        given = {**self._names, "messages": [dict(one) for one in conversation], "tools": None, "documents": None}
        try:
            return self._template.render(**given, add_generation_prompt=add_generation_prompt)
        except Exception as error:
            raise CannotRender(str(error)) from error


def _environment() -> "ImmutableSandboxedEnvironment":
    try:
        import jinja2
        from jinja2.ext import Extension
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError:
        raise _no_jinja() from None
    if tuple(map(int, jinja2.__version__.split(".")[:3])) < OLDEST_JINJA:
        raise _no_jinja()

    class Names(jinja2.utils.Namespace):
        """The template's names. Attributes with an underscore are rejected because they would be Python's own."""

        def __init__(self, **values: Any) -> None:
            super().__init__()
            for name, value in values.items():
                self[name] = value

        def __setitem__(self, name: str, value: Any) -> None:
            if name.startswith("_"):
                raise CannotRender
            super().__setitem__(name, value)

    class Generation(Extension):
        """Writes what is between ``generation`` and ``endgeneration``, by which a template marks the answers."""

        tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            return jinja2.nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
    )
    for name in LEFT_OUT:
        del made.globals[name]
    made.globals |= {
        "namespace": Names,
        "raise_exception": _refuse,
        "strftime_now": lambda form: datetime.now().strftime(form),
    }
    made.filters["tojson"] = lambda value, **how: json.dumps(value, **{"ensure_ascii": False, **how})
    return made


def _refuse(message: str) -> None:
    raise CannotRender(message)


def _no_jinja() -> CannotRender:
    wanted = ".".join(map(str, OLDEST_JINJA))
    return CannotRender(f"it needs Jinja {wanted} or later: {pip_install(f'jinja2>={wanted}')}")


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
"""Conversations that templates write differently, or reject."""
TOGETHER = 64  # The number of neighbouring ids that are decoded together to compare two forms of a tokenizer
OWN = ("__call__", "encode", "decode", "get_vocab", "_encode_plus", "_decode", "_switch_to_input_mode")
"""Methods by which a tokenizer of transformers could differ from the library below it."""


class Tokenizer(Protocol):
    """The part of transformers' tokenizers that decoding uses; their signatures are wider.

    Attributes:
        chat_template: as in transformers; false where there is none.
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
    """The data from which a `BareTokenizer` is built."""

    backend: str  # a tokenizer of the library ``tokenizers`` as JSON, as transformers set it up
    specials: list[tuple[str, int]]  # text and id of each special token
    eos: int | None  # the id that ends a sequence
    cleans: bool  # whether spaces are cleaned up in decoded text unless that is rejected
    splits: bool  # whether special tokens are split in a text like other words
    chats: bool  # whether there is a chat template
    template: str | None  # the chat template; None where there is none, or only transformers can render it
    names: dict[str, Any]  # special tokens by their names in templates

    @classmethod
    def of(cls, tokenizer: "PreTrainedTokenizerBase") -> "Spelling | None":
        """The spelling of a transformers tokenizer; None if it does more than the ``tokenizers`` library."""
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
    def from_json(cls, fields: Mapping[str, Any]) -> "Spelling":
        """A spelling from JSON; raises KeyError, TypeError or ValueError for anything else."""
        specials = [(str(token), int(index)) for token, index in fields["specials"]]
        return cls(**{**fields, "specials": specials})


class Backend(NamedTuple):
    """What grammars need of a tokenizer."""

    form: str | Mapping[str, Any]
    """As JSON: a tokenizer of the library ``tokenizers``, without padding and truncation; or a vocabulary with its
    ``tokens``, whose characters are bytes, and the ids of ``special`` tokens.
    """
    encode: Callable[[str], list[int]] | None = None
    """Of a vocabulary, gives the ids of a part of a text, with nothing put before it."""


class LightTokenizer(ABC):
    """What `Tokenizer` classes without transformers have in common.

    Attributes:
        joins: whether a text's bytes are its tokens' bytes joined, independent of context, as in byte-level BPE.
    """

    joins: bool

    def __init__(self) -> None:
        self._spelled: dict[int, str] = {}

    @property
    @abstractmethod
    def known_ids(self) -> int:
        """One more than its highest id."""

    @property
    @abstractmethod
    def backend(self) -> Backend:
        """See `backend_of`."""

    def __call__(self, text: str, *, add_special_tokens: bool = True, verbose: bool = True) -> Mapping[str, Any]:  # noqa: ARG002 - it says nothing
        return {"input_ids": self.encode(text, add_special_tokens=add_special_tokens)}

    @abstractmethod
    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    @abstractmethod
    def decode(
        self,
        token_ids: list[int],
        skip_special_tokens: bool = False,
        *,
        clean_up_tokenization_spaces: bool | None = None,
    ) -> Any: ...

    def spell(self, token: int) -> str:
        """The text of one token, empty for a special one. Cached, because streams ask for every token."""
        if token not in self._spelled:
            self._spelled[token] = self.decode([token], skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return self._spelled[token]


class BareTokenizer(LightTokenizer):
    """A `Tokenizer` that uses the ``tokenizers`` library alone and gives the same ids and texts as transformers.

    ``whole`` loads transformers' tokenizer, which renders what `ChatTemplate` cannot and cleans up spaces. It is not
    pickled.

    Raises:
        Exception: the spelling is damaged; the library raises nothing narrower.
    """

    def __init__(self, spelling: Spelling, whole: Callable[[], Tokenizer] | None = None) -> None:
        import tokenizers

        super().__init__()
        self._backend: Any = tokenizers.Tokenizer.from_str(spelling.backend)
        self._backend.no_truncation()
        self._backend.no_padding()
        self._backend.encode_special_tokens = spelling.splits
        self.joins = isinstance(self._backend.decoder, tokenizers.decoders.ByteLevel)
        self.whole = whole or _no_other
        self._cleans = spelling.cleans
        self.chat_template: Any = spelling.chats
        self.spelling = spelling
        self.all_special_tokens = [token for token, _ in spelling.specials]
        self.all_special_ids = [index for _, index in spelling.specials]
        self.eos_token_id = spelling.eos
        self.added_tokens_decoder: Mapping[int, Any] = self._backend.get_added_tokens_decoder()

    def __reduce__(self) -> Any:
        return type(self), (self.spelling,)

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
            return self.whole().decode(token_ids, skip_special_tokens, clean_up_tokenization_spaces=True)
        return str(self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens))

    @property
    def known_ids(self) -> int:
        return max(self.get_vocab().values()) + 1

    @property
    def backend(self) -> Backend:
        return Backend(self._backend.to_str())

    def get_vocab(self) -> dict[str, int]:
        found: dict[str, int] = self._backend.get_vocab(with_added_tokens=True)
        return found

    def apply_chat_template(
        self, conversation: list[dict[str, str]], *, add_generation_prompt: bool, tokenize: bool
    ) -> Any:
        if (
            self.spelling.template is not None
            and not tokenize
            and conversation
            and all(map(_is_compared, conversation))
        ):
            with suppress(CannotRender):
                return self._template.render(conversation, add_generation_prompt=add_generation_prompt)
        return self.whole().apply_chat_template(
            conversation, add_generation_prompt=add_generation_prompt, tokenize=tokenize
        )

    @cached_property
    def _template(self) -> ChatTemplate:
        return ChatTemplate(self.spelling.template or "", self.spelling.names)


def _is_compared(message: Mapping[str, Any]) -> bool:
    """Whether a message is of the kind for which the template has been compared with transformers."""
    return message.keys() <= PARTS and all(type(part) is str for part in message.values())


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
    """A faster form of a tokenizer: the library's own where transformers' does no more than that."""
    if isinstance(tokenizer, LightTokenizer):
        return tokenizer
    spelling = Spelling.of(cast("PreTrainedTokenizerBase", tokenizer))
    return tokenizer if spelling is None else BareTokenizer(spelling, lambda: tokenizer)


def backend_of(tokenizer: Tokenizer) -> Backend:
    """A tokenizer as grammars need it; raises ValueError if it is only Python code."""
    if isinstance(tokenizer, LightTokenizer):
        return tokenizer.backend
    import tokenizers

    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, tokenizers.Tokenizer):
        raise ValueError("it is not a tokenizer of the library tokenizers")
    copy = tokenizers.Tokenizer.from_str(backend.to_str())
    copy.no_truncation()
    copy.no_padding()
    return Backend(copy.to_str())


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


SPACE = "▁"  # SentencePiece's spelling of a space
BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # SentencePiece's spelling of a byte


def _byte_letters() -> dict[str, int]:
    """The characters for the 256 bytes in byte-level BPE: printable ones unchanged, the others from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + place): byte for place, byte in enumerate(others)}


LETTERS = _byte_letters()


def bytes_of_letters(token: str) -> bytes | None:
    """The bytes of a byte-level BPE token; None if it contains a character outside the byte alphabet."""
    letters = [LETTERS.get(letter) for letter in token]
    return None if None in letters else bytes(letter for letter in letters if letter is not None)


def byte_of(token: str) -> int | None:
    """The byte of a SentencePiece byte token; None for other tokens."""
    found = BYTE.fullmatch(token)
    return int(found[1], 16) if found else None


def byte_ids(tokenizer: Tokenizer) -> Mapping[int, int]:
    """The byte of each of the 256 byte tokens, by id; empty if the tokenizer does not decode them as bytes."""
    vocabulary = tokenizer.get_vocab()
    found = {vocabulary[name]: byte for byte in range(256) if (name := f"<0x{byte:02X}>") in vocabulary}
    euro = [vocabulary.get(f"<0x{byte:02X}>", 0) for byte in "€".encode()]
    return found if len(found) == 256 and str(tokenizer.decode(euro)).strip() == "€" else {}


CHOOSE = 'Choose a draft from the target\'s own family, or set draft.vocabulary = "auto".'


def check_vocabulary(
    target_tokenizer: Tokenizer,
    draft_tokenizer: Tokenizer,
    target_rows: int,
    draft_rows: int,
) -> int:
    """The number of ids that both models share; logits are cut to ``[..., :size]``.

    Models of one family often pad their logits to different widths; ids that the tokenizer does not know are cut off.
    Every known id that the target can emit needs a row in the draft's logits too, else the cut would change the
    target's output.

    Args:
        target_tokenizer, draft_tokenizer: of the models.
        target_rows, draft_rows: widths of their logits.

    Raises:
        ModelError: the tokenizers differ (the message shows the first difference), or the draft has too few rows.
    """
    if why := difference(target_tokenizer, draft_tokenizer):
        raise ModelError(why, CHOOSE)
    size = known_ids(target_tokenizer, target_rows)
    if size > draft_rows:
        raise ModelError(
            f"The draft has {draft_rows} output rows, but the target can emit {size} tokens of the shared tokenizer.",
            "Choose a draft whose embeddings cover the whole vocabulary, or resize and retrain it.",
        )
    return size


def known_ids(tokenizer: Tokenizer, rows: int) -> int:
    """The number of ids that the tokenizer knows and the model has a logit for; the other logits are padding."""
    known = tokenizer.known_ids if isinstance(tokenizer, LightTokenizer) else max(tokenizer.get_vocab().values()) + 1
    return min(known, rows)


def difference(target: Tokenizer, draft: Tokenizer) -> str | None:
    """How two tokenizers differ, as a sentence; None if they do not."""
    if target is draft:
        return None
    target_ids, draft_ids = target.get_vocab(), draft.get_vocab()
    if target_ids != draft_ids:
        return f"The tokenizers differ: {_first_difference(target_ids, draft_ids)}."
    return _other_encoding(target, draft)


def _first_difference(target: dict[str, int], draft: dict[str, int]) -> str:
    """The tokens of both vocabularies at the lowest id at which they differ."""
    target_tokens, draft_tokens = ({index: token for token, index in ids.items()} for ids in (target, draft))
    differing = [
        index
        for index in target_tokens.keys() | draft_tokens.keys()
        if target_tokens.get(index) != draft_tokens.get(index)
    ]
    if not differing:
        token = min(target.keys() ^ draft.keys())
        return f"only one of them has the token {token!r}"
    index = min(differing)
    ours, theirs = (repr(tokens[index]) if index in tokens else "nothing" for tokens in (target_tokens, draft_tokens))
    return (
        f"id {index} is {ours} in the target and {theirs} in the draft "
        f"({len(differing)} ids differ; {len(target)} and {len(draft)} tokens)"
    )


def _other_encoding(target: Tokenizer, draft: Tokenizer) -> str | None:
    def both(text: str) -> list[list[int]]:
        return [tokenizer.encode(text, add_special_tokens=False) for tokenizer in (target, draft)]

    for probe in PROBES:
        ours, theirs = both(probe)
        if ours == theirs:
            continue
        # What a tokenizer puts before a whole text does not matter: a draft reads the target's ids.
        inside = both(f"a{probe}")
        if inside[0] != inside[1]:
            at = next(
                (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs))
            )
            tails = [tokenizer.decode(ids[at : at + 3]) for tokenizer, ids in ((target, ours), (draft, theirs))]
            return (
                f"The tokenizers split text differently: in {probe!r} the target continues with {tails[0]!r} where "
                f"the draft continues with {tails[1]!r}."
            )
    return None


BACKEND, CONFIG = "tokenizer.json", "tokenizer_config.json"
SPECIAL, ADDED = "special_tokens_map.json", "added_tokens.json"
KINDS: dict[str, tuple[str, ...]] = {
    "PreTrainedTokenizer": (),
    "TokenizersBackend": (),
    "GPTNeoXTokenizer": ("<|endoftext|>", "<|padding|>"),
    "GemmaTokenizer": ("<unk>", "<bos>", "<eos>", "<pad>", "<mask>"),
    "LlamaTokenizer": ("<unk>", "<s>", "</s>"),
    "Qwen2Tokenizer": ("<|endoftext|>",),
}
"""By class without ``Fast``, the tokens that transformers would add to a vocabulary that lacks them."""
OF_FAMILY = {"qwen2": "Qwen2Tokenizer"}
"""Tokenizer classes that transformers uses for a model family, whatever class the files name."""
APART = frozenset(
    {"chat_template", "clean_up_tokenization_spaces", "is_local", "local_files_only", "max_length", "model_max_length"}
    | {"name_or_path", "padding_side", "processor_class", "transformers_version", "truncation_side"}
)
"""Settings that have nothing to do with the ids of a text."""


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """The files that determine a text's ids; equal files mean equal tokenizers."""

    backend: str  # tokenizer.json, the tokenizer of the library ``tokenizers``
    config: dict[str, Any]  # tokenizer_config.json without `APART`
    # special, added: special_tokens_map.json and added_tokens.json; empty without such a file
    special: dict[str, Any]
    added: dict[str, Any]
    family: str  # ``model_type`` of the model, by which transformers chooses a class

    @classmethod
    def read(cls, checkpoint: Checkpoint) -> "TokenizerFiles | None":
        """Those of a model; None where one is missing or damaged."""
        folder = checkpoint.folder
        try:
            backend = (folder / BACKEND).read_text("utf-8")
            family = str(checkpoint.settings().get("model_type"))
            config = json.loads((folder / CONFIG).read_text("utf-8"))
            special, added = (
                json.loads((folder / name).read_text("utf-8")) if (folder / name).exists() else {}
                for name in (SPECIAL, ADDED)
            )
        except (OSError, ValueError, RecursionError, ModelError):
            return None
        if not all(isinstance(each, dict) for each in (config, special, added)):
            return None
        kept = {key: value for key, value in config.items() if key not in APART}
        return cls(backend, kept, special, added, family)

    def tokenizer(self) -> BareTokenizer | None:
        """The tokenizer that the files describe; None if transformers might interpret them differently."""
        kinds = [
            str(self.config.get("tokenizer_class")).removesuffix("Fast"),
            *filter(None, [OF_FAMILY.get(self.family)]),
        ]
        if not all(kind in KINDS for kind in kinds):
            return None
        eos = _text(self.config.get("eos_token"))
        if "auto_map" in self.config or self.config.get("backend", "tokenizers") != "tokenizers":
            return None
        try:
            bare = BareTokenizer(Spelling(self.backend, [], None, False, False, False, None, {}))
            named, added = [*self._named()], [*self._added()]
        except Exception:  # the library raises nothing narrower
            return None
        known = bare.get_vocab()
        named += [eos, *(token for kind in kinds for token in KINDS[kind])]
        if not all(isinstance(token, str) and token in known for token in named):
            return None
        if any(known.get(token) != index for token, index in added):
            return None
        bare.eos_token_id = known[eos]
        return bare

    def _named(self) -> Iterator[Any]:
        """The special tokens that the files name; raises ValueError where these disagree."""
        for key, value in [*self.config.items(), *self.special.items()]:
            if key.endswith("_token") and not key.startswith("add_") and value is not None:
                yield _text(value)
                if isinstance(self.config.get(key), Mapping) and self.config[key].get("__type") != "AddedToken":
                    raise ValueError(key)
                if key in self.config and _text(self.config[key]) != _text(value):
                    raise ValueError(key)
            elif key in ("additional_special_tokens", "extra_special_tokens"):
                yield from [value] if isinstance(value, Mapping) else value or ()

    def _added(self) -> Iterator[tuple[str, int]]:
        """Text and id of each token that the files add next to the vocabulary."""
        yield from self.added.items()
        for index, token in self.config.get("added_tokens_decoder", {}).items():
            yield _text(token), int(index)


def _text(token: Any) -> Any:
    """The text of a token that stands alone or with its settings."""
    return token.get("content") if isinstance(token, Mapping) else token


def one_tokenizer(checkpoints: Sequence[Checkpoint]) -> BareTokenizer | None:
    """The common tokenizer of several models, from their files alone, without special tokens or templates.

    It has the vocabulary, encoding and the end-of-sequence id. None if only transformers can determine these or compare
    the tokenizers.
    """
    found = [TokenizerFiles.read(checkpoint) for checkpoint in checkpoints]
    first = found[0] if found else None
    return first.tokenizer() if first is not None and all(one == first for one in found) else None
