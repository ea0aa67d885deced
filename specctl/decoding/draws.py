"""Sources of random numbers: on the host without torch, on devices torch's generators."""

import random
from collections.abc import Sequence
from functools import cached_property
from itertools import repeat
from typing import TYPE_CHECKING, Union, overload

from specctl.models.passes.inference import draws

if TYPE_CHECKING:
    import torch


AT_A_TIME = 64  # How many numbers `Uniforms` takes from its generator at a time
WORDS = 624  # State of a Mersenne twister, in words of 32 bits


class HostGenerator:
    """torch's CPU generator number by number, without torch: a Mersenne twister (MT19937) with torch's seeding.

    Args:
        seed: only the lowest 32 bits count, as in torch.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed

    @cached_property
    def _twister(self) -> random.Random:  # seeded at the first draw, since greedy decoding draws nothing
        words = [self._seed & 0xFFFFFFFF]
        for place in range(1, WORDS):
            last = words[-1]
            words.append((1812433253 * (last ^ (last >> 30)) + place) & 0xFFFFFFFF)
        twister = random.Random()
        twister.setstate((3, (*words, WORDS), None))
        return twister

    def random(self, count: int) -> list[float]:
        """Numbers in [0, 1), multiples of 2^-53: the same as `torch.rand` in float64."""
        bits = self._twister.getrandbits
        return [((drawn & 0x1FFFFF) << 32 | drawn >> 32) * 2.0**-53 for drawn in map(bits, repeat(64, count))]

    def below(self, end: int) -> int:
        """An integer in [0, ``end``) with ``end`` above 2^32: the same as `torch.randint`."""
        return self._bits() % end

    def get_state(self) -> tuple[object, ...]:
        return self._twister.getstate()

    def set_state(self, state: tuple[object, ...]) -> None:
        self._twister.setstate(state)

    def _bits(self) -> int:
        """64 bits, the high ones drawn first."""
        bits = self._twister.getrandbits(64)
        return (bits & 0xFFFFFFFF) << 32 | bits >> 32


DrawGenerator = Union[HostGenerator, "torch.Generator"]
Mark = tuple[object, tuple[float, ...]]  # The positions of `Uniforms` and of its generator


def generator_on(device: "torch.device", seed: int) -> DrawGenerator:
    """A generator for draws on a device. On the host, also where it draws for the device, it gives torch's numbers."""
    if device.type == "cpu" or not draws(device):
        return HostGenerator(seed)
    import torch

    return torch.Generator(device).manual_seed(seed)


@overload
def offspring(generator: "torch.Generator", device: "torch.device") -> "torch.Generator": ...
@overload
def offspring(generator: DrawGenerator, device: "torch.device | None") -> DrawGenerator: ...
def offspring(generator: DrawGenerator, device: "torch.device | None") -> DrawGenerator:
    """A new generator on ``device``, None for the host, seeded with a draw from another one. A torch generator yields a
    torch generator.
    """
    if isinstance(generator, HostGenerator):
        seed = generator.below(1 << 62)
        return HostGenerator(seed) if device is None else generator_on(device, seed)
    import torch

    seed = int(torch.randint(1 << 62, (), generator=generator, device=generator.device))
    return HostGenerator(seed) if device is None or not draws(device) else torch.Generator(device).manual_seed(seed)


@overload
def sibling(generator: "torch.Generator", device: "torch.device") -> "torch.Generator": ...
@overload
def sibling(generator: "torch.Generator | None", device: "torch.device") -> "torch.Generator | None": ...
@overload
def sibling(generator: DrawGenerator | None, device: "torch.device | None") -> DrawGenerator | None: ...
def sibling(generator: DrawGenerator | None, device: "torch.device | None") -> DrawGenerator | None:
    """The generator itself if it draws for ``device``, None for the host; else its `offspring` there."""
    if generator is None:
        return None
    here = "cpu" if isinstance(generator, HostGenerator) else str(generator.device)
    there = "cpu" if device is None or not draws(device) else str(device)
    return generator if here == there else offspring(generator, device)


def host_numbers(count: int, generator: DrawGenerator | None) -> list[float]:
    """Numbers in [0, 1), float64: the only randomness of draws on the host. Float32 would be too coarse for rare
    tokens.

    Args:
        count: how many.
        generator: on the host; None for numbers that cannot be reproduced.
    """
    if isinstance(generator, HostGenerator):
        return generator.random(count)
    if generator is None:
        return [random.random() for _ in range(count)]
    import torch

    numbers: list[float] = torch.rand(count, dtype=torch.float64, generator=generator).tolist()
    return numbers


def uniforms(shape: Sequence[int], device: "torch.device", generator: DrawGenerator | None) -> "torch.Tensor":  # (...)
    """`host_numbers` as a tensor on a device, drawn on that device where the generator is torch's."""
    import torch

    if isinstance(generator, HostGenerator):
        numbers = torch.tensor(generator.random(torch.Size(shape).numel()), dtype=torch.float64)
        return numbers.reshape(tuple(shape)).to(device)
    return torch.rand(tuple(shape), dtype=torch.float64, device=device, generator=generator)


class Uniforms:
    """Numbers in [0, 1) for draws on the host, taken from a generator in blocks: a block costs no more than a single
    number.
    """

    def __init__(self, generator: DrawGenerator | None) -> None:
        self._generator = generator
        self._left: list[float] = []

    def next(self) -> float:
        if not self._left:
            self._left = host_numbers(AT_A_TIME, self._generator)
        return self._left.pop()

    def mark(self) -> Mark:
        """The current position of the draws. The generator's state is on the host, so this waits for no device."""
        return None if self._generator is None else self._generator.get_state(), tuple(self._left)

    def go_back(self, mark: Mark) -> None:
        """Return to a mark, so that the same numbers are drawn again. Without a generator of the caller nothing is
        reproduced.
        """
        state, left = mark
        self._left = list(left)
        if self._generator is not None:
            self._generator.set_state(state)  # type: ignore[arg-type] # each accepts its own marks
