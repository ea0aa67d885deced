"""The weights of a model: where they are, and what they take."""

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from specctl.models.passes.weights import page_out


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux takes the hint")
def test_weights_that_are_paged_out_stay_what_they_are(tmp_path: Path) -> None:
    """Those of a file, those that were changed since, those of no file, parts of others, and none at all."""
    numbers = torch.arange(1 << 18, dtype=torch.float32).view(512, 512)
    save_file({"one": numbers, "two": numbers + 1, "few": numbers[0, :3].clone()}, tmp_path / "weights")
    found = load_file(tmp_path / "weights")
    found["two"].mul_(2)
    own = numbers + 3
    weights = [*found.values(), own, found["one"][3:100, 5:], torch.empty(0), torch.empty(3, device="meta")]
    for _ in range(2):
        page_out(weights)
        assert torch.equal(found["one"], numbers)
        assert torch.equal(found["two"], 2 * (numbers + 1))
        assert torch.equal(found["few"], numbers[0, :3])
        assert torch.equal(own, numbers + 3)


def test_elsewhere_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    monkeypatch.setattr("ctypes.CDLL", None)
    page_out([torch.zeros(1 << 16)])
