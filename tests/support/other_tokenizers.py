"""Tokenizers that differ from one another: toys of a few tokens, and real ones that are trained on the spot."""

import json
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from specctl.models.translation import TokenBytes, TokenMap


class ToyTokenizer:
    """Cuts a text into the longest tokens there are, and leaves out what has none.

    Args:
        tokens: by id; the one that ends a text is in angle brackets.
    """

    chat_template = None
    added_tokens_decoder: Mapping[int, Any] = {}

    def __init__(self, *tokens: str) -> None:
        self._tokens = tokens
        self.all_special_tokens = [token for token in tokens if token.startswith("<")]
        self.all_special_ids = [tokens.index(token) for token in self.all_special_tokens]
        self.eos_token_id = self.all_special_ids[0]

    def __call__(self, text: str, *, add_special_tokens: bool = True, verbose: bool = True) -> Any:  # noqa: ARG002
        return {"input_ids": self.encode(text)}

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:  # noqa: ARG002
        ids = []
        while text:
            fits = [token for token in self._tokens if text.startswith(token) and not token.startswith("<")]
            longest = max(fits, key=len, default="")
            ids += [self._tokens.index(longest)] if longest else []
            text = text[len(longest) or 1 :]
        return ids

    def decode(self, token_ids: Sequence[int], *_: Any, **__: Any) -> str:
        return "".join(self._tokens[index] for index in token_ids)

    def get_vocab(self) -> dict[str, int]:
        return {token: index for index, token in enumerate(self._tokens)}

    def apply_chat_template(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError


def toy_map(target: Sequence[str], draft: Sequence[str]) -> TokenMap:
    """What two toys share."""
    return map_of(ToyTokenizer(*target), ToyTokenizer(*draft))


def map_of(target: Any, draft: Any) -> TokenMap:
    ours, theirs = (TokenBytes(one, 1 << 20) for one in (target, draft))
    return TokenMap(ours, theirs, ours.whole)


@cache
def texts() -> tuple[str, ...]:
    """The prompts that come with the package, and letters of other scripts."""
    lines = (files("specctl") / "prompts" / "embedded_suite.jsonl").read_text(encoding="utf-8").splitlines()
    return (*(json.loads(line)["prompt"] for line in lines), "naïve Zürich, Привет 你好世界 🙂🚀\n\n" * 3)


@cache
def byte_level(size: int, begin: str = "<s>", end: str = "</s>") -> PreTrainedTokenizerFast:
    """Byte-level BPE, as Llama 3 and Qwen have it."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    specials = [begin, end]
    core.train_from_iterator(
        texts(),
        trainers.BpeTrainer(vocab_size=size, special_tokens=specials, initial_alphabet=letters, show_progress=False),
    )
    return _whole(core, begin, end)


@cache
def sentence_pieces(size: int, begin: str = "<bos>", end: str = "<eos>") -> PreTrainedTokenizerFast:
    """Unigram pieces with ``▁`` for spaces, and bytes for what they do not spell, as SentencePiece has it."""
    core = Tokenizer(models.Unigram())
    core.pre_tokenizer = pre_tokenizers.Metaspace()
    specials = [begin, end, "<unk>"]
    core.train_from_iterator(
        texts()[:-1],
        trainers.UnigramTrainer(vocab_size=size, special_tokens=specials, unk_token="<unk>", show_progress=False),
    )
    told: Mapping[str, Any] = json.loads(core.to_str())
    pieces = told["model"]["vocab"]
    told["model"]["vocab"] = pieces[:3] + [[f"<0x{byte:02X}>", -20.0] for byte in range(256)] + pieces[3:]
    told["model"].update(byte_fallback=True, unk_id=2)
    core = Tokenizer.from_str(json.dumps(told))
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _whole(core, begin, end)


def beginning_with(tokenizer: PreTrainedTokenizerFast, *begin: str, end: str = "") -> PreTrainedTokenizerFast:
    """The same tokenizer with other special tokens around every text, perhaps none."""
    core = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    around = [*begin, *([end] if end else [])]
    core.add_special_tokens(around)
    core.post_processor = processors.TemplateProcessing(
        single=" ".join([*begin, "$A", *([end] if end else [])]),
        special_tokens=[(token, core.token_to_id(token)) for token in around],
    )
    found = PreTrainedTokenizerFast(tokenizer_object=core, bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token)
    found.add_special_tokens({"additional_special_tokens": around})
    return found


def _whole(core: Tokenizer, begin: str, end: str) -> PreTrainedTokenizerFast:
    core.post_processor = processors.TemplateProcessing(single=f"{begin} $A", special_tokens=[(begin, 0)])
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token=begin, eos_token=end)
