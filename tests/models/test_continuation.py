"""What a draft writes in its own tokens, cut as its target's tokenizer cuts text."""

from collections.abc import Sequence

import pytest

from specctl.models.translation import FARTHEST, Continuation, DraftText, TokenMap, agreement
from tests.support.other_tokenizers import byte_level, map_of, sentence_pieces, toy_map


def after(tokens: TokenMap, *ids: int) -> DraftText:
    text = DraftText(tokens)
    for token in ids:
        text.append(token)
    return text


def told(tokens: TokenMap, text: DraftText, written: Sequence[int]) -> tuple[int, int | None]:
    """How many tokens had to be written to tell the next one, and that one."""
    found = [Continuation(tokens).next(text, written[:count]) for count in range(len(written) + 1)]
    count = next((place for place, one in enumerate(found) if one is not None), len(written))
    return count, found[count]


def test_a_token_is_told_by_what_comes_behind_it() -> None:
    tokens = toy_map(("<end>", "a", "ab", "b"), ("a", "b", "<stop>"))
    assert told(tokens, after(tokens, 3), [0, 0]) == (2, 1)
    assert told(tokens, after(tokens, 3), [0, 1, 0]) == (3, 2)
    assert told(tokens, after(tokens, 3), [0]) == (1, None)


def test_the_end_of_a_text_tells_what_comes_before_it() -> None:
    tokens = toy_map(("<end>", "a", "ab"), ("a", "b", "<stop>"))
    assert told(tokens, after(tokens, 1), [0, 2]) == (2, 1)
    assert told(tokens, after(tokens, 1), [2]) == (1, 0)


def test_tokens_of_the_text_stay_where_what_follows_would_change_them() -> None:
    tokens = toy_map(("<end>", "a", "ab", "b"), ("a", "b", "<stop>"))
    assert told(tokens, after(tokens, 1), [1, 0]) == (2, 3), "not the rest of ab"


def test_what_no_token_tells_is_taken_as_it_is() -> None:
    tokens = toy_map(("<end>", "a"), ("b", "a", "<stop>"))
    assert told(tokens, after(tokens, 1), [0] * 10) == (FARTHEST, 1)
    assert told(tokens, after(tokens, 1), [*[0] * (FARTHEST - 1), 1]) == (FARTHEST, 1)


def test_half_a_character_waits_for_its_end() -> None:
    tokens = map_of(byte_level(420, "<|begin|>", "<|end|>"), sentence_pieces(400))
    ids = tokens.target.encode("Hello 你".encode())
    written = tokens.draft.encode(" 你 a".encode())
    count, found = told(tokens, after(tokens, *ids[:-3]), written)
    assert found == tokens.target.encode(" 你 a".encode())[0]
    assert tokens.draft.text(written[:count]).decode()


@pytest.mark.parametrize("target", [byte_level(420, "<|begin|>", "<|end|>"), sentence_pieces(400)], ids=["bytes", "▁"])
def test_most_of_a_text_comes_out_as_it_was(target: object) -> None:
    tokens = map_of(target, byte_level(340))
    ids = tokens.target.encode(b"The quick brown fox jumps over the lazy dog, 12 times.", first=True)
    assert 0.7 < agreement(tokens, [ids]) <= 1
    assert agreement(tokens, []) == 0
