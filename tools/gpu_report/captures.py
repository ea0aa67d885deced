"""What could go wrong with passes captured as CUDA graphs, each compared with eager passes of the same tiny models."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from specctl.decoding.composition import build_drafter
from specctl.decoding.session import Session
from specctl.decoding.warming import warm_up
from specctl.models.placing.engine_table import build_runner
from specctl.models.running.engines import EngineSettings
from specctl.models.running.pair import Pair
from specctl.models.running.slot import Slot
from specctl.policies import Setting
from specctl.profile.schema import SamplingTable
from tools.gpu_report.record import Recorder
from tools.gpu_report.stage import Cards, Stage
from tools.synthetic.shapes import Dials, Shape
from tools.synthetic.weights import build_pair
from tools.synthetic_pair import tokenizer

SHAPES = Shape(3, 64, 8, 4, 160, 512, 4096), Shape(1, 32, 4, 2, 96, 512, 4096)
"""A tiny pair whose context is longer than buffers are at first."""
PLACES = (("cuda:1", "cuda:1"), ("cuda:0", "cuda:1"), ("cuda:1", "cuda:0"))
"""Of target and draft, where one at least is not on the current card."""
LATE = 0.1
"""Seconds by which a round exceeds usual ones only if something is captured in it, which takes longer."""
SPECULATING = Setting.of({"name": "constant", "draft_length": 4})


@dataclass(frozen=True, slots=True)
class Tiny:
    """The tiny pair on some devices.

    Attributes:
        models: target and draft.
        heard: notices of its runners.
    """

    models: tuple[PreTrainedModel, PreTrainedModel]
    heard: list[str]

    @classmethod
    def on(cls, cards: Cards, *devices: str) -> "Tiny":
        large, small = build_pair(*SHAPES, Dials(damping=0.1))
        return cls((cards.put(large, devices[0]), cards.put(small, devices[1])), [])

    def pair(self, engine: str) -> Pair:
        """Runners of an engine over the models."""
        settings: Any = EngineSettings(engine=engine, notice=self.heard.append)  # type: ignore[arg-type]
        size = SHAPES[0].vocabulary
        target, draft = (
            build_runner(model, size, name, settings)
            for model, name in zip(self.models, ("target", "draft"), strict=True)
        )
        return Pair(target, (draft,), tokenizer(size), frozenset(), SHAPES[0].context, self.models, ({},))


def text(pair: Pair, prompt: Sequence[int], tokens: int, *, drafts: bool = True) -> tuple[int, ...]:
    """What a pair writes greedily."""
    drafter = build_drafter(pair, SPECULATING) if drafts else None
    return Session(pair, drafter).generate(prompt, SamplingTable(max_new_tokens=tokens)).tokens


def second_card(to: Recorder, stage: Stage) -> None:
    """Target, draft or both on another card than the current one: a graph of nothing would replay old results."""
    prompt = stage.prompt(30)
    for places in PLACES:
        where = f"target on {places[0]}, draft on {places[1]}"
        with stage.cards(2) as cards:  # each time anew, for a capture that fails may leave its stream current
            if cards.count < 2:
                to.note("there is one card only, so captures on a second one were not tried")
                return
            stream = torch.cuda.current_stream()
            tiny = Tiny.on(cards, *places)
            wanted, graph = text(tiny.pair("eager"), prompt, 24), tiny.pair("graph")
            _writes(to, f"{where}: captured passes write what eager ones write", graph, prompt, 24, wanted)
            _captured(to, where, graph, tiny)
            torch.cuda.set_stream(stream)


def failed_capture(to: Recorder, stage: Stage) -> None:
    """A pass that waits for the device cannot be captured; what runs afterwards must not notice."""
    with stage.cards() as cards:
        tiny = Tiny.on(cards, "cuda:0", "cuda:0")
        prompt = stage.prompt(30)
        wanted = text(tiny.pair("eager"), prompt, 24)
        stream = torch.cuda.current_stream()
        hook = tiny.models[0].model.norm.register_forward_hook(lambda _, __, made: made + 0 * float(made.sum().item()))
        spoilt = tiny.pair("graph")
        _writes(to, "a target that cannot be captured writes its eager text", spoilt, prompt, 24, wanted)
        hook.remove()
        said = "; ".join(tiny.heard) or "nothing was said"
        to.check(
            "it is told why it runs uncaptured", bool(tiny.heard) and "previous error during capture" not in said, said
        )
        to.check("the stream is what it was", torch.cuda.current_stream() == stream)
        _works(to, "memory can be given back", torch.cuda.empty_cache)
        _works(to, "the default generator draws", lambda: torch.rand(3, device="cuda:0").tolist())
        tiny.heard.clear()
        after = tiny.pair("graph")
        _writes(to, "the next capture writes what eager passes write", after, prompt, 24, wanted)
        _captured(to, "after the failure", after, tiny)


def growth(to: Recorder, stage: Stage) -> None:
    """The target's buffers grow while the draft's graphs stay, and the other way round."""
    with stage.cards() as cards:
        tiny = Tiny.on(cards, "cuda:0", "cuda:0")
        eager, graph = tiny.pair("eager"), tiny.pair("graph")
        short, long = stage.prompt(40), stage.prompt(1500)
        steps = {
            "a pair on a short text": (short, 24, True),
            "the target alone on 1,500 tokens": (long, 8, False),
            "the pair again": (short, 24, True),
            "the pair on 1,500 tokens": (long, 16, True),
            "the pair once more": (short, 24, True),
        }
        for claim, (prompt, tokens, drafts) in steps.items():
            wanted = text(eager, prompt, tokens, drafts=drafts)
            claim = f"{claim}: captured passes write what eager ones write"
            _writes(to, claim, graph, prompt, tokens, wanted, drafts=drafts)
        _captured(to, "after all of them", graph, tiny)


def late_captures(to: Recorder, stage: Stage) -> None:
    """How much is captured after the warm-up, when requests are timed already."""
    with stage.cards(timed=True) as cards:
        tiny = Tiny.on(cards, "cuda:0", "cuda:0")
        pair = tiny.pair("graph")
        settings = SamplingTable(max_new_tokens=24)
        warm_up(pair, settings, longest=SPECULATING.longest_draft)
        before = pair.target.preparing_seconds or 0.0, pair.drafts[0].preparing_seconds or 0.0
        rounds = []
        for length in (20, 45, 90, 260, 300, 520):
            done = Session(pair, build_drafter(pair, SPECULATING)).generate(stage.prompt(length), settings)
            rounds.append(max(round_.total_seconds for round_ in done.rounds))
        after = pair.target.preparing_seconds or 0.0, pair.drafts[0].preparing_seconds or 0.0
        spent = sum(after) - sum(before)
        usual = min(rounds)
        to.row("After the warm-up", **{"capturing ms": spent * 1e3, "slowest round ms": max(rounds) * 1e3})
        told = f"slowest round {max(rounds) * 1e3:.1f} ms, slowest of the best request {usual * 1e3:.1f} ms"
        to.check("no round's time has a capture in it", max(rounds) - usual <= LATE, told)


def _writes(
    to: Recorder,
    claim: str,
    pair: Pair,
    prompt: Sequence[int],
    tokens: int,
    wanted: Sequence[int],
    *,
    drafts: bool = True,
) -> None:
    """Check what a pair writes; an error of the device is a claim that does not hold, and what comes after it runs."""
    try:
        found = text(pair, prompt, tokens, drafts=drafts)
    except RuntimeError as error:
        to.check(claim, False, str(error).splitlines()[0])
        return
    place = next((i for i, (a, b) in enumerate(zip(found, wanted, strict=True)) if a != b), None)
    to.check(claim, place is None, "" if place is None else f"token {place} is another")


def _captured(to: Recorder, when: str, pair: Pair, tiny: Tiny) -> None:
    """Passes were captured, so that the comparison before was one of captured passes."""
    runners: tuple[Slot, ...] = (pair.target, *pair.drafts)
    held = all(runner.preparing_seconds is not None for runner in runners)
    to.check(f"{when}: passes are captured still", held, "; ".join(tiny.heard))


def _works(to: Recorder, claim: str, work: Any) -> None:
    try:
        work()
    except RuntimeError as error:
        to.check(claim, False, str(error).splitlines()[0])
    else:
        to.check(claim, True)
