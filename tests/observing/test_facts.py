import platform
from pathlib import Path

import pytest
import torch

from specctl.observing.results import cpu_name, device_name


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("processor\t: 0\nmodel\t: 6\nmodel name\t: Some CPU  @ 2.20GHz\n", "Some CPU @ 2.20GHz"),
        ("processor\t: 0\nFeatures\t: fp asimd\n", None),
        (None, None),
    ],
    ids=["x86", "arm names no model", "not Linux"],
)
def test_a_processor_has_the_name_of_its_model(tmp_path: Path, text: str | None, name: str | None) -> None:
    path = tmp_path / "cpuinfo"
    if text is not None:
        path.write_text(text)
    assert cpu_name(path) == (name or platform.processor() or platform.machine())


def test_a_cpu_is_shown_with_its_threads() -> None:
    assert device_name(torch.device("cpu"), 3) == f"cpu ({cpu_name()}, 3 threads)"
