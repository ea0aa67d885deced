"""Tokens as answers tell them: together they are the text, at its places, and no two have one name."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from specctl.decoding.text import decode_after
from specctl.models.files.tokenizer import light
from specctl.records import Completion, DraftStep, ExtraToken, FinishReason, Round, StopReason, TokenLogprobs
from specctl.serving.answers import AnswerText, Piece, Spellings, chat_logprobs, round_json, text_logprobs
from specctl.serving.text_thread import Wrote
from tests.support.checkpoints import tiny_tokenizer
from tests.support.other_tokenizers import byte_level, sentence_pieces


def word_pieces() -> PreTrainedTokenizerFast:
    """As BERT's: what goes on a word begins with ``##``."""
    words = ["<unk>", "<eos>", *(mark + word for word in ("t", "h", "e", "the", "r", "a") for mark in ("", "##"))]
    core = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    core.decoder = decoders.WordPiece(cleanup=False)
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", unk_token="<unk>")


def metaspaces() -> PreTrainedTokenizerFast:
    """Spaces by a decoder of their own, and words with and without one."""
    words = ["<unk>", "<eos>", "▁", *"ther", "▁the", "the", "▁there"]
    core = Tokenizer(models.Unigram([(word, -float(i)) for i, word in enumerate(words)], unk_id=0))
    core.pre_tokenizer = pre_tokenizers.Metaspace()
    core.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", unk_token="<unk>")


WHOLE = {
    "byte level": byte_level(300),
    "pieces": sentence_pieces(500),
    "metaspace": metaspaces(),
    "word pieces": word_pieces(),
}
TOKENIZERS: dict[str, Any] = {**WHOLE, **{f"bare {name}": light(one) for name, one in WHOLE.items()}}
LETTERS = st.sampled_from("the r")
ANY = st.sampled_from("the r\u1230é€🙂")


def rounds_of(tokens: Sequence[int], size: int, others: Sequence[int]) -> list[Round]:
    """Rounds that write tokens, of each of which some others are told beside it."""
    found = []
    for at in range(0, len(tokens), size):
        *drafted, last = tokens[at : at + size]
        likely = tuple(
            TokenLogprobs(token, -0.5, tuple((one, -1.0 - place) for place, one in enumerate([*others, token])))
            for token in (*drafted, last)
        )
        steps = tuple(DraftStep(number, token) for number, token in enumerate(drafted, 1))
        kind, why = ExtraToken.BONUS, StopReason.POLICY
        found.append(Round(0, steps, len(drafted), last, kind, why, logprobs=likely))
    return found


def completion_of(tokenizer: Any, prompt: Sequence[int], rounds: Sequence[Round], ends: set[int]) -> Completion:
    tokens = tuple(token for one in rounds for token in one.emitted)
    text = decode_after(tokenizer, prompt, tokens, ends)
    return Completion(tuple(prompt), 0, tokens, text, FinishReason.STOP, tuple(rounds), 0.0, 0.0, 0.0)


def told(
    tokenizer: Any, prompt: Sequence[int], tokens: Sequence[int], size: int = 3, others: Sequence[int] = (), **more: Any
) -> tuple[str, list[Piece], list[Piece]]:
    """A text with its pieces, whole and streamed."""
    ends = more.pop("ends", set())
    rounds = rounds_of(tokens, size, others)
    done = completion_of(tokenizer, prompt, rounds, ends)

    def answer() -> AnswerText:
        return AnswerText(tokenizer, prompt, more.get("stops", ()), ends, logprobs=True, rounds=True)

    stream = answer()
    return done.text, [answer().end(done)], [*(stream.add([Wrote(one)]) for one in rounds), stream.end(done)]


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=30)
@given(data=st.data())
def test_names_together_are_the_text_and_offsets_its_places(name: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[name]
    prompt = tokenizer.encode(data.draw(st.text(LETTERS, max_size=3)), add_special_tokens=False)
    tokens = tokenizer.encode(data.draw(st.text(LETTERS, min_size=1, max_size=9)), add_special_tokens=False)
    others = data.draw(st.lists(st.sampled_from(sorted(tokenizer.get_vocab().values())), max_size=6, unique=True))
    text, whole, streamed = told(tokenizer, prompt, tokens, data.draw(st.integers(1, 4)), others)
    for pieces in (whole, streamed):
        assert "".join(piece.text for piece in pieces) == text
        assert "".join(one for piece in pieces for _, texts in piece.rounds for one in texts) == text
        spellings = Spellings(tokenizer)
        found = text_logprobs([one for piece in pieces for one in piece.logprobs], spellings)
        names, places = found["tokens"], found["text_offset"]
        assert "".join(names) == text
        assert all(text[place:].startswith(one) for one, place in zip(names, places, strict=True))
        assert places == [sum(map(len, names[:count])) for count in range(len(names))]
        for likely, own in zip(found["top_logprobs"], names, strict=True):
            assert own in likely
        assert [len(one) for one in found["top_logprobs"]] == [len({*others, token}) for token in tokens]


@pytest.mark.parametrize("name", ["byte level", "bare byte level", "pieces", "bare pieces"])
@settings(max_examples=30)
@given(data=st.data())
def test_bytes_together_are_those_of_the_text(name: str, data: st.DataObject) -> None:
    """Also where the prompt ends inside a character."""
    tokenizer = TOKENIZERS[name]
    every = tokenizer.encode("the r" + data.draw(st.text(ANY, min_size=1, max_size=6)), add_special_tokens=False)
    cut = data.draw(st.integers(2, len(every) - 1))
    text, whole, streamed = told(tokenizer, every[:cut], every[cut:], data.draw(st.integers(1, 4)))
    assert "\ufffd" not in text
    for pieces in (whole, streamed):
        told_tokens = chat_logprobs([one for piece in pieces for one in piece.logprobs], Spellings(tokenizer))[
            "content"
        ]
        octets = b"".join(bytes(one["bytes"]) for one in told_tokens)
        assert text.encode().endswith(octets)
        assert len(text.encode()) - len(octets) < 4
        assert not any("\ufffd" in one["token"] for one in told_tokens)
        assert "".join(one for piece in pieces for _, texts in piece.rounds for one in texts) == text


def test_parts_of_characters_are_told_as_openai_tells_them() -> None:
    tokenizer = TOKENIZERS["bare pieces"]
    tokens = tokenizer.encode("\u1230", add_special_tokens=False)[1:]
    prompt = tokenizer.encode("the ", add_special_tokens=False)
    _, (piece,), _ = told(tokenizer, prompt, tokens)
    content = chat_logprobs(piece.logprobs, Spellings(tokenizer))["content"]
    assert [one["token"] for one in content] == ["\\xe1", "\\x88", "\\xb0"]
    assert [one["bytes"] for one in content] == [[0xE1], [0x88], [0xB0]]
    found = text_logprobs(piece.logprobs, Spellings(tokenizer))
    assert (found["tokens"], found["text_offset"]) == (["bytes:\\xe1", "bytes:\\x88", "bytes:\\xb0"], [0, 0, 0])
    ((round_, texts),) = piece.rounds
    assert [one["token"] for one in round_json(round_, texts)["tokens"]] == ["", "", "\u1230"]


def test_words_with_and_without_a_space_have_names_of_their_own() -> None:
    tokenizer = TOKENIZERS["metaspace"]
    spaced, plain, there = (tokenizer.get_vocab()[name] for name in ("▁the", "the", "▁there"))
    behind, before = [spaced], []
    _, (piece,), _ = told(tokenizer, behind, [spaced, plain], others=[plain, spaced, there])
    found = text_logprobs(piece.logprobs, Spellings(tokenizer))
    assert found["tokens"] == [" the", "the"]
    assert [list(one) for one in found["top_logprobs"]] == [["the", " the", " there"]] * 2
    # At the start of a text both are one word, and the other one is told by its id.
    text, (piece,), _ = told(tokenizer, before, [spaced, plain], others=[plain, spaced, there])
    found = text_logprobs(piece.logprobs, Spellings(tokenizer))
    assert (text, found["tokens"]) == ("thethe", ["the", "the"])
    assert list(found["top_logprobs"][0]) == [f"token_id:{plain}", "the", "there"]


def test_what_ends_a_text_is_no_part_of_it() -> None:
    tokenizer = tiny_tokenizer(added=["<stop>"])
    end = tokenizer.convert_tokens_to_ids("<stop>")
    tokens = tokenizer.encode("ath<stop>")
    text, whole, streamed = told(tokenizer, [], tokens, ends={end})
    assert text == "ath"
    for pieces in (whole, streamed):
        assert "".join(piece.text for piece in pieces) == "ath"
        content = chat_logprobs([one for piece in pieces for one in piece.logprobs], Spellings(tokenizer, {end}))[
            "content"
        ]
        assert [(one["token"], one["bytes"]) for one in content][-1] == ("<stop>", None)
        assert [one for piece in pieces for _, texts in piece.rounds for one in texts][-1] == ""


def test_tokens_behind_a_stop_string_stand_at_the_end_of_the_text() -> None:
    tokenizer = tiny_tokenizer()
    rounds = rounds_of(tokenizer.encode("abcdef"), 3, ())
    done = completion_of(tokenizer, [], rounds, set())
    answer = AnswerText(tokenizer, [], ["bcdef"], logprobs=True)
    cut = Completion((), 0, done.tokens, "a", FinishReason.STOP, done.rounds, 0.0, 0.0, 0.0)
    assert [one.start for one in answer.end(cut).logprobs] == [0, 1, 1, 1, 1, 1]


def test_a_text_that_begins_again_is_told_once() -> None:
    """Where memory ran out: the rounds that come again have tokens that are known."""
    tokenizer = tiny_tokenizer()
    answer = AnswerText(tokenizer, [], (), logprobs=True, rounds=True)
    first, again = rounds_of(tokenizer.encode("abc"), 3, ()), rounds_of(tokenizer.encode("abcde"), 2, ())
    heard = [Wrote(first[0]), *(Wrote(one, known) for one, known in zip(again, (2, 1, 0), strict=True))]
    pieces = [answer.add([one]) for one in heard]
    assert "".join(piece.text for piece in pieces) == "abcde"
    assert [one.start for piece in pieces for one in piece.logprobs] == [0, 1, 2, 3, 4]
    assert [texts for piece in pieces for _, texts in piece.rounds] == [["a", "b", "c"], ["", ""], ["", "d"], ["e"]]
