"""What passes over several texts take, by a roofline of a card or by a line through measured passes."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from specctl.replay.costs import CostTable

MEMORY, ARITHMETIC = 0.85 * 4.8e12, 0.75 * 800e12
"""Bytes and floating-point operations in a second that a pass reaches of an H200's."""
LAYER, HOST = 4e-6, 40e-6
"""Seconds of a layer's kernels beyond their bytes, and of the host after each pass: its numbers, policies, the start of
the next pass. Both are assumed, and the second not to grow with the number of texts."""
CACHED = 1000
"""Tokens in the caches of each text."""
LONGEST = 40

Seconds = Callable[[int, int], float]
"""Of a pass over so many tokens of so many texts."""


@dataclass(frozen=True, slots=True)
class Roofline:
    """A model on an H200 in bfloat16: a pass takes as long as its bytes or its arithmetic, whichever is longer.

    ``max(2 P + n C kv, 2 P N) + layers`` with N tokens of n texts, P parameters, C cached tokens of a text and kv bytes
    of keys and values of one, at the rates above.

    Attributes:
        parameters, layers: of the model.
        cached: kv, bytes of keys and values of one token.
    """

    parameters: float
    layers: int
    cached: float

    def __call__(self, tokens: int, rows: int) -> float:
        read = (2 * self.parameters + rows * CACHED * self.cached) / MEMORY
        return max(read, 2 * self.parameters * tokens / ARITHMETIC) + self.layers * LAYER + HOST


@dataclass(frozen=True, slots=True)
class Line:
    """A pass whose time was measured: so many seconds, and more for each token and each text."""

    base: float
    token: float
    row: float

    def __call__(self, tokens: int, rows: int) -> float:
        return self.base + self.token * tokens + self.row * rows


PAIRS: dict[str, tuple[Seconds, Seconds]] = {
    "h200": (Roofline(8.0e9, 32, 32 * 8 * 128 * 4), Roofline(1.24e9, 16, 16 * 8 * 64 * 4)),
    "cpu": (Line(1.56e-3, 0.09e-3, 0.405e-3), Line(0.03e-3, 0.0, 0.105e-3)),
}
"""Target and draft: Llama 3.1 8B with Llama 3.2 1B, and the embedded pair on onnxruntime with one thread (2026-11-23, a
loaded machine, 100 tokens cached), where the host takes 55 microseconds for each text in a pass."""


def price_table(target: Seconds, draft: Seconds, counts: tuple[int, ...]) -> CostTable:
    """Prices of rounds in which so many texts take part, 1 among them."""

    def of(rows: int) -> CostTable:
        lengths = np.arange(LONGEST + 1)
        verifying = np.array([target(rows * (int(length) + 1), rows) for length in lengths])
        return CostTable(
            np.zeros(1),
            lengths.astype(np.float64),
            (1e3 * draft(rows, rows) * lengths[None]).astype(np.float64),
            1e3 * verifying[None],
            {},
            0.0,
        )

    return replace(of(1), batches={rows: of(rows) for rows in counts if rows > 1})
