"""Sequences are read in groups that are no wider than memory is meant to be."""

import pytest

from specctl.training import predictor_examples


def test_groups_are_of_similar_length_and_at_most_the_limit_when_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predictor_examples, "TOKENS_AT_ONCE", 12)
    assert predictor_examples._groups([4, 6, 4, 4]) == [[1, 0], [2, 3]]
    assert predictor_examples._groups([6, 6, 1]) == [[0, 1], [2]]
    assert predictor_examples._groups([40, 1, 1]) == [[0], [1, 2]]
    assert predictor_examples._groups([]) == []
