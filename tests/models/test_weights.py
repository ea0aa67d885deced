"""The weights of a model: where they are, and what they take."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from specctl.models.passes.weights import drop_pages, page_out

needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux takes the hint")


@needs_linux
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
    drop_pages(Path("/"))


@needs_linux
def test_dropped_pages_of_a_folder_are_read_again(tmp_path: Path) -> None:
    inside, outside = tmp_path / "graph" / "weights.bin", tmp_path / "graph 2"
    inside.parent.mkdir()
    found = []
    for path in (inside, outside):
        path.write_bytes(bytes(range(256)) * 4096)
        found.append(np.memmap(path, dtype=np.uint8, mode="c"))

    def sums() -> list[int]:
        return [int(pages.sum(dtype=np.int64)) for pages in found]

    expected = sums()
    drop_pages(inside.parent)
    assert [_resident(path) for path in (inside, outside)] == [0, 1024]
    assert sums() == expected == [4096 * 255 * 128] * 2


def _resident(path: Path) -> int:
    """How much of a mapped file is in this process's memory, in KiB."""
    lines = Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines()
    start = next(place for place, line in enumerate(lines) if line.endswith(f" {path}"))
    return next(int(line.split()[1]) for line in lines[start:] if line.startswith("Rss:"))
