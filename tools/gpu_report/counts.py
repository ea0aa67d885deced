"""How often the host waits for the device and launches something on it, for each drafted token and for each round."""

import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from specctl.decoding.composition import build_drafter
from specctl.decoding.session import Session
from specctl.models.running.engines import EngineSettings
from specctl.models.running.pair import Pair
from specctl.policies import Setting
from specctl.profile.schema import SamplingTable
from specctl.records import Completion
from tools.gpu_report.captures import Tiny
from tools.gpu_report.record import Recorder
from tools.gpu_report.stage import Cards, Stage

LENGTHS = (2, 5)
"""Tokens of a draft, from whose difference the share of one token is told."""
SHORT, LONG = 10, 24
"""Tokens of a completion, from whose difference the prompt's share is left out."""
LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx", "cudaGraphLaunch")
COPIES = ("cudaMemcpyAsync", "cudaMemcpy", "cudaMemsetAsync")
NAMES = ("waits", "launches", "copies")
Counts = Counter[str]
Shares = dict[str, float]


def count(to: Recorder, stage: Stage) -> None:
    """A table by engine and temperature; of the synthetic pair, in a rehearsal of a tiny one."""
    stage.keep_from_cudnn()
    with stage.cards() as cards:
        tiny = Tiny.on(cards, "cuda:0", "cuda:0") if stage.rehearsal else None
        for engine in ("eager", "static", "graph"):
            settings: Any = EngineSettings(engine=engine, notice=to.note)
            pair = stage.pair(settings) if tiny is None else tiny.pair(engine)
            for temperature in (0.0, 1.0):
                whole, token, rest = _measured(pair, stage, cards, temperature)
                if temperature:  # drafts of both lengths are accepted whole in other shares: no line goes through them
                    token, rest = {}, {}
                to.row(
                    "Waits and launches",
                    engine=pair.target.engine,
                    temperature=temperature,
                    **{f"{name} a round": number for name, number in whole.items()},
                    **{f"{name} a drafted token": token.get(name) for name in NAMES},
                    **{f"{name} a round besides": rest.get(name) for name in NAMES},
                )


def _measured(pair: Pair, stage: Stage, cards: Cards, temperature: float) -> tuple[Shares, Shares, Shares]:
    """What a round with long drafts takes in all, then what one of its tokens and the rest of it take."""
    means: list[Mapping[str, float]] = []
    lengths: list[float] = []
    for length in LENGTHS:
        session = Session(pair, build_drafter(pair, Setting.of({"name": "constant", "draft_length": length})))
        runs: dict[int, tuple[Completion, Counts]] = {}
        for limit in (LONG, SHORT, LONG, SHORT):  # the first two capture or compile what the others run
            settings = SamplingTable(temperature=temperature, max_new_tokens=limit)

            def work(session: Session = session, settings: SamplingTable = settings) -> Completion:
                return session.generate(stage.prompt(40), settings)

            runs[limit] = _counted(work, cards)
        (short, few), (long, many) = runs[SHORT], runs[LONG]
        rounds = len(long.rounds) - len(short.rounds)
        drafted = sum(round_.drafted for round_ in long.rounds) - sum(round_.drafted for round_ in short.rounds)
        means.append({name: (many[name] - few[name]) / rounds for name in NAMES})
        lengths.append(drafted / rounds)
    return {"drafted": lengths[-1], **means[-1]}, *shares(means, lengths)


def shares(means: Sequence[Mapping[str, float]], lengths: Sequence[float]) -> tuple[Shares, Shares]:
    """The line through two points: what each drafted token adds, and what a round takes besides.

    Args:
        means: of a round with short drafts, and with long ones.
        lengths: tokens of these drafts, the mean of all rounds.
    """
    (short, long), more = means, lengths[1] - lengths[0]
    each = {name: (long[name] - short[name]) / more for name in short}
    return each, {name: short[name] - lengths[0] * each[name] for name in short}


def _counted(work: Callable[[], Completion], cards: Cards) -> tuple[Completion, Counts]:
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
