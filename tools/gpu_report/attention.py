"""What torch's attention takes where the number of tokens changes with every pass, and where a mask is given."""

from collections.abc import Callable
from statistics import median
from time import perf_counter

import torch
from torch.nn.functional import scaled_dot_product_attention as attend

from tools.gpu_report.record import Recorder
from tools.gpu_report.stage import Stage

HEADS, GROUPS, SIZE = 32, 8, 128
"""Query heads, key-value heads and the size of a head, as in Llama 3 8B."""
SLOWER = 3.0
"""A first call at a new length that takes longer than this many later ones has planned anew."""


def new_lengths(to: Recorder, stage: Stage) -> None:
    """First and second calls at ten new lengths, by what torch may choose, for one query and for six with a mask."""
    start = stage.sized(300, 30)
    for number, (way, cudnn) in enumerate((("without cuDNN", False), ("with cuDNN", True))):
        with stage.attention(cudnn=cudnn):
            for kind, queries in (("one query", 1), ("six queries, masked", 6)):
                calls: tuple[list[float], list[float]] = ([], [])
                for keys in range(start + 20 * number, start + 20 * number + 10):
                    work = _call(stage, queries, keys)
                    for times in calls:
                        times.append(_milliseconds(stage, work))
                first, second = map(median, calls)
                to.row(
                    "Attention at new lengths", **{"kernels": way, "pass": kind, "first ms": first, "again ms": second}
                )
                if not cudnn:
                    claim = f"without cuDNN a new length costs nothing ({kind})"
                    stage.judge(to, claim, first <= SLOWER * second, f"first {first:.3f} ms, again {second:.3f} ms")


def masked_spans(to: Recorder, stage: Stage) -> None:
    """One query over whole spans, as eager passes have it and as passes over fixed buffers have it, with a mask."""
    with stage.attention(cudnn=False):
        for span in (512, 2048, 8192):
            keys = torch.randn(1, GROUPS, span, 64, device=stage.device, dtype=stage.dtype)
            query = torch.randn(1, HEADS, 1, 64, device=stage.device, dtype=stage.dtype)
            mask = torch.ones(1, 1, 1, span, dtype=torch.bool, device=stage.device)
            added = torch.zeros(1, 1, 1, span, dtype=stage.dtype, device=stage.device)

            def plain(keys: torch.Tensor = keys, query: torch.Tensor = query) -> torch.Tensor:
                return attend(query, keys, keys, enable_gqa=True)

            def masked(mask: torch.Tensor, keys: torch.Tensor = keys, query: torch.Tensor = query) -> torch.Tensor:
                return attend(query, keys, keys, attn_mask=mask, enable_gqa=True)

            ways = {
                "plain us": plain,
                "bool mask us": lambda mask=mask, masked=masked: masked(mask),
                "added mask us": lambda added=added, masked=masked: masked(added),
            }
            for work in ways.values():
                _milliseconds(stage, work)
            spent = {name: 1e3 * median(_milliseconds(stage, work) for _ in range(20)) for name, work in ways.items()}
            to.row("One query over a span", tokens=span, **spent)


def _call(stage: Stage, queries: int, keys: int) -> Callable[[], torch.Tensor]:
    """Attention over the first keys of a longer buffer, as a growing cache gives them."""
    held = torch.randn(1, GROUPS, keys + 100, SIZE, device=stage.device, dtype=stage.dtype)[:, :, :keys]
    asked = torch.randn(1, HEADS, queries, SIZE, device=stage.device, dtype=stage.dtype)
    mask = torch.ones(1, 1, queries, keys, dtype=torch.bool, device=stage.device) if queries > 1 else None
    return lambda: attend(asked, held, held, attn_mask=mask, enable_gqa=True)


def _milliseconds(stage: Stage, work: Callable[[], object]) -> float:
    stage.wait()
    began = perf_counter()
    work()
    stage.wait()
    return (perf_counter() - began) * 1e3
