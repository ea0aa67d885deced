from unittest.mock import patch

import pytest
from checkpoints import tiny_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from specctl.decoding.text import TextStream, find_stop, special_ids
from specctl.models.files.tokenizer import BareTokenizer, light
from specctl.profile.known_names import model_path

TINY = tiny_tokenizer(merges=[("t", "h"), ("Ã", "©"), ("ð", "Ł")], added=["<tool>"])
EMBEDDED = AutoTokenizer.from_pretrained(model_path("target"))
TOKENIZERS = [TINY, EMBEDDED, light(TINY), light(EMBEDDED)]
NAMES = ["tiny", "embedded", "bare tiny", "bare embedded"]


def decode(tokenizer, tokens):
    return tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def cut(tokens, sizes):
    """Tokens in pieces of the sizes, over and over."""
    pieces, place = [], 0
    while place < len(tokens):
        size = sizes[len(pieces) % len(sizes)]
        pieces.append(tokens[place : place + size])
        place += size
    return pieces


SIZES = st.lists(st.integers(1, 7), min_size=1, max_size=8)


@pytest.mark.parametrize("tokenizer", TOKENIZERS, ids=NAMES)
@given(data=st.data())
def test_pieces_of_any_tokens_join_to_the_whole_text(tokenizer, data):
    """Any tokens: broken characters, special tokens and all."""
    tokens = data.draw(st.lists(st.sampled_from(sorted(tokenizer.get_vocab().values())), max_size=40))
    prompt, sizes = tokens[:6], data.draw(SIZES)
    stream = TextStream(tokenizer, prompt)
    pieces = [stream.push(piece) for piece in cut(tokens[6:], sizes)]
    whole, before = decode(tokenizer, tokens), decode(tokenizer, prompt)
    if not before.endswith("\ufffd"):
        assert before + "".join([*pieces, stream.flush()]) == whole


@pytest.mark.parametrize("tokenizer", TOKENIZERS, ids=NAMES)
@given(text=st.text(st.sampled_from("a th\né€漢😀\u200d👩🏽")), sizes=SIZES)
def test_no_piece_holds_half_a_character(tokenizer, text, sizes):
    stream = TextStream(tokenizer)
    tokens = tokenizer.encode(text, add_special_tokens=False)
    pieces = [stream.push(piece) for piece in cut(tokens, sizes)]
    assert "".join(pieces) == text
    assert stream.flush() == ""


def test_a_byte_level_token_is_decoded_once_and_again_only_where_a_character_is_not_whole():
    tokenizer = BareTokenizer(light(TINY).spelling)
    tokens, broken = (tokenizer.encode(text, add_special_tokens=False) for text in ("the th", "€ a"))
    seen = []
    with patch.object(tokenizer, "_backend") as backend:
        backend.decode = lambda ids, **named: seen.append([*ids]) or TINY.backend_tokenizer.decode(ids, **named)
        for _ in range(2):
            stream = TextStream(tokenizer)
            assert "".join(stream.push([token]) for token in [*tokens, *broken, *tokens]) == "the th€ athe th"
    the, e, space, _ = tokens
    *euro, _, a = broken
    unfinished = [euro[:1], euro[:2], euro]
    assert [ids for ids in seen if ids] == [[the], [e], [space], euro[:1], *unfinished, [a], *unfinished]


def test_what_is_complete_comes_at_once_and_the_rest_when_it_is():
    first, second = TINY("é€", add_special_tokens=False)["input_ids"][:1], TINY("€")["input_ids"]
    stream = TextStream(TINY)
    assert [stream.push(first), *(stream.push([token]) for token in second)] == ["é", "", "", "€"]


def test_flush_gives_up_on_a_broken_character():
    stream = TextStream(TINY)
    assert stream.push(TINY("€")["input_ids"][:1]) == ""
    assert stream.flush() == "\ufffd"
    assert stream.flush() == ""


@pytest.mark.parametrize(
    ("stops", "text"),
    [
        (["cd"], "ab"),
        (["bcde"], "a"),
        (["f", "cd"], "ab"),
        (["abcdef", "cd"], "ab"),  # the shorter one is complete first
        (["abcd", "cd"], ""),  # complete at the same token: the one that begins first
        (["a"], ""),
    ],
)
def test_a_stop_string_ends_the_text_before_it(stops, text):
    tokens = TINY("abcdefcd")["input_ids"]
    count, found = find_stop(TINY, [], tokens, stops)
    assert found == text
    assert any(stop in decode(TINY, tokens[:count]) for stop in stops)
    assert not any(stop in decode(TINY, tokens[: count - 1]) for stop in stops)


def test_a_stop_string_may_end_inside_a_token():
    tokens = TINY("ath.")["input_ids"]
    assert len(tokens) == 3
    assert find_stop(TINY, [], tokens, ["at"]) == (2, "")
    assert find_stop(TINY, [], tokens, ["h"]) == (2, "at")


def test_a_stop_string_of_several_bytes_waits_for_the_last():
    tokens = TINY("a€b")["input_ids"]
    assert find_stop(TINY, [], tokens[:3], ["€"]) is None
    assert find_stop(TINY, [], tokens, ["€"]) == (4, "a")


@pytest.mark.parametrize("tokenizer", TOKENIZERS, ids=NAMES)
@given(
    text=st.text(st.sampled_from("abth é"), max_size=20),
    stops=st.lists(st.text(st.sampled_from("abth é"), min_size=1, max_size=3), min_size=1, max_size=3),
    sizes=SIZES,
)
def test_where_text_stops_does_not_depend_on_how_it_arrives(tokenizer, text, stops, sizes):
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    arrived, found = [], None
    for piece in cut(tokens, sizes):
        arrived += piece
        if found := find_stop(tokenizer, [], arrived, stops):
            break
    one_by_one = (find_stop(tokenizer, [], tokens[:count], stops) for count in range(1, len(tokens) + 1))
    assert found == next(filter(None, one_by_one), None)


def test_special_tokens_stop_by_their_ids():
    assert special_ids(TINY, ["<eos>", "th", "<no>"]) == {0}
    assert special_ids(EMBEDDED, ["<|begin|>"]) == {EMBEDDED.convert_tokens_to_ids("<|begin|>")}
