"""The index of a text's n-grams finds what a search through the whole text finds, also after tokens were taken back."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specctl.models.running.lookup import LookupPasses, Match, SuffixIndex
from specctl.models.running.slot import Slot

TEXTS = st.lists(st.integers(0, 3), max_size=40)
LONGEST = st.integers(1, 6)


def searched(text: Sequence[int], longest: int) -> Match | None:
    """The longest end of the text that occurs before, the last of its occurrences, by trying all of them."""
    for length in range(min(longest, len(text) - 1), 0, -1):
        for end in range(len(text) - 1, length - 1, -1):
            if text[end - length : end] == text[-length:]:
                return Match(length, end)
    return None


@given(TEXTS, LONGEST)
def test_the_match_is_the_one_that_a_search_finds(text: list[int], longest: int) -> None:
    index = SuffixIndex(longest)
    for place, token in enumerate(text):
        index.append([token])
        assert index.match == searched(text[: place + 1], longest)
    assert list(index.tokens) == text


@given(TEXTS, st.lists(st.tuples(st.integers(0, 40), TEXTS), max_size=5), LONGEST)
def test_what_was_taken_back_leaves_no_trace(text: list[int], edits: list[tuple[int, list[int]]], longest: int) -> None:
    index = SuffixIndex(longest)
    index.append(text)
    for length, added in edits:
        index.truncate(length)
        index.append(added)
        text = text[:length] + added
        fresh = SuffixIndex(longest)
        fresh.append(text)
        assert vars(index) == vars(fresh)
        assert index.match == searched(text, longest)


@given(TEXTS.filter(bool), st.data())
def test_rows_are_one_hot_at_the_token_after_the_match(text: list[int], data: st.DataObject) -> None:
    runner = Slot(LookupPasses(4))
    keep = data.draw(st.integers(0, len(text)))
    logits = runner.extend(text, keep).logits
    assert logits.shape == (keep, 4)
    assert runner.length == len(text)
    for place, row in enumerate(logits, start=len(text) - keep + 1):
        match = searched(text[:place], 6)
        expected = [0.25] * 4 if match is None else [float(token == text[match.end]) for token in range(4)]
        assert row.softmax(-1).tolist() == expected


def test_a_lookup_has_no_layers() -> None:
    runner = Slot(LookupPasses(4))
    runner.watch([])
    with pytest.raises(IndexError, match="no layer 0"):
        runner.watch([0])
    assert runner.device == torch.device("cpu")
