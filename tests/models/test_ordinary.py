"""Ids for passes whose text does not matter are ids that the model knows."""

import pytest

from specctl.models.passes.ordinary_tokens import ordinary_tokens


@pytest.mark.parametrize("vocabulary", [1, 2, 3, 11, 13, 14, 64, 109, 50_000])
@pytest.mark.parametrize("eos", [frozenset[int](), frozenset({0, 2, 12})])
def test_they_are_below_the_vocabulary_and_end_nothing_where_there_are_others(
    vocabulary: int, eos: frozenset[int]
) -> None:
    tokens = ordinary_tokens(150, vocabulary, eos)
    assert len(tokens) == 150
    assert set(tokens) <= set(range(vocabulary))
    assert not set(tokens) & eos or set(range(vocabulary)) <= eos
    if vocabulary > 3:
        assert len(set(tokens)) >= 4


def test_of_a_usual_vocabulary_they_are_none_of_the_first() -> None:
    assert ordinary_tokens(4, 32_000, {10, 12}) == [11, 13, 14, 15]
    assert min(ordinary_tokens(500, 32_000)) == 10


def test_where_every_id_ends_a_sequence_the_first_is_taken() -> None:
    assert ordinary_tokens(2, 3, {0, 1, 2}) == [0, 0]
