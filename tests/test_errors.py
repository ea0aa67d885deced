"""Errors say what is wrong once, and how to mend it once."""

import pickle
import traceback

import pytest

from specctl.errors import ModelError, ProfileError, RecordError, SpecctlError


@pytest.mark.parametrize("kind", [SpecctlError, ProfileError, ModelError])
def test_the_hint_is_beside_the_message_and_in_tracebacks(kind: type[SpecctlError]) -> None:
    error = kind("what is wrong", "how to mend it")
    assert (str(error), error.hint) == ("what is wrong", "how to mend it")
    assert error.told == "what is wrong\nhow to mend it"
    assert "".join(traceback.format_exception(error)).count("how to mend it") == 1
    again = pickle.loads(pickle.dumps(error))
    assert (again.message, again.hint, again.__notes__) == (error.message, error.hint, error.__notes__)


def test_without_a_hint_there_is_the_message() -> None:
    error = RecordError("kind", "what is wrong")
    assert error.told == str(error) == "what is wrong"
    assert not hasattr(error, "__notes__")
