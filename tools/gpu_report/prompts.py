"""Whether the time that is told for a prompt is the time that the device took for it."""

from statistics import median

import torch

from specctl.decoding.session import Session
from specctl.models.running.engines import EngineSettings
from specctl.profile.schema import SamplingTable
from tools.gpu_report.captures import Tiny
from tools.gpu_report.record import Recorder
from tools.gpu_report.stage import Stage

OFF = 0.25
"""Share by which both times may differ."""
SLOWER = 3.0


def prompt_time(to: Recorder, stage: Stage) -> None:
    """Compare a completion's `prefill_seconds` with a read of the same prompt between two waits for the device."""
    stage.keep_from_cudnn()
    with stage.cards(timed=True) as cards, torch.inference_mode():
        settings = EngineSettings(engine="eager")
        pair = Tiny.on(cards, "cuda:0", "cuda:0").pair("eager") if stage.rehearsal else stage.pair(settings)
        prompt = stage.prompt(stage.sized(2048, 120))
        done = [Session(pair, None).generate(prompt, SamplingTable(max_new_tokens=8)) for _ in range(3)][-1]
        pair.target.rollback(0)
        torch.cuda.synchronize()
        began = cards.now()
        pair.target.extend(prompt[:-1], keep=0)
        torch.cuda.synchronize()
        took = cards.now() - began
    first, *later = [round_.verify_seconds * 1e3 for round_ in done.rounds]
    told, took, usual = done.prefill_seconds * 1e3, took * 1e3, median(later)
    to.row(
        "The prompt's time",
        tokens=len(prompt),
        **{"told ms": told, "took ms": took, "first pass ms": first, "later passes ms": usual},
    )
    close = abs(told - took) <= OFF * took
    to.check("the time told for a prompt is the device's", close, f"{told:.2f} ms told, {took:.2f} ms taken")
    waits = first <= SLOWER * usual
    to.check("the first pass does not wait for the prompt", waits, f"{first:.2f} ms, later {usual:.2f} ms")
