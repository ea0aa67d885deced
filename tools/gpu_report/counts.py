"""How often the host waits for the device and launches something on it, for each drafted token and for each round."""

import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from specctl.decoding.composition import build_drafter
from specctl.decoding.session import Session
from specctl.models.loading.pair import Pair
from specctl.models.running.engines import EngineSettings, engine_name
from specctl.policies import Setting
from specctl.profile.schema import SamplingTable
from tools.gpu_report.captures import Tiny
from tools.gpu_report.record import Recorder
from tools.gpu_report.stage import Cards, Stage

LENGTHS = (2, 5)
"""Tokens of a draft, from whose difference the share of one token is told."""
SHORT, LONG = 12, 36
"""Tokens of a completion, from whose difference the prompt's share is left out."""
LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx", "cudaGraphLaunch")
COPIES = ("cudaMemcpyAsync", "cudaMemcpy", "cudaMemsetAsync")
Counts = Counter[str]


def count(to: Recorder, stage: Stage) -> None:
    """A table by engine and temperature; of the synthetic pair, in a rehearsal of a tiny one."""
    with stage.cards() as cards:
        tiny = Tiny.on(cards, "cuda:0", "cuda:0") if stage.rehearsal else None
        for engine in ("eager", "static", "graph"):
            settings: Any = EngineSettings(engine=engine, notice=to.note)
            pair = stage.pair(settings) if tiny is None else tiny.pair(engine)
            for temperature in (0.0, 1.0):
                token, rest = _split(pair, stage, cards, temperature)
                to.row(
                    "Waits and launches",
                    engine=engine_name(pair.target),
                    temperature=temperature,
                    **{f"{name} a drafted token": token[name] for name in ("waits", "launches", "copies")},
                    **{f"{name} a round besides": rest[name] for name in ("waits", "launches", "copies")},
                )


def _split(pair: Pair, stage: Stage, cards: Cards, temperature: float) -> tuple[dict[str, float], dict[str, float]]:
    """What a drafted token and the rest of a round take, by least squares over two lengths of drafts."""
    means: list[dict[str, float]] = []
    tokens: list[float] = []
    for length in LENGTHS:
        session = Session(pair, build_drafter(pair, Setting.of({"name": "constant", "draft_length": length})))
        found: list[Counts] = []
        sizes: list[tuple[int, int]] = []
        for limit in (LONG, SHORT, LONG):  # the first captures or compiles what the others run
            settings = SamplingTable(temperature=temperature, max_new_tokens=limit)

            def work(session: Session = session, settings: SamplingTable = settings) -> Any:
                return session.generate(stage.prompt(40), settings)

            done, counted = _counted(work, cards)
            found.append(counted)
            sizes.append((len(done.rounds), sum(round_.drafted for round_ in done.rounds)))
        rounds, drafted = (long - short for long, short in zip(sizes[2], sizes[1], strict=True))
        means.append({name: (found[2][name] - found[1][name]) / rounds for name in ("waits", "launches", "copies")})
        tokens.append(drafted / rounds)
    each = {name: (means[1][name] - means[0][name]) / (tokens[1] - tokens[0]) for name in means[0]}
    return each, {name: means[0][name] - tokens[0] * each[name] for name in each}


def _counted(work: Callable[[], Any], cards: Cards) -> tuple[Any, Counts]:
    """What some work gives, and what it made the host do."""
    if cards.pretended is not None:
        cards.pretended.ledger.clear()
        done = work()
        tally = cards.pretended.ledger.tally()
        return done, Counter(waits=tally.waits, launches=tally.launches, copies=tally.copies)
    from torch.profiler import ProfilerActivity, profile

    work()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            done = work()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    waits = sum("synchroniz" in str(one.message) for one in caught)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        work()
    calls = {one.key: one.count for one in seen.key_averages()}
    return done, Counter(waits=waits, launches=_sum(calls, LAUNCHES), copies=_sum(calls, COPIES))


def _sum(calls: dict[str, int], names: Sequence[str]) -> int:
    return sum(calls.get(name, 0) for name in names)
