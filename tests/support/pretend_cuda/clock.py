"""A clock for the host and one for each device: only where the host waits do they meet."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Costs:
    """Seconds, bytes a second, operations a second; by default about those of an H100 and its host.

    Attributes:
        call: of the host for an operation with a kernel.
        view: of the host for one without.
        replay: of the host for launching a graph.
        wait: of the host for waiting, beyond the time until the device is done.
        kernel: the least of a kernel on the device.
        node: the least of a kernel within a graph.
        capture: of the host for ending a capture (instantiating the graph, emptying caches).
        bandwidth: of the device's memory.
        link: between devices.
        speed: of matrix products.
    """

    call: float = 8e-6
    view: float = 1.5e-6
    replay: float = 10e-6
    wait: float = 8e-6
    kernel: float = 2.5e-6
    node: float = 2.2e-6
    capture: float = 0.15
    bandwidth: float = 2.7e12
    link: float = 25e9
    speed: float = 6e14


class Clock:
    """Simulated time in seconds.

    Attributes:
        now: the host's.
        busy: of each device, when it will have done all it was given.
    """

    def __init__(self, costs: Costs, devices: int) -> None:
        self.costs = costs
        self.now = 0.0
        self.busy = {torch.device("cuda", index): 0.0 for index in range(devices)}

    def read(self) -> float:
        """In the place of ``perf_counter``."""
        return self.now

    def host(self, seconds: float) -> None:
        self.now += seconds

    def work(self, device: torch.device, seconds: float) -> None:
        """Give a device something to do behind what it has."""
        self.busy[device] = max(self.busy[device], self.now) + seconds

    def wait(self, device: torch.device) -> None:
        self.now = max(self.now, self.busy[device]) + self.costs.wait
