"""`specctl words`: what a screen shows is explained where only the package is installed."""

import pytest

from specctl.errors import UsageError
from specctl.reporting.words import all_words
from tests.support.invoked import invoke


def test_a_column_a_field_and_a_term_are_explained() -> None:
    shown = invoke("words", "verification rate", "ROUND").stdout
    assert shown.startswith("verification rate (bench): Target passes / generated tokens")
    assert "\nround (The terms): One drafting phase and the one target pass that verifies it.\n" in shown
    assert "accepted_length" not in shown
    assert "draft_ms (JSON):" in invoke("words", "draft_ms").stdout


def test_part_of_a_word_finds_every_word_with_it() -> None:
    shown = invoke("words", "acceptance len").stdout.splitlines()
    assert [line.split(":")[0] for line in shown] == ["mean acceptance length (bench)"]


def test_a_command_names_all_of_its_columns() -> None:
    shown = invoke("words", "bench").stdout.splitlines()
    assert [line.split(" (bench): ")[0] for line in shown[:2]] == ["candidate", "engine"]
    assert len(shown) == len(set(shown)) >= len(all_words()["bench"])


def test_without_a_word_all_are_listed() -> None:
    shown = invoke("words").stdout.splitlines()
    assert [line.split(": ")[0] for line in shown] == [*all_words()]
    assert "tokens/s" in shown[1]


def test_a_typing_error_is_answered_with_the_nearest_word() -> None:
    with pytest.raises(UsageError, match="'acceptence rate' is not explained") as error:
        invoke("words", "acceptence rate")
    assert error.value.hint == "did you mean 'acceptance rate'?"
    with pytest.raises(UsageError, match="'zzz' is not explained") as error:
        invoke("words", "zzz")
    assert error.value.hint == "`specctl words` lists all words"
