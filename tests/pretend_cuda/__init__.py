"""CUDA devices that are not there."""

from pretend_cuda.clock import Costs
from pretend_cuda.devices import Devices
from pretend_cuda.ledger import Event, Tally
from pretend_cuda.tensors import CudaTensor

__all__ = ["Costs", "CudaTensor", "Devices", "Event", "Tally"]
