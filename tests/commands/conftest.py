"""What commands do again and again is done once."""

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def few_widths_are_timed() -> Iterator[None]:
    """The widest is always among them; no test reads the times."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr("specctl.observing.pass_times.WIDTHS", (1, 4))
        yield
