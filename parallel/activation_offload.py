"""Activation offload: copy a block's saved tensors to host memory while the next block's forward runs, and
back while the following block's backward runs.

`torch.autograd.graph.saved_tensors_hooks` around a block's call, compiled or not, receive the tensors that
autograd would save. All copies run on one separate stream, in the order of the calls: a forward's copies to
the host all precede the first copy back, so a second stream would not help. The host never waits for a copy.
On a CPU the same calls are made: streams do nothing there, and copies are synchronous.

Saved tensors on the device: in the forward those of the current block and of the previous one, whose copies
must finish before the current block ends; in the backward those of the current block and of the next one. The
last block's backward runs first, so its saved tensors stay on the device.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from meshwright.parallel.plan.schema import Plan

LEAST_BYTES = 2**16  # smaller storages stay on the device: starting the copy would take longer than the copy
SEND_LABEL, FETCH_LABEL = "Offload::send", "Offload::fetch"  # in a profile


def apply_activation_offload(model: nn.Module, plan: Plan) -> None:
    """Offload the saved tensors of every block in units with `activation_checkpoint: offload`, in place.

    Call it after compiling, so that the compiler does not trace the hooks, and before FSDP, whose own calls
    save no tensors. Sets `model.activation_offload`, which counts bytes.
    """
    unit_of = {module: unit for unit in plan.units for module in unit.modules}
    names = [name for name in plan.modules if unit_of[name].activation_checkpoint == "offload"]
    offload = model.activation_offload = ActivationOffload()  # type: ignore[assignment]
    for name in names:
        module = model.get_submodule(name)
        compute = module._compiled_call_impl or module._call_impl
        # torch's own attribute for the function that replaces a module's call; class and parameter names
        # stay.
        module._compiled_call_impl = partial(offload.run, module, compute, name == names[-1])  # type: ignore[assignment]


@dataclass(eq=False)
class _OffloadedStorage:
    """All bytes of one storage: on the device, in host memory, or in both during a copy. When autograd and
    copies have released it, its host buffer returns to `unused`.

    Host buffers have powers of two as sizes, so that batches of many lengths share them: as many bytes as
    torch pins for a buffer of any size. `host` is the used part of `buffer`.
    """

    device: Tensor | None
    unused: dict[int, list[Tensor]]  # free host buffers by size in bytes
    buffer: Tensor | None = None
    host: Tensor | None = None

    def send(self) -> int:
        """Start the copy to a free or new host buffer. Returns its bytes."""
        assert self.device is not None
        size = 1 << (self.device.nbytes - 1).bit_length()
        free = self.unused[size]
        self.buffer = (
            free.pop() if free else self.device.new_empty(size, device="cpu", pin_memory=self.device.is_cuda)
        )
        self.host = self.buffer[: self.device.nbytes]
        return self.host.copy_(self.device, non_blocking=True).nbytes

    def allocate(self, device: torch.device) -> None:
        """Allocate the device memory for `fetch`."""
        self.device = torch.empty_like(self.on_host(), device=device, pin_memory=False)

    def fetch(self) -> None:
        """Start the copy back into the allocated device memory."""
        self.on_device().copy_(self.on_host(), non_blocking=True)

    def on_device(self) -> Tensor:
        """Return the bytes on the device."""
        assert self.device is not None, "the storage was not fetched"
        return self.device

    def on_host(self) -> Tensor:
        """Return the bytes in host memory."""
        assert self.host is not None, "the storage was not sent"
        return self.host

    def __del__(self) -> None:
        if self.buffer is not None:
            self.unused[self.buffer.nbytes].append(self.buffer)


@dataclass(eq=False)
class _Block:
    """The saved tensors of one block, until they are fetched; from then on only autograd references them.

    `excluded`: ids of storages that are never offloaded, once they are known. `previous`: the block sent
    before this one. `copied`: the event after its copies. `reached`: its backward has begun.
    """

    previous: "_Block | None"
    storages: dict[int, _OffloadedStorage] = field(default_factory=dict)  # by torch's storage id
    excluded: frozenset[int] | None = None
    copied: Any = None
    reached: bool = False


@dataclass(frozen=True)
class _Saved:
    """The reference that autograd saves instead of a tensor."""

    block: _Block
    storage: _OffloadedStorage
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class ActivationOffload:
    """Sends and fetches the saved tensors of one model's blocks. `sent_bytes` counts them over all steps.
    While `enabled` is False, autograd saves all tensors as usual."""

    def __init__(self) -> None:
        self.enabled, self.sent_bytes = True, 0
        self._sending: _Block | None = None  # the last block sent, still on the device too
        self._unused: dict[int, list[Tensor]] = defaultdict(list)  # free host buffers, reused in later steps
        self._device = torch.device("cpu")  # of the blocks
        self._torch_device: Any = torch.cpu  # or torch.cuda
        self._copies: Any = None  # stream of the copies

    @property
    def host_bytes(self) -> int:
        """Bytes of free host buffers; between two steps these are all host buffers."""
        return sum(size * len(buffers) for size, buffers in self._unused.items())

    def run(
        self, module: nn.Module, compute: Callable[..., Any], stays: bool, *args: Any, **kwargs: Any
    ) -> Any:
        """Run the block's forward. `stays`: its saved tensors stay on the device: its backward is first."""
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if not (self.enabled and torch.is_grad_enabled() and inputs):
            return compute(*args, **kwargs)
        if self._copies is None:
            self._device = inputs[0].device
            self._torch_device = torch.get_device_module(self._device)
            self._copies = self._torch_device.Stream()
        block = _Block(self._sending)
        # Autograd keeps the hooks together with the packed values, so the hooks must not reference a tensor
        # that is to be freed: the block's own input.
        shared = [tensor for tensor in inputs if not tensor.requires_grad]
        with saved_tensors_hooks(partial(self._pack, module, shared, block), self._unpack):
            result = compute(*args, **kwargs)
        self._end_sending()
        if stays:
            block.storages.clear()
        else:
            self._send(block)
        return result

    def _pack(self, module: nn.Module, shared: Sequence[Tensor], block: _Block, tensor: Tensor) -> Any:
        """Return the reference to save for a tensor, or the tensor itself if it is not offloaded: small,
        integer and wrapped tensors, gathered parameters, which FSDP frees and refills, and inputs without
        gradient, such as the tables that all blocks share."""
        storage = tensor.untyped_storage()
        if (
            is_traceable_wrapper_subclass(tensor)
            or not tensor.is_floating_point()
            or storage.nbytes() < LEAST_BYTES
        ):
            return tensor
        if block.excluded is None:  # here, because parameters are not gathered before the forward
            kept = (part for tensor in (*module.parameters(), *shared) for part in _parts(tensor))
            block.excluded = frozenset(part.untyped_storage()._cdata for part in kept)
        if storage._cdata in block.excluded:
            return tensor
        if storage._cdata not in block.storages:
            flat = tensor.as_strided((storage.nbytes() // tensor.itemsize,), (1,), 0).view(torch.uint8)
            block.storages[storage._cdata] = _OffloadedStorage(flat, self._unused)
        offloaded = block.storages[storage._cdata]
        return _Saved(
            block, offloaded, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset())
        )

    def _unpack(self, saved: Any) -> Tensor:
        """Return the tensor; the compute stream waits for its copy."""
        if isinstance(saved, Tensor):
            return saved
        if not saved.block.reached:
            self._reach(saved.block)
        return saved.storage.on_device().view(saved.dtype).as_strided(saved.size, saved.stride, saved.offset)

    def _reach(self, block: _Block) -> None:
        """Begin the block's backward: wait for its own copies and start those of the next block."""
        block.reached = True
        self._fetch(block)  # only for the first block of a backward, which was not fetched ahead
        if block.copied is not None:
            self._torch_device.current_stream().wait_event(block.copied)
        if block.previous is not None:
            self._fetch(block.previous)
            block.previous = None

    def _send(self, block: _Block) -> None:
        """Start copies to host memory, after the kernels queued so far."""
        with torch.profiler.record_function(SEND_LABEL):
            self._copies.wait_stream(self._torch_device.current_stream())
            with self._torch_device.stream(self._copies):
                for storage in block.storages.values():
                    self.sent_bytes += storage.send()
        block.copied = self._copies.record_event()
        self._sending = block

    def _end_sending(self) -> None:
        """Make the compute stream wait for the copies of the block sent last, then free its device memory."""
        if self._sending is not None:
            if self._sending.copied is not None:
                self._torch_device.current_stream().wait_event(self._sending.copied)
            for storage in self._sending.storages.values():
                storage.device = None
        self._sending = None

    def _fetch(self, block: _Block) -> None:
        """Start copies back to the device, unless they have started already."""
        if not block.storages:
            return
        with torch.profiler.record_function(FETCH_LABEL):
            for storage in block.storages.values():
                storage.allocate(self._device)
            # kernels queued so far may still use that memory
            self._copies.wait_stream(self._torch_device.current_stream())
            with self._torch_device.stream(self._copies):
                for storage in block.storages.values():
                    storage.fetch()
        block.copied = self._copies.record_event()
        block.storages.clear()


def _parts(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the plain tensors inside a wrapper, such as a DTensor or a float8 weight with its scale."""
    if is_traceable_wrapper_subclass(tensor):
        inner = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
        for part in inner:
            yield from _parts(part) if isinstance(part, Tensor) else ()
    else:
        yield tensor
