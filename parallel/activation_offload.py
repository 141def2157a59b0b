"""Activations in host memory: what a block saves for its backward is sent there while the next block
computes, and comes back while the block behind it differentiates.

A block hands what its forward saves to `torch.autograd.graph.saved_tensors_hooks`, compiled or not: they
stand around the compiled call, and see what autograd would keep. All copies run on one stream beside
computing, in the order in which they are asked for: all of a forward's are sent before the first is fetched,
so a second stream would win nothing. The host waits for none of them. On a CPU the same calls are made, whose
streams do nothing, and copies are copies.

How much is on the device: in the forward the block at work and the one before it, whose copies must have
ended when the block at work ends; in the backward the block at work and the one that comes next. The last
block's backward is the first, so what it saves stays.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from meshwright.parallel.plan.schema import Plan

LEAST_BYTES = 2**16  # a smaller storage stays: sending it would take longer to start than to do
FETCH_LABEL = "Offload::fetch"  # in a profile


def apply_activation_offload(model: nn.Module, plan: Plan) -> None:
    """Send away what every block of the plan's units with activation_checkpoint offload saves, in place.
    After compiling, which would otherwise trace the hooks, and before FSDP, whose own calls do not matter.
    `model.activation_offload` counts."""
    unit_of = {module: unit for unit in plan.units for module in unit.modules}
    names = [name for name in plan.modules if unit_of[name].activation_checkpoint == "offload"]
    offload = model.activation_offload = ActivationOffload()  # type: ignore[assignment]
    for name in names:
        module = model.get_submodule(name)
        compute = module._compiled_call_impl or module._call_impl
        # Where torch itself puts what runs instead of a module's call, without touching its class or its
        # names.
        module._compiled_call_impl = partial(offload.run, module, compute, name == names[-1])  # type: ignore[assignment]


@dataclass(eq=False)
class _OffloadedStorage:
    """All bytes of one storage, on the device, in host memory, or both while they are copied. Lives as long
    as autograd or a copy needs it; then its host memory goes back to `unused`."""

    device: Tensor | None
    unused: dict[int, list[Tensor]]  # by bytes
    host: Tensor | None = None

    def send(self) -> int:
        """Start the copy to host memory: to some that was used before, or new. Returns its bytes."""
        assert self.device is not None
        free = self.unused[self.device.nbytes]
        self.host = (
            free.pop()
            if free
            else torch.empty_like(self.device, device="cpu", pin_memory=self.device.is_cuda)
        )
        return self.host.copy_(self.device, non_blocking=True).nbytes

    def make_room(self, device: torch.device) -> None:
        self.device = torch.empty_like(self._sent(), device=device, pin_memory=False)

    def fetch(self) -> None:
        """Start the copy back into the room that was made."""
        self.there().copy_(self._sent(), non_blocking=True)

    def there(self) -> Tensor:
        """Its bytes on the device."""
        assert self.device is not None, "whoever asks has fetched the block"
        return self.device

    def _sent(self) -> Tensor:
        assert self.host is not None, "only what was sent is fetched"
        return self.host

    def __del__(self) -> None:
        if self.host is not None:
            self.unused[self.host.nbytes].append(self.host)


@dataclass(eq=False)
class _Block:
    """What one block's forward has saved, until it is fetched: then autograd alone holds it, as it would
    without us.

    `left`: numbers of the storages that are not the block's own, once they are known. `before`: the block
    sent before it. `copied`: the event behind its copies. `reached`: its backward has begun.
    """

    before: "_Block | None"
    storages: dict[int, _OffloadedStorage] = field(default_factory=dict)  # by torch's number of the storage
    left: frozenset[int] | None = None
    copied: Any = None
    reached: bool = False


@dataclass(frozen=True)
class _Saved:
    """What autograd holds instead of a tensor."""

    block: _Block
    storage: _OffloadedStorage
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class ActivationOffload:
    """Sends and fetches what the blocks of one model save; `sent_bytes` counts all of it, over all steps.
    While it is not `enabled`, everything is left to autograd."""

    def __init__(self) -> None:
        self.enabled, self.sent_bytes = True, 0
        self._sending: _Block | None = None  # the last one sent, which is still on the device too
        self._unused: dict[int, list[Tensor]] = defaultdict(list)  # host memory, kept from step to step
        self._where = torch.device("cpu")  # the blocks are
        self._torch_device: Any = torch.cpu  # or torch.cuda
        self._copies: Any = None  # their stream

    @property
    def host_bytes(self) -> int:
        """Of host memory that no block is using: between two steps, of all that was taken."""
        return sum(size * len(buffers) for size, buffers in self._unused.items())

    def run(self, module: nn.Module, compute: Callable[..., Tensor], stays: bool, *inputs: Any) -> Tensor:
        """The block's forward. `stays`: what it saves is needed next, and not sent."""
        if not (self.enabled and torch.is_grad_enabled()):
            return compute(*inputs)
        if self._copies is None:
            self._where = inputs[0].device
            self._torch_device = torch.get_device_module(self._where)
            self._copies = self._torch_device.Stream()
        block = _Block(self._sending)
        # Autograd keeps the hooks with what they have packed, so they must not hold what is to be freed: the
        # block's own input.
        shared = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor) and not leaf.requires_grad]
        with saved_tensors_hooks(partial(self._pack, module, shared, block), self._unpack):
            result = compute(*inputs)
        self._end_sending()
        if stays:
            block.storages.clear()
        else:
            self._send(block)
        return result

    def _pack(self, module: nn.Module, shared: Sequence[Tensor], block: _Block, tensor: Tensor) -> Any:
        """Take in a tensor that the forward saves. Left to autograd is what is small or holds no numbers of
        its own: gathered parameters, which FSDP frees and fills again, and inputs that need no gradient, as
        the tables that all blocks share."""
        storage = tensor.untyped_storage()
        if (
            is_traceable_wrapper_subclass(tensor)
            or not tensor.is_floating_point()
            or storage.nbytes() < LEAST_BYTES
        ):
            return tensor
        if block.left is None:  # only now: before the forward began, parameters were not gathered
            block.left = _numbers([*module.parameters(), *shared])
        if storage._cdata in block.left:
            return tensor
        if storage._cdata not in block.storages:
            flat = tensor.as_strided((storage.nbytes() // tensor.itemsize,), (1,), 0).view(torch.uint8)
            block.storages[storage._cdata] = _OffloadedStorage(flat, self._unused)
        found = block.storages[storage._cdata]
        return _Saved(
            block, found, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset())
        )

    def _unpack(self, saved: Any) -> Tensor:
        """The tensor again; computing waits until it is there."""
        if isinstance(saved, Tensor):
            return saved
        if not saved.block.reached:
            self._reach(saved.block)
        return saved.storage.there().view(saved.dtype).as_strided(saved.size, saved.stride, saved.offset)

    def _reach(self, block: _Block) -> None:
        """The block's backward begins: wait for what it needs, and fetch what the next one will need."""
        block.reached = True
        self._fetch(block)  # the first of a backward that nobody has fetched ahead
        if block.copied is not None:
            self._torch_device.current_stream().wait_event(block.copied)
        if block.before is not None:
            self._fetch(block.before)
            block.before = None

    def _send(self, block: _Block) -> None:
        """Start copies to host memory, behind what has been computed so far."""
        with torch.profiler.record_function(SEND_LABEL):
            self._copies.wait_stream(self._torch_device.current_stream())
            with self._torch_device.stream(self._copies):
                for storage in block.storages.values():
                    self.sent_bytes += storage.send()
        block.copied = self._copies.record_event()
        self._sending = block

    def _end_sending(self) -> None:
        """Let computing wait for the copies of the block that was sent last: then its memory can be used
        again."""
        if self._sending is not None:
            if self._sending.copied is not None:
                self._torch_device.current_stream().wait_event(self._sending.copied)
            for storage in self._sending.storages.values():
                storage.device = None
        self._sending = None

    def _fetch(self, block: _Block) -> None:
        """Start copies back to the device, unless that was done."""
        if not block.storages:
            return
        with torch.profiler.record_function(FETCH_LABEL):
            for storage in block.storages.values():
                storage.make_room(self._where)
            # that memory was somebody else's until now
            self._copies.wait_stream(self._torch_device.current_stream())
            with self._torch_device.stream(self._copies):
                for storage in block.storages.values():
                    storage.fetch()
        block.copied = self._copies.record_event()
        block.storages.clear()


def _numbers(tensors: Iterable[Tensor]) -> frozenset[int]:
    """Torch's numbers of the tensors' storages."""
    return frozenset(part.untyped_storage()._cdata for tensor in tensors for part in _parts(tensor))


def _parts(tensor: Tensor) -> Iterator[Tensor]:
    """The plain tensors of a wrapped one, as of a DTensor (beside its mesh), or of a weight in float8 with
    its scale."""
    if is_traceable_wrapper_subclass(tensor):
        inner = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
        for part in inner:
            yield from _parts(part) if isinstance(part, Tensor) else ()
    else:
        yield tensor


SEND_LABEL = "Offload::send"  # of activation_offload.py
