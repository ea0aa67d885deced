"""A device that compares a signal itself leaves out the step behind a stop, and what is said stays the same."""

from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from pretend_cuda import Devices
from pretend_cuda.captures import BranchingCUDAGraph
from pretend_cuda.pairs import TEXT, VOCABULARY, Written, on, pair_on, rounds_of, runner_of, tiny_model

from specctl.decoding.drafters import ModelDrafter
from specctl.decoding.sampling import Sampling
from specctl.decoding.session import Session
from specctl.decoding.warming import warm_up
from specctl.models.running.engines import EngineSettings, build_runner, note_idle_stops
from specctl.models.running.graph import Capturing
from specctl.policies import POLICIES
from specctl.policies.svip import Svip
from specctl.profile.schema import SamplingTable
from specctl.records import StopReason

SAMPLINGS = {"greedy": Sampling(), "T=1": Sampling(1.0)}
# Thresholds that stop at some tokens of the tiny model.
STOPPING: dict[str, dict[str, Any]] = {
    "svip": {"c": 1.0, "threshold": 2.0377},
    "adaedl": {"threshold": 0.08871, "gamma": 0.2, "eps": 0.0},
    "max-confidence": {"threshold": 0.03, "eps": 0.001},
    "self-verify": {},
}


class Said(NamedTuple):
    """What a pair wrote, how many steps its draft left out, and what was noted."""

    rounds: list[Written]
    left_out: int
    notices: list[str]


def said(policy: str, sampling: Sampling, *, stops: bool, version: tuple[int, int] = (2, 13)) -> Said:
    notices: list[str] = []
    with Devices(torch_like=version) as cuda, torch.inference_mode():
        target = runner_of("graph", on(cuda, tiny_model(2), "cuda:0"))
        model = on(cuda, tiny_model(1), "cuda:0")
        draft = runner_of("graph", model, notices.append, "the draft", stop_on_device=stops)
        assert isinstance(draft, Capturing)
        drafter = ModelDrafter(draft, POLICIES[policy](**STOPPING[policy]))
        with patch("specctl.decoding.lead.Lead.pays", lambda _, __: False):
            rounds = rounds_of(target, drafter, 30, sampling)
        return Said(rounds, sum(one.left_out for one in cuda.captures), notices)


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("policy", STOPPING)
def test_the_text_is_the_same_and_steps_behind_a_stop_are_left_out(policy: str, sampling: str) -> None:
    usual, found = (said(policy, SAMPLINGS[sampling], stops=stops) for stops in (False, True))
    assert found.rounds == usual.rounds
    assert not usual.left_out
    # A stop at the last token that a round may have is followed by no step.
    stopped = sum(stop is StopReason.POLICY for *_, stop in usual.rounds)
    assert stopped
    assert stopped - 1 <= found.left_out <= stopped
    assert not found.notices


def test_a_torch_without_conditional_nodes_says_so_and_goes_on() -> None:
    usual, found = (said("svip", Sampling(1.0), stops=stops, version=(2, 11)) for stops in (False, True))
    assert found.rounds == usual.rounds
    assert not found.left_out
    assert len(found.notices) == 1
    assert found.notices[0].startswith("the draft does not stop on the device: this torch has no conditional nodes")


def refuse(_: BranchingCUDAGraph, __: torch.Tensor) -> None:
    raise RuntimeError("CUDA Graphs conditional nodes are not supported for cuda version < 12.4")


def test_a_driver_without_conditional_nodes_says_so_and_goes_on() -> None:
    usual = said("svip", Sampling(1.0), stops=False)
    with patch.object(BranchingCUDAGraph, "begin_capture_to_if_node", refuse):
        found = said("svip", Sampling(1.0), stops=True)
    assert found.rounds == usual.rounds
    assert found.notices == [
        "the draft does not stop on the device: CUDA Graphs conditional nodes are not supported for cuda version < 12.4"
    ]


@pytest.mark.parametrize("engine", ["eager", "graph"])
def test_where_no_draft_can_stop_on_its_device_it_says_so(engine: Any) -> None:
    notices: list[str] = []
    settings = EngineSettings(engine=engine, notice=notices.append, stop_on_device=True)
    with Devices() as cuda:
        draft = build_runner(on(cuda, tiny_model(1), "cuda:0"), VOCABULARY, "the draft", settings)
        note_idle_stops([draft], settings)
    said = "stop_on_device has no effect: it takes a draft model on the graph engine"
    assert notices == ([said] if engine == "eager" else [])


class Contrary(Svip):
    """Lets the device leave out just those steps that it wants."""

    @property
    def bounds(self) -> Any:
        return super().bounds._replace(least=super().bounds.most, most=float("inf"))


def test_a_step_that_was_left_out_and_is_wanted_is_done_then(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = said("svip", Sampling(1.0), stops=False)
    monkeypatch.setitem(POLICIES, "svip", Contrary)  # type: ignore[attr-defined]
    found = said("svip", Sampling(1.0), stops=True)
    assert found.rounds == usual.rounds
    assert found.left_out > 3


def test_such_steps_are_captured_before_a_run() -> None:
    with Devices() as cuda, torch.inference_mode():
        pair = pair_on(
            cuda, "cuda:0", "cuda:0", engine="graph", kinds=(tiny_model(), tiny_model()), stop_on_device=True
        )
        settings = SamplingTable(max_new_tokens=24, temperature=1.0)
        warm_up(pair, settings, longest=4)
        before = len(cuda.captures)
        for policy in (Svip(2.0377, 1.0, max_draft=4), POLICIES["max-confidence"](max_draft=4, threshold=0.03)):
            Session(pair, ModelDrafter(pair.drafts[0], policy)).generate(TEXT[:80], settings)
        assert len(cuda.captures) == before
        assert sum(one.left_out for one in cuda.captures)
