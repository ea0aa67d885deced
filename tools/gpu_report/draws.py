"""Whether tokens of small probability are drawn as often as they should be."""

from collections.abc import Callable
from math import sqrt
from statistics import median
from time import perf_counter

import torch

from specctl.decoding.draws import uniforms
from specctl.decoding.logits.device import pick
from tools.gpu_report.record import Recorder
from tools.gpu_report.stage import Stage

RARE = 1e-8
AT_A_TIME = 2_000_000
SIGMAS = 5.0
VOCABULARY = 128_256


def rare_tokens(to: Recorder, stage: Stage) -> None:
    """Draw a token of probability 1e-8 many times; show the least of torch's exponentials, by which others draw."""
    device = torch.device(stage.device)
    generator = torch.Generator(device).manual_seed(0)
    # Uniforms that are multiples of 2^-24, as in float32, would give the first token six times its due.
    weights = torch.tensor(
        [RARE, 1 - RARE], dtype=torch.float64, device=device
    )  # the rare one is drawn by small numbers
    times = stage.sized(2000, 20)
    hits = 0
    for _ in range(times):
        drawn = pick(weights.expand(AT_A_TIME, 2), uniforms((AT_A_TIME,), device, generator))
        hits += int((drawn == 0).sum())
    due = RARE * times * AT_A_TIME
    within = abs(hits - due) <= SIGMAS * sqrt(due)
    to.check(
        "a token of probability 1e-8 gets its due", within, f"{hits} of {due:.0f} draws, give or take {sqrt(due):.0f}"
    )
    for dtype in (torch.float32, torch.float64):
        count = stage.sized(50_000_000, 5_000_000)
        least = torch.empty(count, dtype=dtype, device=device).exponential_(generator=generator).min().item()
        name = str(dtype).removeprefix("torch.")
        to.row("Least of torch's exponentials", dtype=name, draws=count, least=least, due=1 / count)
    ways: dict[str, Callable[[], torch.Tensor]] = {
        "float32 exponentials": lambda: torch.empty(VOCABULARY, device=device).exponential_(generator=generator),
        "float64 exponentials": lambda: torch.empty(VOCABULARY, dtype=torch.float64, device=device).exponential_(
            generator=generator
        ),
        "specctl's draw": lambda: pick(torch.ones(VOCABULARY, device=device), uniforms((), device, generator)),
    }
    for name, work in ways.items():
        spent = []
        for _ in range(12):
            stage.wait()
            began = perf_counter()
            work()
            stage.wait()
            spent.append((perf_counter() - began) * 1e6)
        to.row(f"A draw from {VOCABULARY:,} tokens", way=name, us=median(spent[2:]))
