"""Where a device would stand idle while the host asks the policy, the next draft step runs; nothing else changes."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from unittest.mock import patch

import pytest
import torch
from transformers import PreTrainedModel

from specctl.decoding.drafters import ModelDrafter
from specctl.decoding.sampling import Sampling
from specctl.decoding.steps_ahead import Lead
from specctl.models.running.graph import Capturing
from specctl.policies import StoppingPolicy
from specctl.policies.published import Constant, Svip
from tests.support.pretend_cuda import Costs, Devices
from tests.support.pretend_cuda.clock import Clock
from tests.support.pretend_cuda.pairs import TEXT, on, rounds_of, runner_of, tiny_model

CLOCKED = ("specctl.models.passes.preparation_time",)
SLOW_STEPS = Costs(node=8e-6)
"""A step of the tiny draft takes the device longer than the host needs for a token, as one of a real draft does."""
NEVER, ALWAYS = (lambda _, __: False), (lambda _, __: True)


@cache
def model(layers: int) -> PreTrainedModel:
    return tiny_model(layers)


def going_on(longest: int = 8) -> Svip:
    """A policy that is asked about every token and never stops."""
    return Svip(threshold=100.0, max_draft=longest)


def stopping(longest: int = 8) -> Svip:
    """A policy that stops after the first token."""
    return Svip(threshold=0.0, max_draft=longest)


def drafter_on(cuda: Devices, policy: StoppingPolicy, device: str = "cuda:0") -> ModelDrafter:
    return ModelDrafter(runner_of("graph", on(cuda, model(1), device)), policy)


def measured_draft(cuda: Devices, drafter: ModelDrafter, sampling: Sampling) -> int:
    """Draft behind a text, everything captured; the ledger then has this draft alone. Gives the number of tokens."""
    with torch.inference_mode():
        drafter.runner.extend(TEXT[:20], keep=0)
        drafter.begin(sampling, frozenset(), torch.Generator("cuda:0").manual_seed(3))
        for _ in range(2):
            drafter.rollback(20)
            cuda.synchronize()
            cuda.ledger.clear()
            draft = drafter.draft(TEXT[:21], 30)
        return len(draft.tokens)


@contextmanager
def idle_between_replays(cuda: Devices) -> Iterator[list[float]]:
    """How long the device stands idle before each thing that it is given behind a first replay, up to the last."""
    found: list[float] = []
    since: list[float] = []
    work, replayed = Clock.work, False

    def noted(clock: Clock, device: torch.device, seconds: float) -> None:
        nonlocal replayed
        since.append(max(0.0, clock.now - clock.busy[device]))
        if cuda.ledger.events[-1].kind == "replay":
            found.extend(since if replayed else ())
            since.clear()
            replayed = True
        work(clock, device, seconds)

    with patch.object(Clock, "work", noted):
        yield found


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0)], ids=["greedy", "T=1"])
def test_a_policy_that_reads_nothing_waits_once_for_a_draft(sampling: Sampling) -> None:
    waits = {}
    for policy in (Constant(6), going_on(6)):
        with Devices() as cuda:
            assert measured_draft(cuda, drafter_on(cuda, policy), sampling) == 6
            events = cuda.ledger.done()
            waits[type(policy)] = sum(event.kind == "wait" for event in events)
            assert [event.what for event in events if event.kind == "down"] == ["to pinned memory"] * 6
            assert sum(event.kind == "up" for event in events) == 6, "positions and what a draw needs"
            assert sum(event.kind == "replay" for event in events) == 6
    assert waits == {Constant: 1, Svip: 6}


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0)], ids=["greedy", "T=1"])
def test_the_device_is_never_idle_within_a_draft(sampling: Sampling) -> None:
    """By the measured times, without being told to."""
    idle = {}
    for pays in (None, NEVER):
        with Devices(clock=CLOCKED, costs=SLOW_STEPS) as cuda, ExitStack() as stack:
            if pays is not None:
                stack.enter_context(patch.object(Lead, "pays", pays))
            drafter = drafter_on(cuda, going_on(5))
            measured_draft(cuda, drafter, sampling)
            for place in range(1, 5):  # as after some rounds more
                for _ in range(60):
                    drafter._steps.lead.decided(place, stopped=False)
            drafter.rollback(20)
            with torch.inference_mode(), idle_between_replays(cuda) as found:
                drafter.draft(TEXT[:21], 30)
            idle[pays] = sum(found)
    assert idle[None] == 0
    assert idle[NEVER] > 4 * 20e-6


def test_a_step_is_not_started_where_the_round_mostly_ends() -> None:
    with Devices(clock=CLOCKED, costs=SLOW_STEPS) as cuda:
        drafter = drafter_on(cuda, going_on(3))
        measured_draft(cuda, drafter, Sampling())
        drafter.policy = stopping()
        for _ in range(3):
            measured_draft(cuda, drafter, Sampling())
        assert sum(event.kind == "replay" for event in cuda.ledger.done()) == 1


@pytest.mark.parametrize(
    ("policy", "sampling"),
    [(Constant(4), Sampling()), (Constant(4), Sampling(1.0)), (Svip(c=1.0, threshold=2.0377), Sampling(1.0))],
    ids=["constant, greedy", "constant, T=1", "svip, T=1"],
)
@pytest.mark.representatives(slow=("svip, T=1",))
def test_rounds_are_the_same(policy: StoppingPolicy, sampling: Sampling) -> None:
    """Numbers that are read before they have arrived, or memory that is used again too early, would show."""
    found = []
    for runs_ahead in (False, True):
        ahead = patch.object(Lead, "pays", ALWAYS) if runs_ahead else patch.object(Capturing, "runs_ahead", False)
        with Devices(clock=CLOCKED) as cuda, torch.inference_mode(), ahead:
            target, drafter = runner_of("graph", on(cuda, model(2), "cuda:0")), drafter_on(cuda, policy)
            found.append(rounds_of(target, drafter, 10, sampling))
    assert found[0] == found[1]
    assert isinstance(policy, Constant) or len({len(steps) for steps, *_ in found[0]}) > 1
