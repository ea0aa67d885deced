"""What happens to an operation on pretended tensors: launched, copied, waited for, or refused as a device would."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.pretend_cuda.operations import Known, each_changed, known_of, leaves
from tests.support.pretend_cuda.tensors import CudaTensor, attend, is_pinned

if TYPE_CHECKING:
    from tests.support.pretend_cuda.devices import Devices

WITHOUT_KERNEL = {
    "empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "detach", "detach_", "alias", "resize_",
    "lift_fresh", "_unsafe_view", "_reshape_alias", "is_same_size", "sym_size", "sym_stride",
}  # fmt: skip
READS = {"nonzero", "masked_select", "unique", "_unique2", "unique_consecutive", "repeat_interleave"}
"""The length of what they give is on the device, so that the host waits for it."""
PRODUCTS = {"mm", "addmm", "bmm", "baddbmm"}
PICKS = {"embedding", "index_select", "gather", "index"}
"""Of their first tensor no more is read than is picked."""
DRAWS = {"exponential_", "uniform_", "normal_", "random_", "log_", "neg_"}


def _wider(left: torch.Tensor, right: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.bmm(left.to(dtype), right.to(dtype))


_wider.__name__ = "bmm"
STAND_INS = {torch.ops.aten.bmm.dtype: _wider}
"""For what a CPU does not have."""


class Mode(TorchDispatchMode):
    """Sends every operation of a thread to some devices."""

    def __init__(self, devices: "Devices") -> None:
        super().__init__()
        self._kernels = Kernels(devices)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        # In inference mode operations come as they were called, and are still to be taken apart.
        if torch.is_inference_mode_enabled() and known_of(func).composite:
            with self:
                found = func.decompose(*args, **named)
            if found is not NotImplemented:
                return found
        return self._kernels.run(func, args, named)


class Kernels:
    """Runs operations on some devices.

    Args:
        devices: with their ledger, clock, streams and memory.
    """

    def __init__(self, devices: "Devices") -> None:
        self._at = devices

    def run(self, function: Any, args: Any, named: Any) -> Any:
        ours = [x for x in leaves((args, named)) if isinstance(x, CudaTensor)]
        wanted = named.get("device")
        if not ours and (wanted is None or torch.device(wanted).type != "cuda"):
            return function(*args, **named)
        function = STAND_INS.get(function, function)
        name = known_of(function).name
        if name == "_local_scalar_dense":
            return self._down(ours[0], "item").item()
        if name in ("_to_copy", "copy_"):
            return self._copied(function, name, args, named)
        if name in READS:
            self._at.wait(name, ours[0].device, copies=True)
        return self.launch(function, args, named, name)

    def launch(self, function: Any, args: Any, named: Any, name: str) -> Any:
        """A kernel, or a view without one."""
        at, known = self._at, known_of(function)
        flat = list(leaves((args, named)))
        device = self._device(flat, named.get("device"), name)
        stream = at.streams.current(device)
        graph = at.recording(stream)
        plain, plain_named = each_changed(lambda x: x.inner if isinstance(x, CudaTensor) else x, (args, named))
        if named.get("device") is not None:
            plain_named["device"] = torch.device("meta" if at.shapes_only else "cpu")
        if at.shapes_only and plain_named.get("generator") is not None:
            plain_named["generator"] = None
        written = _written(known, plain, plain_named)
        kernel = name not in WITHOUT_KERNEL and not known.is_view
        inputs = [x for x in leaves((plain, plain_named)) if isinstance(x, torch.Tensor)]
        # While it captures nothing runs; what the graph owns holds nothing yet, and later kernels need valid ids.
        kept = [] if graph is None else [(tensor, tensor.clone()) for tensor in written if not graph.owns(tensor)]
        results = args[0] if at.shapes_only and name in DRAWS else function(*plain, **plain_named)
        for tensor, old in kept:
            tensor.copy_(old)
        made = [x for x in leaves(results) if isinstance(x, torch.Tensor)]
        self._require_known(x.dtype for x in (*made, *inputs) if x.dim())
        if not written and not known.is_view:
            for tensor in made:
                at.memory.allocate(tensor.numel() * tensor.element_size())
        if not kernel:
            at.clock.host(at.clock.costs.view)
            if graph is not None and not known.is_view and name.startswith(("empty", "new_empty")):
                graph.own(results)
        else:
            seconds = self._seconds(name, inputs, made, bool(written), graph is not None)
            at.ledger.note("kernel", name, device, graph is not None)
            at.clock.host(at.clock.costs.call)
            if name in PRODUCTS:
                at.memory.workspace(stream, graph.pool_id if graph is not None else None)
                if graph is not None:
                    graph.multiplies()
            if graph is not None:
                graph.record(function, (plain, plain_named), results, bool(written), seconds)
            else:
                self._order(name, inputs, made, device)
                at.clock.work(device, seconds)
        if written:
            return _as_given(known, args, named)
        return each_changed(lambda x: CudaTensor(x, device) if isinstance(x, torch.Tensor) else x, results)

    def attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,  # noqa: ARG002 - torch's signature
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        """As torch would choose: one kernel; with a mask the memory-efficient one, whose mask is a tensor of numbers
        with rows that begin at multiples of 16 bytes."""
        if not isinstance(query, CudaTensor):
            return attend(query, key, value, attn_mask, is_causal, scale, enable_gqa)
        self._at.attended.append((tuple(query.shape), tuple(key.shape), key.stride(), attn_mask))
        if attn_mask is not None:
            if attn_mask.dtype == torch.bool:
                attn_mask = torch.where(attn_mask, 0.0, -torch.inf).to(query.dtype)
            if any(stride % 8 for stride in attn_mask.stride()[:-1]):
                width = attn_mask.shape[-1]
                attn_mask = torch.nn.functional.pad(attn_mask, (0, -width % 8))[..., :width]
        return self.launch(attend, (query, key, value, attn_mask, is_causal, scale, enable_gqa), {}, "attention")

    def _require_known(self, dtypes: Iterable[torch.dtype]) -> None:
        if not self._at.float64 and torch.float64 in dtypes:
            raise TypeError("Cannot convert to float64, which the device does not have. Please use float32 instead.")

    def _device(self, flat: list[Any], wanted: Any, name: str) -> torch.device:
        """The device of an operation, or the error of one that mixes several."""
        found = {x.device for x in flat if isinstance(x, torch.Tensor) and (x.dim() or isinstance(x, CudaTensor))}
        if name in ("index", "index_put", "index_put_") and torch.device("cpu") in found:
            found.discard(torch.device("cpu"))  # indices of the host are copied over, and waited for
            self._at.wait("indices of the host", next(iter(found)))
        if len(found) > 1:
            where = " and ".join(sorted(map(str, found)))
            raise RuntimeError(f"Expected all tensors to be on the same device, but found several: {where} ({name})")
        return found.pop() if found else self._at.named(wanted)

    def _order(self, name: str, inputs: list[torch.Tensor], made: list[torch.Tensor], device: torch.device) -> None:
        at, stream = self._at, self._at.streams.current(device)
        for tensor in inputs:
            at.memory.require_ordered(tensor, stream, name)
        at.streams.issue(stream)
        for tensor in made:
            at.memory.write(tensor, stream)

    def _seconds(
        self, name: str, inputs: list[torch.Tensor], made: list[torch.Tensor], writes: bool, in_graph: bool
    ) -> float:
        """Of a kernel on its device: the bytes it moves, or its sums where these take longer."""
        costs = self._at.clock.costs
        sizes = [x.numel() * x.element_size() for x in inputs]
        if writes:
            moved = 2 * min(sizes, default=0)
        else:
            moved = sum(sizes[1:] if name in PICKS else sizes) + sum(x.numel() * x.element_size() for x in made)
        sums = 0.0
        if name in PRODUCTS:
            inner = next(x for x in inputs if x.dim() >= 2).shape[-1]
            sums = 2 * made[0].numel() * inner / costs.speed
        return max(costs.node if in_graph else costs.kernel, moved / costs.bandwidth, sums)

    def _down(self, tensor: torch.Tensor, what: str) -> torch.Tensor:
        """The numbers of a tensor, which the host waits for."""
        assert isinstance(tensor, CudaTensor)
        self._at.wait(what, tensor.device, copies=True)
        return self._at.answers(tensor) if tensor.inner.is_meta else tensor.inner

    def _copied(self, function: Any, name: str, args: Any, named: Any) -> Any:
        at, whole = self._at, name == "_to_copy"
        source = args[0] if whole else args[1]
        to = at.named(named.get("device") or source.device) if whole else args[0].device
        dtype = (named.get("dtype") or source.dtype) if whole else args[0].dtype
        patient = not (named.get("non_blocking", False) or (not whole and len(args) > 2 and args[2]))
        if to.type == "cuda":
            self._require_known([dtype])
        if source.device == to:
            return self.launch(function, args, named, name)
        if at.capturing is not None and any(
            at.recording(at.streams.current(x)) for x in (source.device, to) if x.type == "cuda"
        ):
            raise at.capturing.refuse(f"a copy from {source.device} to {to}")
        if not source.numel():
            place = "meta" if at.shapes_only and to.type == "cuda" else "cpu"
            inner = torch.empty(source.shape, dtype=dtype, device=place)
        elif to.type == "cpu":
            target = None if whole else args[0]
            if not patient and (whole or is_pinned(target)):
                assert not whole, "a copy to the host that is not waited for goes to pinned memory"
                return self._fetched_later(source, target)
            inner = self._down(source, name).detach().to(dtype, copy=True)
        elif source.device.type == "cpu":
            inner = self._up(source, to, dtype, patient)
        else:
            inner = self._across(source, to, dtype)
        if whole:
            if to.type == "cuda":
                at.memory.write(inner, at.streams.current(to))
            return inner if to.type == "cpu" else CudaTensor(inner, to)
        place = args[0].inner if isinstance(args[0], CudaTensor) else args[0]
        if not (place.is_meta or inner.is_meta):
            place.copy_(inner)
        return args[0]

    def _up(self, source: torch.Tensor, to: torch.device, dtype: torch.dtype, patient: bool) -> torch.Tensor:
        at, stream = self._at, self._at.streams.current(to)
        at.ledger.note("up", "from the host", to)
        at.streams.issue(stream)
        at.clock.host(at.clock.costs.call)
        at.clock.work(to, at.clock.costs.kernel)
        if patient or not is_pinned(source):
            at.wait("a copy from memory that is not pinned", to)
        else:
            held, then = source, source.clone()

            def unchanged() -> None:
                if not torch.equal(held, then):
                    raise RuntimeError("race: pinned memory was written before it had been copied")

            at.streams.later(stream, unchanged)
        return torch.empty(source.shape, dtype=dtype, device="meta") if at.shapes_only else source.to(dtype, copy=True)

    def _fetched_later(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        at, stream = self._at, self._at.streams.current(source.device)
        assert isinstance(source, CudaTensor)
        at.ledger.note("down", "to pinned memory", source.device)
        at.clock.host(at.clock.costs.call)
        at.clock.work(source.device, at.clock.costs.kernel)
        at.streams.issue(stream)
        value = (at.answers(source) if source.inner.is_meta else source.inner).to(target.dtype, copy=True)
        at.streams.later(stream, lambda: target.copy_(value))
        return target

    def _across(self, source: torch.Tensor, to: torch.device, dtype: torch.dtype) -> torch.Tensor:
        at, costs = self._at, self._at.clock.costs
        assert isinstance(source, CudaTensor)
        at.ledger.note("across", f"{source.device} to {to}", to)
        at.clock.host(costs.call)
        size = source.numel() * source.element_size()
        busy = at.clock.busy
        busy[to] = max(busy[source.device], busy[to], at.clock.now) + 1e-5 + size / costs.link
        at.streams.current(to).wait_stream(at.streams.current(source.device))
        return source.inner.to(dtype, copy=True)


def _written(known: Known, args: Any, named: Any) -> list[Any]:
    """The arguments that an operation writes to."""
    places = [args[number] if number < len(args) else named.get(name) for number, name in known.writes]
    return [place for place in places if isinstance(place, torch.Tensor)]


def _as_given(known: Known, args: Any, named: Any) -> Any:
    if not known.returns:
        return None
    found = _written(known, args, named)
    return found[0] if len(found) == 1 else tuple(found)
