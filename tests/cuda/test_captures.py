"""The graph engine on pretended devices: what a capture holds, what it must not, and what it outlives."""

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from specctl.decoding.logits.token_sampler import TokenSampler
from specctl.decoding.sampling import Sampling
from specctl.models.loading.draft_heads import build_head_runner
from specctl.models.running.eager import EagerPasses
from specctl.models.running.engines import EngineSettings
from specctl.models.running.graph import Capturing
from specctl.models.running.slot import Slot
from tests.support.pretend_cuda import Devices
from tests.support.pretend_cuda.pairs import TEXT, VOCABULARY, chain_head, on, runner_of, tiny_model, unexpected
from tests.support.toys import random_model

MODEL = tiny_model()


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def graph(devices: Devices, device: str = "cuda:0", heard: list[str] | None = None) -> Slot:
    runner = runner_of("graph", on(devices, MODEL, device), None if heard is None else heard.append)
    assert isinstance(runner.passes, Capturing)
    return runner


def read(runner: Slot, length: int, widths: tuple[int, ...] = (1, 3, 1)) -> list[list[int]]:
    """What a runner makes of a text of that length and of some more tokens after it."""
    runner.rollback(0)
    runner.extend(TEXT[:length], keep=0)
    return [
        runner.extend(TEXT[runner.length : runner.length + width], keep=width).logits.argmax(-1).tolist()
        for width in widths
    ]


@pytest.mark.parametrize("device", ["cuda:0", "cuda:1"])
def test_a_graph_is_captured_on_the_models_device(device: str) -> None:
    with Devices(2) as cuda:
        heard: list[str] = []
        runner, eager = graph(cuda, device, heard), Slot(EagerPasses(on(cuda, MODEL, device), VOCABULARY))
        for length in (30, 40):
            assert read(runner, length) == read(eager, length)
        assert heard == []
        assert {one.stream.device for one in cuda.captures} == {torch.device(device)}
        assert all(one.replays for one in cuda.captures)


def test_no_runner_shares_anothers_stream_pool_or_workspace() -> None:
    with Devices() as cuda:
        runners = [graph(cuda) for _ in range(2)]
        for runner in runners:
            read(runner, 30)
        assert len({one.stream for one in cuda.captures}) == len({one.pool for one in cuda.captures}) == 2
        # What lies in a pool is written by every graph of it, and goes with it.
        assert [workspace.pool for workspace in cuda.memory.workspaces.values()] == [None] * 3


@pytest.mark.parametrize("version", [(2, 11), (2, 13)], ids=str)
@pytest.mark.representatives("(2, 13)")
def test_graphs_outlive_the_growth_of_buffers_and_other_models_graphs(version: tuple[int, int]) -> None:
    with Devices(torch_like=version) as cuda:
        heard: list[str] = []
        runners, eager = (
            [graph(cuda, heard=heard) for _ in range(2)],
            Slot(EagerPasses(on(cuda, MODEL, "cuda:0"), VOCABULARY)),
        )
        for which, length in ((0, 30), (1, 30), (0, 600), (1, 40), (1, 600), (0, 30)):
            assert read(runners[which], length) == read(eager, length)
        assert heard == []


def test_graphs_may_go_while_what_they_made_is_held() -> None:
    """As the numbers of a draft step are, which are read before the next replay and not copied."""
    with Devices() as cuda:
        heard: list[str] = []
        runner, eager = graph(cuda, heard=heard), Slot(EagerPasses(on(cuda, MODEL, "cuda:0"), VOCABULARY))
        held = []
        for length in (30, 600):
            runner.rollback(0)
            runner.extend(TEXT[:length], keep=0)
            held.append(runner.sample([TEXT[length]], TokenSampler(Sampling()), None))
        assert read(runner, 30) == read(eager, 30)
        assert heard == []


FILTERS = [{"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1}, {"typical_p": 0.8}, {"epsilon_cutoff": 0.01}]
FILTERS += [{"eta_cutoff": 0.01}, {"top_h": 0.8}]


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_a_draft_step_is_captured_whatever_leaves_tokens_out(filters: dict[str, Any]) -> None:
    with Devices() as cuda:
        heard: list[str] = []
        runner = graph(cuda, heard=heard)
        runner.extend(TEXT[:30], keep=0)
        for place in (30, 31):
            runner.sample([TEXT[place]], TokenSampler(Sampling(0.8, **filters), tops=True), 0.5)
        assert heard == []
        assert any(one.replays for one in cuda.captures)


def waiting(devices: Devices) -> tuple[Slot, list[str]]:
    """A runner whose model reads a number in its forward pass, as a routed expert or a dynamic RoPE may."""
    heard: list[str] = []
    model = on(devices, MODEL, "cuda:0")
    model.register_forward_pre_hook(lambda *_: (torch.zeros(1, device="cuda:0").item(), None)[1])
    runner = runner_of("graph", model, heard.append, "the draft")
    assert isinstance(runner.passes, Capturing)
    return runner, heard


@pytest.mark.parametrize("version", [(2, 11), (2, 13)], ids=str)
def test_what_waits_is_not_captured_and_leaves_nothing_behind(version: tuple[int, int]) -> None:
    with Devices(torch_like=version) as cuda:
        runner, heard = waiting(cuda)
        read(runner, 30)
        assert heard == ["the draft runs uncaptured from here on: called a synchronizing CUDA operation"]
        assert torch.cuda.current_stream().number == 0
        assert torch.cuda.get_sync_debug_mode() == 0
        torch.cuda.empty_cache()  # the allocator believes in no capture
        other = graph(cuda)
        read(other, 30)
        assert other.preparing_seconds is not None


@pytest.mark.parametrize("version", [(2, 11), (2, 13)], ids=str)
def test_a_capture_that_fails_in_the_middle_leaves_nothing_behind(version: tuple[int, int]) -> None:
    """As one does that waits where torch does not see it coming."""
    with Devices(torch_like=version) as cuda:
        heard: list[str] = []
        model = on(cuda, MODEL, "cuda:0")

        def only_captured(*_: object) -> None:
            if cuda.capturing is not None:
                raise cuda.capturing.refuse("a kernel of its own")

        model.register_forward_pre_hook(only_captured)
        runner = runner_of("graph", model, heard.append, "the draft")
        assert isinstance(runner.passes, Capturing)
        read(runner, 30)
        expected = (
            "the draft runs uncaptured from here on: CUDA error: operation not permitted when stream is capturing"
        )
        assert heard == [expected]
        assert torch.cuda.current_stream().number == 0
        torch.cuda.empty_cache()
        other = graph(cuda)
        read(other, 30)
        assert other.preparing_seconds is not None


@pytest.mark.parametrize("failing", range(4), ids=["keys 0", "values 0", "keys 1", "values 1"])
@pytest.mark.parametrize("engine", ["static", "graph"])
@pytest.mark.representatives("static-values 0", slow=("graph-keys 1",))
def test_memory_that_runs_out_while_buffers_grow_leaves_the_next_record_right(engine: str, failing: int) -> None:
    """At the keys or values of the first or second layer."""
    two_layers = tiny_model(2)
    with Devices() as cuda:
        model = on(cuda, two_layers, "cuda:0")
        eager = Slot(EagerPasses(model, VOCABULARY))
        short, long = read(eager, 20), read(eager, 540)
        runner = runner_of(engine, model)
        assert read(runner, 20) == short
        runner.rollback(0)
        cuda.memory.counts(least=540 * 2 * 8 * 4, left=failing)
        with pytest.raises(torch.OutOfMemoryError):
            runner.extend(TEXT[:540], keep=0)
        cuda.memory.counts(least=1 << 60)
        assert read(runner, 20) == short
        assert read(runner, 540) == long
        assert not isinstance(runner.passes, Capturing) or runner.preparing_seconds is not None


def test_errors_that_capturing_does_not_cause_are_raised() -> None:
    with Devices() as cuda:
        heard: list[str] = []
        model = on(cuda, MODEL, "cuda:0")

        def runs_out(*_: object) -> None:
            if cuda.capturing is not None:
                raise torch.OutOfMemoryError("CUDA out of memory.")

        hook = model.register_forward_pre_hook(runs_out)
        runner = runner_of("graph", model, heard.append)
        with pytest.raises(torch.OutOfMemoryError):
            read(runner, 30)
        hook.remove()
        assert read(runner, 30) == read(Slot(EagerPasses(on(cuda, MODEL, "cuda:0"), VOCABULARY)), 30)
        assert heard == []
        assert any(one.replays for one in cuda.captures)


def test_a_prompt_is_not_captured() -> None:
    with Devices() as cuda:
        runner = graph(cuda)
        for length in (3, 9, 40):
            runner.rollback(0)
            runner.extend(TEXT[:length], keep=0)
        assert cuda.captures == []


@pytest.mark.slow
def test_a_prompt_of_a_draft_head_is_not_captured() -> None:
    with Devices() as cuda:
        settings = EngineSettings(engine="graph", notice=unexpected)
        head = build_head_runner(cuda.move(chain_head(), "cuda:0"), VOCABULARY, "the head", settings)
        assert head.reads_states
        head.observe_states(0, {layer: torch.zeros(40, 32, device="cuda:0") for layer in head.layers})
        for length in (3, 9, 40):
            head.rollback(0)
            head.extend(TEXT[:length], keep=0)
        assert cuda.captures == []


def test_readers_of_many_temperatures_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specctl.models.running.graph.READERS", 2)
    with Devices() as cuda:
        runner = graph(cuda)
        runner.extend(TEXT[:20], keep=0)
        most = 0
        for step in range(4):
            runner.rollback(20)
            runner.sample([3], TokenSampler(Sampling(1 + step / 100)), 0.5)
            runner.rollback(20)
            runner.extend(TEXT[20:22], keep=2)
            most = max(most, len(runner.passes._captured))
        assert most == 2 + 1  # with the pass that no reader belongs to


def test_a_capture_waits_nowhere() -> None:
    with Devices() as cuda:
        model = on(cuda, random_model("llama"), "cuda:0")
        runner = runner_of("graph", model)
        read(runner, 30, (1, 2, 5))
        recorded = [event for event in cuda.ledger.events if event.recorded]
        assert recorded
        assert {event.kind for event in recorded} == {"kernel"}
