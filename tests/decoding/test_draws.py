"""The host's own generator is torch's on the CPU, number by number."""

import ast
from pathlib import Path

import pytest
import torch

import specctl.decoding
from specctl.decoding.draws import (
    AT_A_TIME,
    DrawGenerator,
    HostGenerator,
    Uniforms,
    generator_on,
    host_numbers,
    offspring,
    sibling,
    uniforms,
)
from tests.support.toys import seeded

CPU = torch.device("cpu")
SEEDS = [0, 1, 2**31 + 5, 2**32 - 1, 2**40 + 7, 2**64 - 1]


@pytest.mark.parametrize("seed", SEEDS)
def test_numbers_of_the_host_are_torchs_to_the_last_bit(seed: int) -> None:
    ours, theirs = HostGenerator(seed), torch.Generator().manual_seed(seed)
    for count in (64, 5, 1, 64, 300, 700):
        assert ours.random(count) == torch.rand(count, dtype=torch.float64, generator=theirs).tolist()
        assert ours.below(1 << 62) == int(torch.randint(1 << 62, (), generator=theirs))


@pytest.mark.parametrize("device", [None, CPU])
def test_descendants_are_alike(device: torch.device | None) -> None:
    ours, theirs = HostGenerator(7), seeded(7)
    assert sibling(ours, device) is ours
    assert sibling(theirs, device) is theirs
    assert host_numbers(9, offspring(ours, device)) == host_numbers(9, offspring(theirs, device))


def test_a_tensor_of_numbers_is_the_same_from_both() -> None:
    ours, theirs = (uniforms((2, 3), CPU, generator) for generator in (generator_on(CPU, 11), seeded(11)))
    assert torch.equal(ours, theirs)
    assert ours.dtype == torch.float64


@pytest.mark.parametrize("make", [HostGenerator, seeded], ids=["the host's", "torch's"])
def test_what_was_drawn_can_be_drawn_again(make: type[HostGenerator]) -> None:
    generator: DrawGenerator = make(3)
    numbers = Uniforms(generator)
    expected = [Uniforms(make(3)).next()]
    assert [numbers.next()] == expected
    mark = numbers.mark()
    first = [numbers.next() for _ in range(AT_A_TIME + 9)]
    numbers.go_back(mark)
    assert [numbers.next() for _ in range(AT_A_TIME + 9)] == first


def names_at_import(path: Path) -> set[str]:
    """The first parts of what a module imports when it is imported itself."""
    found: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.split(".")[0])
    return found


def test_only_what_has_a_form_for_each_names_numpy_or_torch() -> None:
    """The loop and its drafters read rows, whoever made them."""
    room = Path(specctl.decoding.__file__).parent
    for path in sorted(room.rglob("*.py")):
        name, named = path.stem, names_at_import(path)
        of_torch = name in ("device", "draft_tokens", "warming")
        assert of_torch or "torch" not in named, path
        assert of_torch or path.parent.name == "logits" or "numpy" not in named, path
