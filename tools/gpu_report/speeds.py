"""How fast the synthetic pair is: by engine, by policy, and with transformers' own generation."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from time import perf_counter
from typing import Any

import torch
from transformers import PreTrainedModel

from specctl.decoding.composition import build_drafter
from specctl.decoding.session import Session
from specctl.decoding.warming import warm_up
from specctl.models.passes.layer_sizes import cached_values
from specctl.models.running.engines import EngineSettings
from specctl.models.running.pair import Pair
from specctl.peers.assisted import AssistedPeer
from specctl.peers.engines import ASSISTED
from specctl.policies import POLICIES, Setting
from specctl.profile.schema import SamplingTable
from specctl.records import Completion
from tools.gpu_report.record import Recorder
from tools.gpu_report.stage import Stage
from tools.pass_times import torch_bytes

DRAFTED = 5
SPECULATING = Setting.of({"name": "constant", "draft_length": DRAFTED})
SPEEDS, STEPS, MEMORY = (
    "Tokens a second",
    "Draft step and verification against the memory floor",
    "Memory and preparing",
)
LONGEST = 10
"""Tokens up to which verifications are captured before policies are timed; others are captured when they come."""
SLOWEST = 10.0
"""A round that takes longer than this many usual ones has something in it that is no round."""


def engine_speeds(to: Recorder, stage: Stage, engine: str, way: str) -> None:
    """None and a constant draft with one engine: tokens/s first and again, steps, verifications, memory.

    Args:
        to: takes what is found.
        stage: where it runs.
        engine: as in a profile.
        way: ``plain``, ``compiled``, or ``cudnn`` where torch may choose cuDNN's attention.
    """
    with stage.attention(cudnn=way == "cudnn"):
        began = torch.cuda.memory_reserved() if not stage.rehearsal else 0
        settings = EngineSettings(engine=engine, compile=way == "compiled", notice=to.note)  # type: ignore[arg-type]
        pair = stage.pair(settings)
        weights = torch.cuda.memory_reserved() - began if not stage.rehearsal else 0
        name = pair.target.engine + (", cuDNN allowed" if way == "cudnn" else "")
        started = perf_counter()
        warm_up(pair, SamplingTable(), longest=DRAFTED)
        warmed = perf_counter() - started
        outstanding = max(
            _one_setting(to, stage, pair, name, temperature, context)
            for temperature in (0.0, 1.0)
            for context in (stage.sized(200, 20), stage.sized(2000, 120))
        )
        told = f"the slowest takes {outstanding[0]:.1f} usual ones, with {outstanding[1]}"
        stage.judge(to, f"{name}: after the warm-up no round stands out", outstanding[0] <= SLOWEST, told)
        reserved = torch.cuda.memory_reserved() - began - weights if not stage.rehearsal else None
        to.row(
            MEMORY,
            engine=name,
            **{"warm-up s": warmed, "preparing s": pair.preparing_seconds},
            **{"reserved besides weights MiB": None if reserved is None else reserved / 2**20},
        )


def _one_setting(
    to: Recorder, stage: Stage, pair: Pair, name: str, temperature: float, context: int
) -> tuple[float, str]:
    """Rows of one temperature and context; by how much the slowest first round exceeds usual ones, and where."""
    settings = SamplingTable(temperature=temperature, max_new_tokens=stage.sized(96, 16))
    prompt = stage.prompt(context)
    usual: float | None = None
    outstanding = (0.0, "")
    for setting in (None, SPECULATING):
        drafter = build_drafter(pair, setting) if setting is not None else None
        first, again = (Session(pair, drafter).generate(prompt, settings) for _ in range(2))
        usual = _speed_row(to, name, setting.label if setting else "none", temperature, context, (first, again), usual)
        times = [round_.total_seconds for round_ in again.rounds[1:]] or [again.total_seconds]
        slowest = max(round_.total_seconds for round_ in first.rounds)
        what = f"{setting.label if setting else 'none'} at temperature {temperature:g} behind {context} tokens"
        outstanding = max(outstanding, (slowest / median(times), what))
    _step_row(to, pair, name, temperature, context, again)
    return outstanding


def _step_row(to: Recorder, pair: Pair, name: str, temperature: float, context: int, done: Completion) -> None:
    """A draft step and a verification, as a completion's rounds tell them, next to what reading takes."""
    rounds = done.rounds[1:]
    steps = [round_.draft_seconds / round_.drafted for round_ in rounds if round_.drafted]
    passes = [round_.verify_seconds for round_ in rounds if round_.drafted == DRAFTED]
    if not steps or not passes:
        to.note(f"{name} at temperature {temperature:g} behind {context} tokens: too few rounds to tell a step's time")
        return
    target, draft = (pair.torch_model(place, name) for place in range(2))
    floor, its_floor = _floor(to, draft, context), _floor(to, target, context)
    step, verification = median(steps) * 1e3, median(passes) * 1e3
    figures = {"draft step ms": step, "floor ms": floor, "times the floor": step / floor if floor else None}
    its_own = {"its floor ms": its_floor, "times its floor": verification / its_floor if its_floor else None}
    to.row(
        STEPS,
        engine=name,
        temperature=temperature,
        context=context,
        **figures,
        **{f"verification of {DRAFTED + 1} ms": verification, **its_own, "step / verification": step / verification},
    )


def transformers_speeds(to: Recorder, stage: Stage) -> None:
    """transformers alone, with its growing and with its static cache, and its assisted generation in three settings."""
    stage.keep_from_cudnn()
    pair = stage.pair(EngineSettings(engine="eager"))
    context, temperature = stage.sized(200, 20), 0.0
    prompt, settings = stage.prompt(context), SamplingTable(max_new_tokens=stage.sized(96, 16))
    usual: float | None = None
    for cache in ("dynamic", "static"):
        with _told(to, f"transformers alone, {cache} cache"):
            seconds = [
                _alone(pair.torch_model(0, "it"), prompt, settings.max_new_tokens, cache, stage) for _ in range(2)
            ]
            speeds = [settings.max_new_tokens / one for one in seconds]
            usual = usual or speeds[1]
            _row(to, f"transformers, {cache} cache", "none", temperature, context, (*speeds, speeds[1] / usual))
    for peer in ASSISTED:
        with _told(to, f"transformers, {peer}"):
            assisted = AssistedPeer(pair, peer)
            done = [assisted.generate(prompt, settings) for _ in range(2)]
            speeds = [len(one.tokens) / one.total_seconds for one in done]
            gained = speeds[1] / usual if usual else None
            _row(to, "transformers, dynamic cache", peer, temperature, context, (*speeds, gained))


def policy_speeds(to: Recorder, stage: Stage) -> None:
    """Every policy that needs no trained head, with the graph engine; in a rehearsal with the eager one."""
    stage.keep_from_cudnn()
    engine: Any = "eager" if stage.rehearsal else "graph"
    pair = stage.pair(EngineSettings(engine=engine, notice=to.note))
    warm_up(pair, SamplingTable(), longest=LONGEST)
    name, context = pair.target.engine, stage.sized(200, 20)
    settings = SamplingTable(max_new_tokens=stage.sized(96, 16))
    usual: float | None = None
    for policy in ("none", *(policy for policy in POLICIES if policy != "none")):
        setting = Setting.of({"name": policy})
        if policy != "none" and (setting.needs_predictor or setting.policy == "confidence"):
            continue
        drafter = build_drafter(pair, setting) if policy != "none" else None
        prompts = [stage.prompt(context + shift) for shift in range(stage.sized(4, 1))]
        done = [[Session(pair, drafter).generate(prompt, settings) for prompt in prompts] for _ in range(2)]
        usual = _speed_row(to, name, setting.label, 0.0, context, done, usual, table="specctl by policy")


def _speed_row(
    to: Recorder,
    engine: str,
    drafts: str,
    temperature: float,
    context: int,
    done: Sequence[Completion | Sequence[Completion]],
    usual: float | None,
    table: str = SPEEDS,
) -> float:
    """A row of a first and a second time; returns the speed that others are compared with, of the first row."""
    both = [[one] if isinstance(one, Completion) else list(one) for one in done]
    speeds = [sum(len(one.tokens) for one in some) / sum(one.total_seconds for one in some) for some in both]
    compared = usual or speeds[1]
    rounds = [round_ for one in both[1] for round_ in one.rounds]
    drafted = sum(round_.drafted for round_ in rounds)
    slowest = max(round_.total_seconds for one in both[0] for round_ in one.rounds)
    more = {
        "accepted": f"{sum(round_.accepted for round_ in rounds) / drafted:.0%}" if drafted else None,
        "tokens a round": sum(len(round_.emitted) for round_ in rounds) / len(rounds),
        "slowest round ms": slowest * 1e3,
    }
    _row(to, engine, drafts, temperature, context, (*speeds, speeds[1] / compared), table, **more)
    return compared


def _row(
    to: Recorder,
    engine: str,
    drafts: str,
    temperature: float,
    context: int,
    speeds: Sequence[float | None],
    table: str = SPEEDS,
    **more: Any,
) -> None:
    first, again, gained = speeds
    figures = {"first tokens/s": first, "again tokens/s": again, "speedup over none": gained}
    to.row(table, engine=engine, drafts=drafts, temperature=temperature, context=context, **figures, **more)


def _floor(to: Recorder, model: PreTrainedModel, context: int) -> float | None:
    """Milliseconds that reading a model's weights and cache takes at the measured bandwidth; None without it."""
    speed = to.facts.get("bandwidth")
    item = model.dtype.itemsize
    return (torch_bytes(model) + cached_values(model.config) * item * context) / speed * 1e3 if speed else None


def _alone(model: PreTrainedModel, prompt: Sequence[int], tokens: int, cache: str, stage: Stage) -> float:
    ids = torch.tensor([prompt], device=stage.device)
    more = {"cache_implementation": "static"} if cache == "static" else {}
    generate: Callable[..., torch.Tensor] = model.generate  # type: ignore[assignment]
    stage.wait()
    began = perf_counter()
    made = generate(ids, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=0, **more)
    stage.wait()
    seconds = perf_counter() - began
    assert made.shape[1] == len(prompt) + tokens
    return seconds


@contextmanager
def _told(to: Recorder, what: str) -> Iterator[None]:
    """Turns what another library cannot do into a note, so that the rest of the part goes on."""
    try:
        yield
    except Exception as error:
        to.note(f"{what} did not run: {type(error).__name__}: {str(error).splitlines()[0][:300] if str(error) else ''}")
