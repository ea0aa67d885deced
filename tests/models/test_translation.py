"""What two tokenizers share, and how a draft reads its target's tokens."""

from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast

from specctl.errors import ModelError, ProfileError
from specctl.models.files.tokenizer import BareTokenizer, Spelling
from specctl.models.loading import vocabularies
from specctl.models.loading.assembly import load_pair
from specctl.models.loading.vocabularies import covered, token_map
from specctl.models.passes.forward import Forward
from specctl.models.running.engines import EngineSettings, engine_report
from specctl.models.running.slot import Slot
from specctl.models.translation import (
    FARTHEST,
    Columns,
    Continuation,
    DraftText,
    TokenBytes,
    TokenMap,
    TranslatedPasses,
    agreement,
)
from specctl.profile.schema import DraftTable, ModelTable, Profile
from tests.support.checkpoints import llama_config, save_model
from tests.support.other_tokenizers import ToyTokenizer, beginning_with, byte_level, map_of, sentence_pieces, toy_map
from tests.support.toys import TableRunner, table

TEXT = "Once upon a time 12 naïve \u4f60\u597d \U0001f642 said  two\n\nlines of it"
BYTES, OTHERS, PIECES = (
    lambda: byte_level(340),
    lambda: byte_level(420, "<|begin|>", "<|end|>"),
    lambda: sentence_pieces(400),
)


@pytest.mark.parametrize("tokenizer", [BYTES, PIECES], ids=["bytes", "pieces"])
def test_tokens_stand_for_bytes(tokenizer: Any) -> None:
    known = TokenBytes(tokenizer(), 1 << 20)
    assert known.text(tokenizer().encode(TEXT, add_special_tokens=False)).decode().lstrip(" ") == TEXT
    assert known.lost is None
    assert known.start == (0,)
    assert known.eos == 1
    assert known.ids[b"\n"] != known.ids[b" "]
    assert not {0, 1} & {*known.of}


def test_what_is_put_behind_a_text_does_not_begin_it() -> None:
    both = beginning_with(BYTES(), "<s>", end="</s>")
    assert both.encode("") == [0, 1]
    assert TokenBytes(both, 1 << 20).start == (0,)


@pytest.mark.parametrize("text", ["é", "¡x", "two words"])
def test_tokens_that_were_added_are_text(text: str) -> None:
    whole = beginning_with(BYTES())
    whole.add_tokens([text])
    spelling = Spelling.of(whole)
    assert spelling is not None
    for tokenizer in (whole, BareTokenizer(spelling)):
        known = TokenBytes(tokenizer, 1 << 20)
        assert known.of[whole.convert_tokens_to_ids(text)] == text.encode()
        assert known.encode(text.encode()) == [whole.convert_tokens_to_ids(text)]


@pytest.mark.parametrize("tokenizer", [BYTES, PIECES], ids=["bytes", "pieces"])
@pytest.mark.parametrize("piece", [" said", "aid", "\n\nof", "  two", " \u4f60", ""])
def test_a_piece_from_the_middle_of_a_text_is_cut_without_a_beginning(tokenizer: Any, piece: str) -> None:
    known = TokenBytes(tokenizer(), 1 << 20)
    assert known.text(known.encode(piece.encode())) == piece.encode()


def test_the_beginning_of_a_character_is_told_in_bytes() -> None:
    for tokenizer in (byte_level(340), sentence_pieces(400)):
        known, start = TokenBytes(tokenizer, 1 << 20), " \U0001f642".encode()[:3]
        assert known.text(known.encode(start)) == start
        assert known.text(known.encode(b"\xff " + start)) == b"\xff " + start


def test_of_bytes_without_a_token_nothing_is_read() -> None:
    tokens = toy_map(("<end>", "a", "b"), ("a", "<stop>"))
    assert tokens.draft.encode(b"abba") == [0, 0]


def test_shared_tokens_spell_alike_or_mean_the_same() -> None:
    target, draft = OTHERS(), PIECES()
    tokens = map_of(target, draft)
    assert tokens.draft_id[0] == 0, "both begin a text"
    assert tokens.draft_id[1] == 1, "both end a text"
    theirs = dict(zip(tokens.vocabulary.ids.tolist(), tokens.columns.tolist(), strict=True))
    assert theirs[target.convert_tokens_to_ids("Ġa")] == draft.convert_tokens_to_ids("▁a")
    assert theirs[target.convert_tokens_to_ids("Ã")] == draft.convert_tokens_to_ids("<0xC3>")
    assert len({*theirs.values()}) == len(theirs)
    assert 0 < len(theirs) < tokens.target.whole


def test_what_ends_a_text_in_the_draft_ends_it_in_the_target() -> None:
    """Whatever else is spelt like it, with a lower id or not."""
    for specials in (["<stop>", "<end>"], ["<end>", "<stop>"]):
        target = ToyTokenizer("a", *specials)
        target.eos_token_id = target.get_vocab()["<end>"]
        tokens = map_of(target, ToyTokenizer("a", "<stop>"))
        assert tokens.vocabulary.ids.tolist() == [0, target.eos_token_id]
        assert {*tokens.draft_id.values()} == {0, 1}


def test_special_tokens_that_end_nothing_are_shared_by_their_text_alone() -> None:
    tokens = toy_map(("<end>", "a", "<user>", "<tool>"), ("<stop>", "<tool>", "a", "<system>"))
    assert tokens.draft_id == {0: 0, 1: 2, 3: 1}
    text = DraftText(tokens)
    for token in (1, 3, 2, 0):
        text.append(token)
    assert text.ids == [2, 1, 0], "of <user> it could spell nothing"


def test_what_is_no_special_token_there_is_read_as_text() -> None:
    target, draft = byte_level(420, "<|begin|>", "<|user|>"), byte_level(340)
    tokens = map_of(target, draft)
    text = DraftText(tokens)
    for token in (0, *target.encode("Hello", add_special_tokens=False)):
        text.append(token)
    assert text.ids == draft.encode("Hello")


@pytest.mark.parametrize("begin", [["<|begin|>"], ["<|mask|>", "<|start|>"], []])
@pytest.mark.parametrize("theirs", [["<s>"], []])
def test_a_text_begins_as_the_draft_begins_it(begin: list[str], theirs: list[str]) -> None:
    target, draft = beginning_with(OTHERS(), *begin), beginning_with(BYTES(), *theirs)
    text, ids = DraftText(map_of(target, draft)), target.encode("Hello you")
    for token in [*ids, None, *ids[len(begin) :], target.encode(" a", add_special_tokens=False)[0]]:
        before = [*text.ids]
        kept = text.truncate(len(begin)) if token is None else text.append(token)
        assert before[:kept] == text.ids[:kept]
        if token is None:
            assert text.ids == (draft.encode("") or [1]), "something has to be read"
    assert draft.decode(text.ids) == "".join(theirs) + "Hello you a"
    assert text.ids[: len(draft.encode("Hello you"))] == draft.encode("Hello you")


@pytest.mark.parametrize("tokenizers", [(BYTES, OTHERS), (OTHERS, BYTES), (OTHERS, PIECES), (PIECES, BYTES)])
def test_finished_words_are_read_as_the_draft_cuts_them(tokenizers: Any) -> None:
    target, draft = (one() for one in tokenizers)
    text = DraftText(map_of(target, draft))
    for token in [*target.encode(TEXT), *target.encode(" end", add_special_tokens=False)[:1]]:
        text.append(token)
    expected = draft.encode(TEXT)
    assert text.ids[: len(expected) - 1] == expected[:-1]


@pytest.mark.parametrize("seed", range(3))
def test_what_a_draft_reads_depends_on_the_text_alone(seed: int) -> None:
    target, draws = OTHERS(), Random(seed)
    tokens, ids = map_of(target, PIECES()), target.encode(TEXT)
    whole, wandering = DraftText(tokens), DraftText(tokens)
    for token in ids:
        whole.append(token)
    for _ in range(400):
        before = [*wandering.ids]
        on = ids[len(wandering.tokens)] if len(wandering.tokens) < len(ids) else 5
        right = draws.random() < 0.7
        if draws.random() < 0.3:
            kept = wandering.truncate(max(0, len(wandering.tokens) - draws.randrange(4)))
        elif right and wandering.tokens == ids[: len(wandering.tokens)]:
            kept = wandering.append(on)
        else:
            kept = wandering.append(draws.randrange(len(target)))
        assert before[:kept] == wandering.ids[:kept]
    wandering.truncate(
        next((n for n, (a, b) in enumerate(zip(wandering.tokens, ids, strict=False)) if a != b), len(ids))
    )
    for token in ids[len(wandering.tokens) :]:
        wandering.append(token)
    assert wandering.ids == whole.ids


@pytest.mark.parametrize("tokenizers", [(OTHERS, PIECES), (OTHERS, BYTES), (BYTES, OTHERS)])
def test_a_text_that_was_cut_is_read_as_one_that_never_was_longer(tokenizers: Any) -> None:
    target, draft = (one() for one in tokenizers)
    tokens, ids = map_of(target, draft), target.encode(TEXT)
    cut, grown = DraftText(tokens), DraftText(tokens)
    for length, token in enumerate(ids, start=1):
        grown.append(token)
        for more in ids[len(cut.tokens) : length + 2]:
            cut.append(more)
        cut.truncate(length)
        assert cut.ids == grown.ids


def test_columns_of_numpy_are_those_of_torch() -> None:
    class HostTable(TableRunner):
        def extend(self, tokens: Any, keep: int, *, hidden: bool = False) -> Forward:
            found = super().extend(tokens, keep, hidden=hidden)
            return Forward(found.columns.numpy())  # type: ignore[union-attr]

    tokens, logits = toy_map(("<end>", "a", "b"), ("b", "ab", "<stop>", "a")), table(1, vocabulary=4)
    host, torchs = (Slot(TranslatedPasses(kind(logits), tokens)) for kind in (HostTable, TableRunner))
    for keep in (0, 1, 2):
        one, other = (runner.extend([1, 2], keep) for runner in (host, torchs))
        assert isinstance(one.columns, np.ndarray)
        assert torch.equal(torch.from_numpy(one.columns), other.columns)  # type: ignore[arg-type]
        assert other.rows.shape == (keep, 3)


# Loading


def saved(folder: Path, tokenizer: PreTrainedTokenizerFast) -> str:
    save_model(folder, llama_config(len(tokenizer)))
    tokenizer.save_pretrained(folder)
    return str(folder)


def profile(target: str, draft: str, **settings: object) -> Profile:
    return Profile(target=ModelTable(model=target), draft=DraftTable(model=draft, **settings), engine="eager")


def test_a_pair_of_two_tokenizers_is_loaded_and_told_of(tmp_path: Path) -> None:
    told: list[str] = []
    models = saved(tmp_path / "big", OTHERS()), saved(tmp_path / "small", PIECES())
    asked = profile(*models, vocabulary="intersection")
    pair = load_pair(asked, engines=EngineSettings(engine="eager", notice=told.append), measured=False)
    (runner,) = pair.drafts
    assert isinstance(runner.passes, TranslatedPasses)
    shared = map_of(OTHERS(), PIECES()).summary
    assert engine_report(runner) == f"eager ({shared})"
    assert [line for line in told if "another tokenizer" in line and line.endswith(shared)]
    assert pair.context == pair.target.context
    assert isinstance(pair.eagerly().drafts[0].passes, TranslatedPasses)


def lower_case() -> PreTrainedTokenizerFast:
    from tokenizers import normalizers

    found = byte_level.__wrapped__(330)
    found.backend_tokenizer.normalizer = normalizers.Lowercase()
    return found


@pytest.mark.parametrize(
    ("tokenizer", "settings", "message"),
    [
        (PIECES, {"vocabulary": "shared"}, "The tokenizers differ: id"),
        (PIECES, {"tokens": 100}, "draft.tokens is about the target's"),
        (lower_case, {}, "the draft's does not reproduce a text: its tokens turn .The quick .* into .the quick"),
        (lower_case, {"vocabulary": "text"}, "the draft's does not reproduce a text"),
    ],
)
def test_a_pair_that_cannot_be_is_an_error(tmp_path: Path, tokenizer: Any, settings: Any, message: str) -> None:
    asked = profile(saved(tmp_path / "big", OTHERS()), saved(tmp_path / "small", tokenizer()), **settings)
    with pytest.raises(ProfileError if tokenizer is lower_case else ModelError, match=message):
        load_pair(asked, measured=False)


@pytest.mark.parametrize("vocabulary", ["auto", "intersection", "text"])
def test_a_pair_without_a_common_token_is_an_error(vocabulary: Any) -> None:
    table = DraftTable(model="small", vocabulary=vocabulary)
    with pytest.raises(ProfileError, match="the draft 'small' have no token in common"):
        token_map(table, ToyTokenizer("<end>", "a"), ToyTokenizer("<end>", "b"), 2, 2)


def test_text_is_written_where_shared_tokens_are_too_small_a_part_of_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocabularies, "COVERED", 0.9)
    target, whole = OTHERS(), len(OTHERS())
    for draft, writes in ((PIECES(), True), (byte_level(440, "<|begin|>", "<|end|>"), False)):
        asked = DraftTable(model="small"), target, draft, whole, len(draft)
        found, needed = token_map(*asked), token_map(*asked, needs_law=True)
        assert found is not None
        assert needed is not None
        assert (found.writes_text, needed.writes_text) == (writes, False)
        assert (covered(found, target) < 0.9) is writes
    with pytest.raises(ProfileError, match="it cannot verify a faster draft"):
        token_map(DraftTable(model="small", vocabulary="text"), *asked[1:], needs_law=True)


def test_one_tokenizer_is_shared_whatever_is_asked(tmp_path: Path) -> None:
    asked = profile(saved(tmp_path / "big", BYTES()), saved(tmp_path / "small", BYTES()), vocabulary="intersection")
    assert load_pair(asked, measured=False).drafts[0].translates is None


def test_of_several_rows_those_named_are_taken() -> None:
    numbers = torch.arange(12.0).reshape(3, 4)
    taken = Columns(np.array([1, 3]))
    assert taken.of(numbers[:1], [0]).tolist() == [[1, 3]]
    assert taken.of(numbers[:2], [1, 0]).tolist() == [[5, 7], [1, 3]]
    assert taken.of(numbers, [2]).tolist() == taken.of(numbers.numpy(), [2]).tolist() == [[9, 11]]


@pytest.mark.parametrize("seed", range(3))
def test_a_pass_over_tokens_that_change_how_those_before_are_cut_gives_the_rows_of_single_ones(seed: int) -> None:
    draws, logits = Random(seed), table(1, vocabulary=5)
    tokens = toy_map(("<end>", "a", "b", "c"), ("b", "ab", "<stop>", "a", "abc"))
    text = [draws.choice((1, 1, 2, 3)) for _ in range(24)]
    whole, single = (Slot(TranslatedPasses(TableRunner(logits), tokens)) for _ in range(2))
    for start in range(0, len(text), 8):
        block = text[start : start + 8]
        rows = [single.extend([token], 1).rows for token in block]
        torch.testing.assert_close(whole.extend(block, len(block)).rows, torch.cat(rows))


def after(tokens: TokenMap, *ids: int) -> DraftText:
    text = DraftText(tokens)
    for token in ids:
        text.append(token)
    return text


def next_known(tokens: TokenMap, text: DraftText, written: Sequence[int]) -> tuple[int, int | None]:
    """How many tokens had to be written until the next one is known, and that one."""
    found = [Continuation(tokens).next(text, written[:count]) for count in range(len(written) + 1)]
    count = next((place for place, one in enumerate(found) if one is not None), len(written))
    return count, found[count]


def test_a_token_is_told_by_what_comes_behind_it() -> None:
    tokens = toy_map(("<end>", "a", "ab", "b"), ("a", "b", "<stop>"))
    assert next_known(tokens, after(tokens, 3), [0, 0]) == (2, 1)
    assert next_known(tokens, after(tokens, 3), [0, 1, 0]) == (3, 2)
    assert next_known(tokens, after(tokens, 3), [0]) == (1, None)


def test_the_end_of_a_text_tells_what_comes_before_it() -> None:
    tokens = toy_map(("<end>", "a", "ab"), ("a", "b", "<stop>"))
    assert next_known(tokens, after(tokens, 1), [0, 2]) == (2, 1)
    assert next_known(tokens, after(tokens, 1), [2]) == (1, 0)


def test_tokens_of_the_text_stay_where_what_follows_would_change_them() -> None:
    tokens = toy_map(("<end>", "a", "ab", "b"), ("a", "b", "<stop>"))
    assert next_known(tokens, after(tokens, 1), [1, 0]) == (2, 3), "not the rest of ab"


def test_what_no_token_tells_is_taken_as_it_is() -> None:
    tokens = toy_map(("<end>", "a"), ("b", "a", "<stop>"))
    assert next_known(tokens, after(tokens, 1), [0] * 10) == (FARTHEST, 1)
    assert next_known(tokens, after(tokens, 1), [*[0] * (FARTHEST - 1), 1]) == (FARTHEST, 1)


def test_half_a_character_waits_for_its_end() -> None:
    tokens = map_of(byte_level(420, "<|begin|>", "<|end|>"), sentence_pieces(400))
    ids = tokens.target.encode("Hello 你".encode())
    written = tokens.draft.encode(" 你 a".encode())
    count, found = next_known(tokens, after(tokens, *ids[:-3]), written)
    assert found == tokens.target.encode(" 你 a".encode())[0]
    assert tokens.draft.text(written[:count]).decode()


@pytest.mark.parametrize("target", [byte_level(420, "<|begin|>", "<|end|>"), sentence_pieces(400)], ids=["bytes", "▁"])
def test_most_of_a_text_comes_out_as_it_was(target: object) -> None:
    tokens = map_of(target, byte_level(340))
    ids = tokens.target.encode(b"The quick brown fox jumps over the lazy dog, 12 times.", first=True)
    assert 0.7 < agreement(tokens, [ids]) <= 1
    assert agreement(tokens, []) == 0
