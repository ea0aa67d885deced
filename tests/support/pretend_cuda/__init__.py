"""CUDA devices that are not there: ``with Devices(2): ...`` and tensors go to ``cuda:0`` and ``cuda:1``.

Numbers are computed on the CPU, or not at all where shapes are enough. What a device would not do is an error; what it
would do silently is done silently; everything is counted, and takes time on a clock.

* ``devices``: the context, which stands in for what torch has of devices.
* ``tensors``: tensors and generators that say where they are; memory that is pinned.
* ``kernels``: every operation: launched, copied, waited for.
* ``streams``: streams and events of each thread; what is done only once the host has waited.
* ``captures``: graphs below torch's own ``torch.cuda.graph``.
* ``memory``: pools of graphs, cuBLAS's workspaces, memory that runs out, who wrote what last.
* ``clock``: seconds of the host and of each device. ``ledger``: what was done, by kind and label.
* ``pairs``: tiny models and runners on devices, whole or spread by accelerate's hooks.

Three things are not pretended: gradients, for which torch wants streams that are there; compiled passes; and memory
that one stream gives back while another still uses it.
"""

from tests.support.pretend_cuda.clock import Costs
from tests.support.pretend_cuda.devices import Devices
from tests.support.pretend_cuda.ledger import Event, Tally
from tests.support.pretend_cuda.tensors import CudaTensor

__all__ = ["Costs", "CudaTensor", "Devices", "Event", "Tally"]
