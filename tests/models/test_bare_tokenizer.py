"""A tokenizer without transformers gives the ids and texts of transformers' own, or is none."""

import json
import random
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from specctl.decoding.text import TextStream, decode_after, find_stop, special_ids
from specctl.models.files.tokenizer import PROBES, BareTokenizer, CannotRender, ChatTemplate, Spelling
from specctl.profile import resolve
from tests.support.checkpoints import tiny_tokenizer

TEXTS = (
    *PROBES,
    "",
    " ",
    " leading and  double",
    "thththth the th",
    "<eos>th<eos> <eos>",
    "<s>a</s> [MASK] one , two . it 's ?",
    "\u0000\u007f\u00ad\ufeff e\u0301 é",
    "🙂🚀" * 3,
)


def embedded() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(resolve("embedded").profile.target.checkpoint)


def with_specials() -> PreTrainedTokenizerFast:
    made = tiny_tokenizer(added=["plain", " spaced"])
    made.add_special_tokens({"additional_special_tokens": ["<a>", AddedToken("<b>", lstrip=True, rstrip=True)]})
    return made


def split_specials() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=tiny_tokenizer().backend_tokenizer, eos_token="<eos>", split_special_tokens=True
    )


def padded() -> PreTrainedTokenizerFast:
    """Its library cuts and pads, which transformers undoes in every call."""
    core = tiny_tokenizer().backend_tokenizer
    core.enable_truncation(2)
    core.enable_padding(length=9)
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", pad_token="<eos>")


def pieces() -> PreTrainedTokenizerFast:
    """As SentencePiece: a mark for spaces, bytes for what it does not know, and a token before every text."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdefghijklmnopqrstuvwxyz.,"]
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he")]
    words += ["".join(each) for each in merges]
    core = Tokenizer(
        models.BPE(
            {word: i for i, word in enumerate(words)}, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True
        )
    )
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>", unk_token="<unk>", add_bos_token=True
    )


def word_pieces() -> PreTrainedTokenizerFast:
    words = ["[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdeth.,?'", "the", "##he", "##s", "one", "two", "it"]
    core = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    core.normalizer = normalizers.BertNormalizer()
    core.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    core.decoder = decoders.WordPiece(cleanup=False)
    core.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core, unk_token="[UNK]", mask_token="[MASK]", clean_up_tokenization_spaces=True
    )


def unigrams() -> PreTrainedTokenizerFast:
    core = Tokenizer(models.Unigram([("<unk>", 0.0), ("▁", -1.0), ("▁the", -2.0), *((c, -3.0) for c in "thelo")], 0))
    core.pre_tokenizer = pre_tokenizers.Metaspace()
    core.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>")


def split_by_pattern() -> PreTrainedTokenizerFast:
    made = tiny_tokenizer(merges=[("t", "h"), ("th", "e")])
    made.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}{1,3}|\s+|[^\s\p{N}]+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return made


KINDS: list[Callable[[], Any]] = [
    embedded,
    tiny_tokenizer,
    with_specials,
    split_specials,
    padded,
    pieces,
    word_pieces,
    unigrams,
    split_by_pattern,
]


def refuse() -> Any:
    raise AssertionError("transformers was asked")


def bare(whole: Any, other: Callable[[], Any] = refuse) -> BareTokenizer:
    """As it is read again from a file."""
    spelling = Spelling.of(whole)
    assert spelling is not None
    again = Spelling.from_json(json.loads(json.dumps(asdict(spelling))))
    assert again == spelling
    return BareTokenizer(again, other)


@pytest.mark.parametrize("kind", KINDS)
def test_ids_and_texts_are_transformers(kind: Callable[[], Any]) -> None:
    whole = kind()
    own = bare(whole)
    assert own.get_vocab() == whole.get_vocab()
    assert (own.all_special_tokens, own.all_special_ids) == (whole.all_special_tokens, whole.all_special_ids)
    assert (own.eos_token_id, own.chat_template) == (whole.eos_token_id, bool(whole.chat_template))
    assert special_ids(own, ["<eos>", "</s>", "x"]) == special_ids(whole, ["<eos>", "</s>", "x"])
    draws = random.Random(3)
    ids = sorted(whole.get_vocab().values())
    written = [draws.choices(ids, k=draws.randrange(1, 30)) for _ in range(60)]
    for text in TEXTS:
        for special in (True, False):
            expected = whole(text, add_special_tokens=special, verbose=False)["input_ids"]
            assert list(own(text, add_special_tokens=special, verbose=False)["input_ids"]) == list(expected)
            assert own.encode(text, add_special_tokens=special) == whole.encode(text, add_special_tokens=special)
            written.append(list(expected))
    for tokens in written:
        for skip in (True, False):
            theirs = whole.decode(tokens, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert own.decode(tokens, skip_special_tokens=skip, clean_up_tokenization_spaces=False) == theirs


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_that_grows_and_stops_is_the_same(kind: Callable[[], Any]) -> None:
    whole = kind()
    own = bare(whole)
    draws = random.Random(4)
    ids = sorted(whole.get_vocab().values())
    for _ in range(20):
        prompt, tokens = draws.choices(ids, k=5), draws.choices(ids, k=40)
        streams = [TextStream(each, prompt) for each in (whole, own)]
        for start in range(0, len(tokens), 3):
            theirs, mine = (stream.push(tokens[start : start + 3]) for stream in streams)
            assert mine == theirs
        assert streams[0].flush() == streams[1].flush()
        text = decode_after(own, prompt, tokens)
        assert text == decode_after(whole, prompt, tokens)
        if len(text) > 8:
            stop = [text[5:7]]
            assert find_stop(own, prompt, tokens, stop) == find_stop(whole, prompt, tokens, stop)


def test_what_only_transformers_does_goes_through_it() -> None:
    whole = word_pieces()
    whole.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    told: list[int] = []
    own = bare(whole, lambda: told.append(1) or whole)
    assert own.chat_template
    ids = whole.encode("one , two . it 's", add_special_tokens=False)
    assert not told
    assert own.decode(ids) == whole.decode(ids) != own.decode(ids, clean_up_tokenization_spaces=False)
    messages = [{"role": "user", "content": "it", "name": "x"}]
    asked = {"add_generation_prompt": True, "tokenize": False}
    assert own.apply_chat_template(messages, **asked) == whole.apply_chat_template(messages, **asked) == "user: it\n"
    assert len(told) == 2


HEADED = """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}{% set first = messages[0]['content'] | trim %}{% endif %}
Today: {{ strftime_now("%d %b %Y") }}{{ '\n' }}{{ first | default("none") }}
{%- for message in messages if message.role != "system" %}
  <|{{ message['role'] }}|>{{ message['content'] | tojson }}{{ eos_token }}
{%- endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""
ALTERNATING = """{% set seen = namespace(turns=0) %}{% for message in messages %}
    {% if (message['role'] == 'user') != (seen.turns % 2 == 0) %}{{ raise_exception('no turns') }}{% endif %}
    {% set seen.turns = seen.turns + 1 %}
    {% if loop.index > 40 %}{% break %}{% endif %}
{{ loop.index }}{{ message.content }}
{% endfor %}{{ tools is none }}{{ documents is defined }}{{ range(3) | list }}"""
TRACKED = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
MADE = "{% set d = dict(a='b') %}{{ d.a }}{% for m in messages %}{{ m.content }}{% endfor %}"
HIDDEN = "{% set ns = namespace() %}{% set ns._x = 1 %}{{ messages[0].content }}"
BROKEN = "{% for m in messages %}{{ m.content }}"
TALK = [
    {"role": "system", "content": " be <brief> & 'kind' "},
    {"role": "user", "content": "é\n{{ 7 * 7 }}"},
    {"role": "assistant", "content": "<eos>"},
    {"role": "user", "content": "b"},
]


def outcome(tokenizer: Any, chat: Any, opened: bool) -> str:
    """The text of a conversation, or what is raised instead."""
    try:
        return str(tokenizer.apply_chat_template(chat, add_generation_prompt=opened, tokenize=False))
    except Exception as error:
        return f"{type(error)}: {error}"


@pytest.mark.parametrize(("template", "asks"), [(HEADED, 0), (ALTERNATING, 2), (TRACKED, 0), (MADE, 4), (BROKEN, 4)])
def test_chats_are_written_as_transformers_writes_them(template: str, asks: int) -> None:
    """Wherever a template raises an error, it is transformers that is asked, and whose error is told."""
    whole = tiny_tokenizer()
    whole.chat_template = template
    told: list[int] = []
    own = bare(whole, lambda: told.append(1) or whole)
    for chat in (TALK, TALK[1:]):
        for opened in (False, True):
            assert outcome(own, chat, opened) == outcome(whole, chat, opened)
    assert len(told) == asks


def test_a_template_that_would_be_written_otherwise_is_left_to_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = tiny_tokenizer()
    whole.chat_template = HEADED
    monkeypatch.setattr(ChatTemplate, "render", lambda *_, **__: "another text")
    spelling = Spelling.of(whole)
    assert spelling is not None
    assert (spelling.chats, spelling.template) == (True, None)
    whole.chat_template = None
    assert (bare(whole).chat_template, Spelling.of(whole).template) == (False, None)


@pytest.mark.parametrize(
    "attack", [HIDDEN, "{{ ''.__class__ }}", "{{ messages.append(1) }}", "{{ lipsum.__globals__ }}"]
)
def test_a_template_has_no_more_than_its_messages(attack: str) -> None:
    try:
        text = ChatTemplate(attack, {}).render(TALK, add_generation_prompt=True)
    except CannotRender:
        return
    assert text in ("", "None"), "what is hidden is undefined"


class Louder(PreTrainedTokenizerFast):
    def _decode(self, *args: Any, **kwargs: Any) -> str:
        return super()._decode(*args, **kwargs).upper()


class Same(PreTrainedTokenizerFast):
    """Has other settings and no other code."""


def test_a_tokenizer_with_code_of_its_own_is_transformers() -> None:
    core = tiny_tokenizer().backend_tokenizer
    assert Spelling.of(Louder(tokenizer_object=core, eos_token="<eos>")) is None
    assert Spelling.of(Same(tokenizer_object=core, eos_token="<eos>")) is not None
    patched = tiny_tokenizer()
    patched.encode = lambda *_, **__: [1]
    assert Spelling.of(patched) is None


def test_a_tokenizer_that_cannot_be_kept_is_transformers() -> None:
    class Halves:
        def pre_tokenize(self, text: Any) -> None:
            text.split(lambda _, part: [part[: len(str(part)) // 2], part[len(str(part)) // 2 :]])

    made = tiny_tokenizer()
    made.backend_tokenizer.pre_tokenizer = pre_tokenizers.PreTokenizer.custom(Halves())
    assert Spelling.of(made) is None


def test_a_form_that_differs_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BareTokenizer, "encode", lambda *_, **__: [1])
    assert Spelling.of(tiny_tokenizer()) is None
