"""What rounds and prompts are said to take, where the host runs ahead of a slow device and captures take long."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from specctl.decoding.drafters import ModelDrafter
from specctl.decoding.loop import decode
from specctl.decoding.round import prefill
from specctl.decoding.sampling import Sampling
from specctl.decoding.session import Session
from specctl.decoding.warming import warm_up
from specctl.models.loading.draft_heads import build_head_runner
from specctl.models.running.engines import EngineSettings
from specctl.policies.published import Constant
from specctl.profile.schema import SamplingTable
from tests.support.pretend_cuda import Costs, Devices
from tests.support.pretend_cuda.pairs import HEADS, TEXT, VOCABULARY, pair_on, tiny_model, unexpected
from tests.support.toys import random_model

CLOCK = ("specctl.models.passes.preparation_time",)
pytestmark = pytest.mark.usefixtures("inference_mode")


@pytest.mark.parametrize("devices", [("cuda:0",), ("cuda:0", "cuda:1")], ids="-".join)
def test_the_prompts_time_is_the_devices_time(devices: tuple[str, ...]) -> None:
    slow = Costs(call=1e-6, kernel=1e-4)  # a device far behind its host
    with Devices(2, clock=CLOCK, costs=slow) as cuda:
        pair = pair_on(cuda, *devices)
        drafter = ModelDrafter(pair.drafts[0], Constant(2)) if pair.drafts else None
        done = Session(pair, drafter).generate(TEXT[:200], SamplingTable(max_new_tokens=7))
        first, *later = done.rounds
        assert done.prefill_seconds > 0.5 * later[0].verify_seconds
        for phase in ("verify_seconds", "draft_seconds"):
            usual = max(getattr(round_, phase) / max(1, round_.drafted) for round_ in later)
            assert getattr(first, phase) / max(1, first.drafted) <= 1.1 * usual


def test_no_capture_is_in_a_rounds_time() -> None:
    with Devices(clock=CLOCK, costs=Costs(capture=1000.0)) as cuda:
        pair = pair_on(cuda, "cuda:0", "cuda:0", engine="graph")
        session = Session(pair, ModelDrafter(pair.drafts[0], Constant(3)))
        done = session.generate(TEXT[:30], SamplingTable(max_new_tokens=9))
        assert cuda.captures
        assert pair.preparing_seconds is not None
        assert done.total_seconds < 10
        assert all(round_.total_seconds < 10 for round_ in done.rounds)


def test_what_a_run_replays_is_captured_before_it() -> None:
    """The widths of all drafts that the policy may ask for, and the spans of a text that grows beyond the first."""
    with Devices() as cuda:
        pair = pair_on(cuda, "cuda:0", "cuda:0", engine="graph", kinds=(tiny_model(), tiny_model()))
        settings = SamplingTable(max_new_tokens=12, temperature=1.0)
        warm_up(pair, settings, longest=4)
        before = len(cuda.captures)
        session = Session(pair, ModelDrafter(pair.drafts[0], Constant(4)))
        for length in (20, 250):
            session.generate(TEXT[:length], settings)
        assert len(cuda.captures) == before
        assert before <= 2 * (5 + 3)  # two spans; five widths of the target, and of the draft one, its reader and two


@pytest.mark.parametrize("make", HEADS.values(), ids=HEADS)
@pytest.mark.representatives(slow=("block",))
def test_what_a_draft_head_replays_is_captured_before_it(make: Callable[[], Any]) -> None:
    """A head reads again what was accepted: any number of tokens from one to a whole draft and the target's token."""
    with Devices() as cuda:
        pair = pair_on(cuda, "cuda:0", engine="graph", kinds=(random_model("llama"),))
        settings = EngineSettings(engine="graph", notice=unexpected)
        head = build_head_runner(cuda.move(make(), "cuda:0"), VOCABULARY, "the head", settings)
        assert head.reads_states
        pair.target.watch(head.layers)
        pair = replace(pair, drafts=(head,), named_predictors=({},))
        sampling = SamplingTable(max_new_tokens=24, temperature=1.0)
        warm_up(pair, sampling, longest=3)
        before = len(cuda.captures)
        done = Session(pair, ModelDrafter(head, Constant(3))).generate(TEXT[:80], sampling)
        assert {round_.accepted for round_ in done.rounds} > {0, 1}
        assert len(cuda.captures) == before


def test_a_prompt_is_waited_for_once_and_a_round_twice_at_most() -> None:
    with Devices(2) as cuda:
        target, draft = pair_on(cuda, "cuda:0", "cuda:1").target, pair_on(cuda, "cuda:1", "cuda:1").drafts[0]
        drafter = ModelDrafter(draft, Constant(3))
        prefill(target, drafter, TEXT[:20])
        assert cuda.ledger.tally().waits == 0
        draws = torch.Generator("cuda:0").manual_seed(0)
        rounds = decode(target, drafter, TEXT[:20], 12, Sampling(1.0), frozenset(), draws)
        next(rounds)
        cuda.ledger.clear()
        round_ = next(rounds)
        assert cuda.ledger.tally().waits == round_.drafted + 1
