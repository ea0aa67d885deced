"""What commands do again and again is done once."""

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest

READ: dict[str, Any] = {}
"""Models that were read, by folder and place."""


@pytest.fixture(autouse=True, scope="module")
def weights_read_once() -> Iterator[None]:
    """Of the models that ship with the package; each pair has copies of its own."""
    from specctl.models.loading import model
    from specctl.profile.embedded import model_path

    usual, shipped = model._read, model_path("target").parent

    def read(checkpoint: Any, placement: Any, quantization: Any, trust_remote_code: bool) -> Any:
        if quantization is not None or checkpoint.folder.parent != shipped:
            return usual(checkpoint, placement, quantization, trust_remote_code)
        key = f"{checkpoint.folder} {placement}"
        if key not in READ:
            READ[key] = usual(checkpoint, placement, None, trust_remote_code)
        return deepcopy(READ[key])

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(model, "_read", read)
        yield


@pytest.fixture(autouse=True, scope="module")
def few_widths_are_timed() -> Iterator[None]:
    """The widest is always among them; no test reads the times."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr("specctl.observing.pass_times.WIDTHS", (1, 4))
        yield
