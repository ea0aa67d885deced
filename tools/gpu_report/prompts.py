"""Whether the time that is told for a prompt is the time that the device took for it."""

from statistics import median
from time import perf_counter

import torch

from specctl.decoding.session import Session
from specctl.models.running.engines import EngineSettings
from specctl.profile.schema import SamplingTable
from tools.gpu_report.record import Recorder
from tools.gpu_report.stage import Stage

OFF = 0.25
"""Share by which both times may differ."""
SLOWER = 3.0


def prompt_time(to: Recorder, stage: Stage) -> None:
    """Compare a completion's `prefill_seconds` with a read of the same prompt between two waits for the device."""
    pair = stage.pair(EngineSettings(engine="eager"))
    prompt = stage.prompt(stage.sized(2048, 120))
    settings = SamplingTable(max_new_tokens=8)
    done = [Session(pair, None).generate(prompt, settings) for _ in range(3)][-1]
    with torch.inference_mode():
        pair.target.rollback(0)
        stage.wait()
        began = perf_counter()
        pair.target.extend(prompt[:-1], keep=0)
        stage.wait()
        took = perf_counter() - began
    first, *later = [round_.verify_seconds for round_ in done.rounds]
    to.row(
        "The prompt's time",
        tokens=len(prompt),
        **{"told ms": done.prefill_seconds * 1e3, "took ms": took * 1e3, "first pass ms": first * 1e3},
        **{"later passes ms": median(later) * 1e3},
    )
    close = abs(done.prefill_seconds - took) <= OFF * took
    stage.judge(
        to, "the time told for a prompt is the device's", close, f"{done.prefill_seconds:.4f} s of {took:.4f} s"
    )
    waits = first <= SLOWER * median(later)
    stage.judge(to, "the first pass does not wait for the prompt", waits, f"{first:.4f} s, later {median(later):.4f} s")
