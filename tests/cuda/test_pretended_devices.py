"""The pretended devices refuse what a device would refuse, and do silently what it would do silently."""

import pytest
import torch

from tests.support.pretend_cuda import Costs, Devices, Tally


def test_tensors_of_two_devices_do_not_meet() -> None:
    with Devices(2):
        one, other = (torch.ones(3, device=f"cuda:{index}") for index in range(2))
        with pytest.raises(RuntimeError, match="same device"):
            one + other
        with pytest.raises(RuntimeError, match="same device"):
            one + torch.ones(3)
        with pytest.raises(RuntimeError, match="generator"):
            torch.rand(3, device="cuda:1", generator=torch.Generator("cuda:0"))
        assert (one + other.to("cuda:0")).tolist() == [2.0] * 3


def test_what_waits_is_counted() -> None:
    with Devices() as cuda:
        given = torch.tensor([1, 2, 3], device="cuda:0")  # from memory that is not pinned
        assert cuda.ledger.tally() == Tally(launches=0, copies=1, waits=1)
        doubled = given * 2
        assert doubled.sum().item() == 12
        assert cuda.ledger.tally() == Tally(launches=2, copies=2, waits=2)
        torch.tensor([1.0]).pin_memory()[None].to("cuda:0", non_blocking=True)
        assert cuda.ledger.tally() == Tally(launches=2, copies=3, waits=2)


def test_pinned_memory_is_not_written_while_it_is_copied() -> None:
    with Devices() as cuda:
        held = torch.zeros(4).pin_memory()
        there = torch.empty(4, device="cuda")
        there.copy_(held, non_blocking=True)
        held.fill_(1)
        with pytest.raises(RuntimeError, match="race"):
            cuda.synchronize()


def test_a_number_fetched_without_waiting_is_there_after_its_event() -> None:
    with Devices():
        place = torch.zeros(1).pin_memory()
        place.copy_(torch.ones(1, device="cuda"), non_blocking=True)
        fetched = torch.cuda.Event()
        fetched.record()
        assert place.item() == 0
        fetched.synchronize()
        assert place.item() == 1


def test_streams_that_do_not_wait_race() -> None:
    with Devices():
        usual, other = torch.cuda.current_stream(), torch.cuda.Stream()
        with torch.cuda.stream(other):
            made = torch.ones(2, device="cuda") * 2
        with pytest.raises(RuntimeError, match="race"):
            made + 1
        usual.wait_stream(other)
        assert (made + 1).tolist() == [3.0, 3.0]


def captured(given: torch.Tensor, device: str = "cuda:0") -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream(torch.device(device))):
        result = given * 2
    return graph, result


def test_a_capture_records_and_a_replay_computes() -> None:
    with Devices() as cuda:
        given = torch.ones(2, device="cuda")
        graph, result = captured(given)
        assert torch.isnan(result).all()
        given.fill_(4)
        cuda.ledger.clear()
        graph.replay()
        assert result.tolist() == [8.0, 8.0]
        assert cuda.ledger.tally() == Tally(launches=1, copies=1, waits=1)


def test_a_wait_ends_a_capture() -> None:
    with Devices():
        given = torch.ones(2, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with pytest.raises(RuntimeError, match="previous error"), torch.cuda.graph(graph):
            given.sum().item()


def test_work_of_another_device_is_not_captured() -> None:
    with Devices(2):
        given = torch.ones(2, device="cuda:1")
        with pytest.warns(UserWarning, match="Graph is empty"):
            graph, result = captured(given, "cuda:0")
        given.fill_(4)
        graph.replay()
        assert result.tolist() == [2.0, 2.0]  # as it was when it was not captured


def test_memory_given_back_is_missed() -> None:
    with Devices():
        given = torch.ones(2, device="cuda")
        graph, _ = captured(given)
        del given
        with pytest.raises(RuntimeError, match="use after free"):
            graph.replay()


def test_a_destroyed_graph_takes_its_streams_workspace_along() -> None:
    with Devices():
        weight = torch.ones(2, 2, device="cuda")
        stream = torch.cuda.Stream()
        graphs = [torch.cuda.CUDAGraph() for _ in range(2)]
        for graph in graphs:
            with torch.cuda.graph(graph, stream=stream):
                weight.mm(weight)
        graphs[0].reset()
        with pytest.raises(RuntimeError, match="workspace"):
            graphs[1].replay()


def test_memory_runs_out_when_it_is_told_to() -> None:
    with Devices() as cuda:
        cuda.memory.counts(least=1024, left=1)
        small, large = torch.empty(4, device="cuda"), torch.empty(1024, device="cuda")
        with pytest.raises(torch.OutOfMemoryError):
            large.clone()
        assert small.clone().shape == large[:4].clone().shape


def test_the_host_runs_ahead_until_it_waits() -> None:
    with Devices(costs=Costs(call=1.0, kernel=10.0, wait=0.0)) as cuda:
        ones = torch.ones(3, device="cuda")
        for _ in range(3):
            ones = ones * 2
        assert cuda.clock.now == pytest.approx(4.0, abs=0.1)
        cuda.synchronize()
        assert cuda.clock.now == pytest.approx(41.0, abs=0.1)


def test_shapes_alone_are_answered_for() -> None:
    with Devices(shapes_only=True) as cuda:
        cuda.answers = lambda tensor: torch.full(tensor.shape, 7, dtype=tensor.dtype)
        weight = cuda.put(torch.empty(4, 4, device="meta"), "cuda:0")
        assert weight.mm(weight).argmax(-1).tolist() == [7] * 4
