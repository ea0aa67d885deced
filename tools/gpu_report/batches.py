"""Several texts at once: the embedded pair's texts by engine, and how fast the synthetic pair is."""

from collections.abc import Callable, Sequence
from time import perf_counter

import torch

from specctl.decoding.composition import build_drafter
from specctl.decoding.session import Session
from specctl.models.running.engines import EngineSettings
from specctl.models.running.pair import Pair
from specctl.models.running.passes import Passes
from specctl.policies import Setting
from specctl.profile.schema import SamplingTable
from specctl.records import Completion, Round
from specctl.text_engine.dispatch import in_order
from specctl.text_engine.engine import Writer, whole
from specctl.text_engine.here import HereEngine, Rows
from specctl.text_engine.pair_rows import passes_of
from specctl.text_engine.row_count import fastest_passes
from tools.gpu_report.record import Recorder
from tools.gpu_report.stage import Stage
from tools.gpu_report.texts import PROMPTS, difference, embedded_pair

CONSTANT = Setting.of({"name": "constant", "draft_length": 3})
ADAPTIVE = Setting.of({"name": "cost-optimal"})
SIZES = (4, 16)
MOST = 32
"""Texts up to which ``auto`` tries."""


def session_of(pair: Pair, setting: Setting | None) -> Session:
    """A pair with drafts of a setting, or the target alone."""
    return Session(pair, None if setting is None else build_drafter(pair, setting))


def written(
    pair: Pair, passes: Sequence[Passes], setting: Setting | None, prompts: Sequence[list[int]], limit: SamplingTable
) -> list[Completion]:
    """What prompts give, as many at once as the passes have rows."""

    def writer(row: Pair, _: Callable[[], int]) -> Writer:
        session = session_of(row, setting)
        return whole(lambda prompt: session.generate(prompt, limit))

    with HereEngine(None, Rows.over(pair, passes, writer)) as rows:
        tasks = enumerate(prompts)
        return [found for _, found in in_order(rows, tasks, 2 * rows.count)]


def same_texts(to: Recorder, stage: Stage) -> None:
    """Greedy texts of batches: in float32 the CPU's own, in bfloat16 and fixed shapes the same in any company."""
    limit = SamplingTable(max_new_tokens=stage.sized(64, 12))
    reference = embedded_pair("cpu", "eager", to)
    prompts = [reference.tokenizer.encode(prompt) for prompt in PROMPTS]
    wanted = [Session(reference, None).generate(prompt, limit).tokens for prompt in prompts]
    for engine in ("eager", "static", "graph") if not stage.rehearsal else ("eager",):
        pair = embedded_pair(stage.device, engine, to)
        for setting in (None, CONSTANT, ADAPTIVE):
            passes = passes_of(pair, 2)
            found = [one.tokens for one in written(pair, passes, setting, prompts, limit)]
            drafts = "no drafts" if setting is None else f"drafts by {setting.policy}"
            claim = f"{pair.target.engine}, two texts at once, {drafts}: the CPU's own texts"
            to.check(claim, found == wanted, difference(found, wanted))
        fixed = embedded_pair(stage.device, engine, to, deterministic=True, dtype="bfloat16")
        runs = []
        for setting in (None, CONSTANT):
            there = written(fixed, passes_of(fixed, 2), setting, prompts, limit)
            back = written(fixed, passes_of(fixed, 2), setting, prompts[::-1], limit)[::-1]
            runs += [[one.tokens for one in some] for some in (there, back)]
        first, *others = runs
        claim = f"{fixed.target.engine}, deterministic, bfloat16: a text is the same whatever its neighbours and drafts"
        to.check(
            claim, all(found == first for found in others), "; ".join(difference(found, first) for found in others)
        )


def speeds(to: Recorder, stage: Stage) -> None:
    """Tokens/s of several texts at once with the graph engine, and how many ``auto`` would write."""
    stage.keep_from_cudnn()
    pair = stage.pair(EngineSettings(engine="eager" if stage.rehearsal else "graph", notice=to.note))
    context, limit = stage.sized(200, 12), SamplingTable(max_new_tokens=stage.sized(64, 8))
    usual: float | None = None
    for size in (1, *(SIZES if not stage.rehearsal else (2,))):
        prompts = [stage.prompt(context + shift) for shift in range(size if size > 1 else stage.sized(2, 1))]
        passes = passes_of(pair, size) if size > 1 else []
        for setting in (None, CONSTANT, ADAPTIVE):
            # What is captured, and how far a policy looks, settles within two runs.
            runs = [_run(pair, passes, setting, prompts, limit, stage) for _ in range(3)]
            (first, _), (again, rounds) = runs[0], runs[-1]
            usual = usual or again
            drafts = "none" if setting is None else setting.label
            speed = {"first tokens/s": first, "again tokens/s": again, "of none alone": again / usual}
            drafted = sum(round_.drafted for round_ in rounds) / len(rounds)
            accepted = sum(round_.accepted for round_ in rounds) / len(rounds)
            shares = {"drafted a round": drafted, "accepted a round": accepted}
            to.row("Several texts at once", engine=pair.target.engine, texts=size, drafts=drafts, **speed, **shares)
    with torch.inference_mode():
        began = perf_counter()
        chosen = fastest_passes(pair, stage.sized(MOST, 2), stage.sized(100, 50), limit.max_new_tokens)
        texts = 1 if chosen is None else chosen[-1].slots
    to.row("What auto takes", engine=pair.target.engine, texts=texts, seconds=perf_counter() - began)


def _run(
    pair: Pair,
    passes: Sequence[Passes],
    setting: Setting | None,
    prompts: Sequence[list[int]],
    limit: SamplingTable,
    stage: Stage,
) -> tuple[float, list[Round]]:
    """Tokens a second of all texts, and their rounds."""
    stage.wait()
    began = perf_counter()
    if passes:
        done = written(pair, passes, setting, prompts, limit)
    else:
        session = session_of(pair, setting)
        done = [session.generate(prompt, limit) for prompt in prompts]
    stage.wait()
    seconds = perf_counter() - began
    return sum(len(one.tokens) for one in done) / seconds, [round_ for one in done for round_ in one.rounds]
