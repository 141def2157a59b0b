"""Tracks the memory of one rank by kind, storage by storage, while a step runs."""

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from meshwright.parallel.activation_offload import SEND_LABEL
from meshwright.parallel.fsdp import local_part, parameters_by_module
from meshwright.parallel.memory_breakdown import MemoryBreakdown
from meshwright.parallel.plan.schema import Plan, UnitPlan, leaves_parameters, sums_whole_gradients
from meshwright.parallel.simulate.module_tracker import OPTIMIZER_LABEL, ModuleTracker

REDUCE_LABEL = "FSDP::post_backward_reduce"
RESHARD_LABEL = "FSDP::post_backward_reshard"  # in which FSDP2 casts whole gradients that it keeps
PRE_FORWARD_LABEL = "FSDP::pre_forward"
BACKWARD_END = "FSDP::root_post_backward_callback"
BUFFER_LABELS = ("FSDP::post_backward", "FSDP::root_post_backward", OPTIMIZER_LABEL)
UNSHARDED_LABELS = (
    "FSDP::all_gather",
    "FSDP::pre_",
    "FSDP::root_pre_",
    "FSDP::post_forward",
    "FSDP::forward_prefetch",
    "FSDP::backward_prefetch",
)


@dataclass
class _TrackedStorage:
    """A live storage: its kind and the size that is counted for it."""

    ref: "weakref.ref[torch.UntypedStorage]"
    kind: str
    bytes: int = 0


class StorageTracker:
    """Counts the storages of fake or real tensors, from the operation that returns them until they are freed.
    `logits`: names of the modules that compute the logits and the loss; `on_host`: kinds in host memory,
    which do not count for the peak."""

    def __init__(
        self,
        position: ModuleTracker,
        model: nn.Module,
        plan: Plan,
        logits: tuple[str, str],
        on_host: frozenset[str],
    ) -> None:
        self.now: dict[str, int] = dict.fromkeys(MemoryBreakdown.__annotations__, 0)
        self.largest = dict(self.now)
        self.at_peak = dict(self.now)
        self._peak = self._total = 0
        self._position, self._on_host = position, on_host
        self._output_module, self._loss_module = logits
        self._logits_widths: set[int] = set()
        self._live: dict[int, _TrackedStorage] = {}
        # kept gradients of full size are always on the device
        self._kept_kind = "buffers" if "grads" in on_host else "grads"
        self._leaves = leaves_parameters(plan)
        self._micro_batch = 0
        self._gathered: dict[str, list[nn.Parameter]] = {}  # a unit's parameters of full size
        self._plan, self._units = plan, {unit.name: unit for unit in plan.units}
        self._params = list(model.parameters())
        self._model, self._modules = model, dict(model.named_modules())
        self._unit_params = self._parameters_by_unit()
        self._differentiated = ""  # the module whose backward ran last
        self._reduced: list[int] = []  # storages that the running reduction has created

    def mark(self, kind: str, tensors: Iterable[Tensor | None]) -> None:
        """Set the kind of tensors, and move them from the kind that they were counted as."""
        for tensor in tensors:
            if tensor is not None:
                storage = _local(tensor).untyped_storage()
                if storage._cdata in self._live:
                    self._move(self._live[storage._cdata], kind)
                else:
                    self._follow(storage, kind)

    def follow_result(self, result: Any) -> None:
        """Track the tensors that an operation returns."""
        self._follow_backward()
        if self._position.label == SEND_LABEL:
            return  # copies in host memory
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = _local(tensor).untyped_storage()
                if storage._cdata not in self._live:
                    self._follow(storage, self._kind(tensor))

    def follow_label(self, closed: str) -> None:
        """Update kinds and sizes after a label was opened, or `closed` was closed ("" if none)."""
        self._remeasure()
        opened = "" if closed else self._position.label
        if closed.startswith(PRE_FORWARD_LABEL):
            unit = self._units[self._position.unit_in(closed)]
            self._gathered[unit.name] = self._parameters_by_unit()[unit.name]
        elif closed == BACKWARD_END:
            self._micro_batch += 1
            if self._leaves:
                self.mark("grads", (p.grad for p in self._params))
        elif opened.startswith(RESHARD_LABEL):
            self._mark_kept(self._units[self._position.unit_in(opened)])
        if closed == "FSDP::root_pre_forward":
            # the first forward copies uneven shards into padded storages
            self.mark("params", self._params)
        elif closed.startswith(REDUCE_LABEL):
            self._mark_reduced(self._unit_params[self._position.unit_in(closed)])

    def _parameters_by_unit(self) -> dict[str, list[nn.Parameter]]:
        """Return the parameters of each unit as they are at the moment: shards, or gathered."""
        of = parameters_by_module(self._model, self._plan.modules)
        return {unit.name: [p for m in unit.modules for p in of[m].values()] for unit in self._plan.units}

    def _kind(self, tensor: Tensor) -> str:
        """Return the kind of a tensor that was just created."""
        position = self._position
        if position.label.startswith(UNSHARDED_LABELS):
            return "unsharded"
        if position.label.startswith(RESHARD_LABEL):
            return self._kept_kind
        if position.label.startswith(BUFFER_LABELS) or position.phase == "optimizer":
            return "buffers"
        if (module := position.module) not in (self._output_module, self._loss_module):
            return "activations"
        width = tensor.shape[-1] if tensor.dim() else 0
        if module == self._output_module and not position.in_backward:
            self._logits_widths.add(width)
        return "logits" if module == self._loss_module or width in self._logits_widths else "activations"

    def _mark_kept(self, unit: UnitPlan) -> None:
        """Mark the gradients that a unit keeps uncast until its reduction in a later micro batch."""
        sums = sums_whole_gradients(unit, self._plan) and self._micro_batch < self._plan.accumulation - 1
        if sums and unit.param_dtype == unit.reduce_dtype:
            self.mark(self._kept_kind, (p.grad for p in self._gathered[unit.name]))

    def _mark_reduced(self, params: Sequence[Tensor]) -> None:
        """Mark the gradients that a unit's reduction has produced."""
        grads = [p.grad for p in params if p.grad is not None]
        self.mark("grads", grads)
        # HSDP keeps them outside of `grad` until the all-reduce. The first storage that a reduction creates
        # is its input.
        for key in self._reduced[1:] if not grads else ():
            if key in self._live:
                self._move(self._live[key], "grads")
        self._reduced.clear()

    def _follow_backward(self) -> None:
        """Mark the gradients of weights, which were counted as activations when they were created."""
        # also "" while a gradient is accumulated
        module = self._position.module if self._position.in_backward else ""
        if module not in ("", self._differentiated):
            # Autograd uses the operation's result itself as the gradient, so it is known as one only now.
            weights = self._modules[self._differentiated]._parameters.values()
            grads = [weight.grad for weight in weights if weight is not None]
            kind = "grads" if self._leaves else "buffers"  # which FSDP2 reduces
            self.mark(kind, (grad for grad in grads if not self._is_reduced(grad)))
            self._differentiated = module

    def _is_reduced(self, gradient: Tensor | None) -> bool:
        """Whether a gradient is already that of the sharded weight: its unit was reduced in the meantime."""
        if gradient is None:
            return False
        tracked = self._live.get(_local(gradient).untyped_storage()._cdata)
        return tracked is not None and tracked.kind == "grads"

    def _follow(self, storage: torch.UntypedStorage, kind: str) -> None:
        key = storage._cdata
        ref = weakref.ref(storage, lambda _: self._forget(key))
        self._live[key] = _TrackedStorage(ref, kind)
        if self._position.label.startswith(REDUCE_LABEL):
            self._reduced.append(key)
        self._resize(self._live[key], storage.nbytes())

    def _forget(self, key: int) -> None:
        self._resize(self._live.pop(key), 0)

    def _remeasure(self) -> None:
        """Update the sizes of gathered parameters: FSDP2 resizes their storages without an operation."""
        for tracked in self._live.values():
            if tracked.kind == "unsharded" and (storage := tracked.ref()) is not None:
                self._resize(tracked, storage.nbytes())

    def _move(self, storage: _TrackedStorage, kind: str) -> None:
        size = storage.bytes
        self._resize(storage, 0)
        storage.kind = kind
        self._resize(storage, size)

    def _resize(self, storage: _TrackedStorage, size: int) -> None:
        kind, grown = storage.kind, size - storage.bytes
        storage.bytes = size
        self.now[kind] += grown
        self.largest[kind] = max(self.largest[kind], self.now[kind])
        self._total += 0 if kind in self._on_host else grown
        if self._total > self._peak:
            self._peak = self._total
            self.at_peak = dict(self.now)


def _local(tensor: Tensor) -> Tensor:
    with torch.no_grad():
        return local_part(tensor)
