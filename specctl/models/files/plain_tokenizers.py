"""Tokenizers of well-known kinds, whose ids are what their files say: read without transformers."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specctl.errors import ModelError
from specctl.models.files.checkpoint import Checkpoint
from specctl.models.files.tokenizer import BareTokenizer, Spelling

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
"""The class that transformers takes for a family of models, whatever the files name."""
APART = frozenset(
    {"chat_template", "clean_up_tokenization_spaces", "is_local", "local_files_only", "max_length", "model_max_length"}
    | {"name_or_path", "padding_side", "processor_class", "transformers_version", "truncation_side"}
)
"""Settings that have nothing to do with the ids of a text."""


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """All that the ids of a text depend on: equal ones are one tokenizer.

    Attributes:
        backend: tokenizer.json, the tokenizer of the library ``tokenizers``.
        config: tokenizer_config.json without `APART`.
        special, added: special_tokens_map.json and added_tokens.json; empty without such a file.
        family: ``model_type`` of the model, by which transformers chooses a class.
    """

    backend: str
    config: dict[str, Any]
    special: dict[str, Any]
    added: dict[str, Any]
    family: str

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
        """Their tokenizer; None where transformers could make more of them than they say."""
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
        """Text and id of each token that the files add beside the vocabulary."""
        yield from self.added.items()
        for index, token in self.config.get("added_tokens_decoder", {}).items():
            yield _text(token), int(index)


def _text(token: Any) -> Any:
    """What a token is that stands alone or with its settings."""
    return token.get("content") if isinstance(token, Mapping) else token


def one_tokenizer(checkpoints: Sequence[Checkpoint]) -> BareTokenizer | None:
    """The tokenizer of some models by their files alone: its vocabulary, the ids that it makes of a text and its end of
    sequence; None where it takes transformers to know them, or whether they have one tokenizer.

    It knows neither special tokens nor templates.
    """
    found = [TokenizerFiles.read(checkpoint) for checkpoint in checkpoints]
    first = found[0] if found else None
    return first.tokenizer() if first is not None and all(one == first for one in found) else None
