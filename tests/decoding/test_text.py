from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from specctl.decoding.text import TextStream, decode_after, find_stop, silent_ids, special_ids
from specctl.models.files.tokenizer import BareTokenizer, light
from specctl.profile.schema import model_path
from tests.support.checkpoints import tiny_tokenizer
from tests.support.other_tokenizers import sentence_pieces

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


PIECES = sentence_pieces(500)
SPELLED = [PIECES, light(PIECES)]
FOREIGN = [
    "\u1230\u120b\u121d",
    "\u10d2\u10d0\u10db",
    "\u0db8\u0dad\u0d9a",
    "\U0001f642\U0001f680",
    "the \u1230 or\u121d",
]


def characters(tokenizer, tokens):
    """What ids spell, each byte that belongs to no whole character as U+FFFD."""
    names = {token: name for name, token in tokenizer.get_vocab().items()}
    said = [names[token] for token in tokens if token not in silent_ids(tokenizer)]
    octets = b"".join(
        bytes.fromhex(name[3:5]) if name.startswith("<0x") else name.replace("\u2581", " ").encode() for name in said
    )
    found = ""
    while octets:
        try:
            found, octets = found + octets.decode(), b""
        except UnicodeDecodeError as error:
            broken = error.end - error.start
            found, octets = found + octets[: error.start].decode() + "\ufffd" * broken, octets[error.end :]
    return found.removeprefix(" ")


@pytest.mark.parametrize("tokenizer", SPELLED, ids=["whole", "bare"])
@settings(max_examples=50)
@given(data=st.data())
def test_a_completion_begins_where_the_prompt_ends_whatever_it_ends_with(tokenizer, data):
    """Also inside a character, and where the tokens that are decoded along begin inside one."""
    letters = st.text(st.sampled_from("the \u1230\u10d0\u0dad\U0001f680\u20ac"), max_size=8)
    whole = tokenizer.encode(data.draw(st.sampled_from(FOREIGN)) + data.draw(letters), add_special_tokens=False)
    cut_at = data.draw(st.integers(1, len(whole) - 1))
    before, after = whole[:cut_at], whole[cut_at:]
    expected = decode(tokenizer, whole)[len(characters(tokenizer, before).rstrip("\ufffd")) :]
    assert decode_after(tokenizer, before, after) == expected
    stream = TextStream(tokenizer, before)
    assert "".join([*(stream.push(piece) for piece in cut(after, data.draw(SIZES))), stream.flush()]) == expected


@pytest.mark.parametrize("tokenizer", SPELLED, ids=["whole", "bare"])
@settings(max_examples=50)
@given(data=st.data())
def test_bytes_that_are_no_characters_take_none_along(tokenizer, data):
    """Any tokens: a stream cannot take back what it has shown."""
    some = [
        token for name, token in sorted(tokenizer.get_vocab().items()) if name[:3] != "<0x" or int(name[3:5], 16) > 127
    ]
    tokens = data.draw(st.lists(st.sampled_from([*some[:150], *some[-60:]]), max_size=30))
    prompt, sizes = tokens[:3], data.draw(SIZES)
    stream = TextStream(tokenizer, prompt)
    pieces = [stream.push(piece) for piece in cut(tokens[3:], sizes)]
    text = decode_after(tokenizer, prompt, tokens[3:])
    assert "".join([*pieces, stream.flush()]) == text
    before = characters(tokenizer, prompt)
    if before and not before.endswith("\ufffd"):
        assert before + text == characters(tokenizer, tokens)


def test_a_byte_level_prompt_may_end_inside_a_character():
    tokens = TINY("a\u20acb")["input_ids"]
    for tokenizer in (TINY, light(TINY)):
        for at, expected in ((2, "\u20acb"), (3, "\u20acb"), (4, "b")):
            assert decode_after(tokenizer, tokens[:at], tokens[at:]) == expected
            stream = TextStream(tokenizer, tokens[:at])
            assert "".join(stream.push([token]) for token in tokens[at:]) == expected
            assert find_stop(tokenizer, tokens[:at], tokens[at:], [expected[0]]) == (max(4 - at, 1), "")


def test_a_stop_string_is_found_where_a_round_adds_a_part_of_the_next_character():
    tokens = PIECES.encode("\u1230\u120b", add_special_tokens=False)
    assert find_stop(PIECES, [], tokens[:5], ["\u1230"]) == (4, "")


def test_what_the_library_leaves_out_is_silent():
    assert PIECES.convert_tokens_to_ids("<unk>") not in PIECES.all_special_ids
    for tokenizer in SPELLED:
        assert silent_ids(tokenizer) == {PIECES.convert_tokens_to_ids(name) for name in ("<bos>", "<eos>", "<unk>")}
    assert silent_ids(TINY) == {0}, "not <tool>, which is added and not special"


def test_special_tokens_before_a_text_do_not_take_its_space():
    prompt = [*PIECES.encode("the", add_special_tokens=False), *[PIECES.eos_token_id] * 9]
    word = PIECES.encode("the", add_special_tokens=False)
    for tokenizer in SPELLED:
        assert decode_after(tokenizer, prompt, word) == " the"
        stream = TextStream(tokenizer, prompt)
        assert stream.push([0, 1, 0]) + stream.push(word) == " the"
        assert decode_after(tokenizer, [0], word) == TextStream(tokenizer, [0]).push(word) == "the"
