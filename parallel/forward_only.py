"""Forwards without a backward, by the graphs that were compiled for training."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.fsdp import FSDPModule


@contextmanager
def without_backward(model: nn.Module) -> Iterator[None]:
    """Within it forwards keep nothing for a backward and send nothing to host memory, though autograd may be
    on, without which compiled blocks would need a second graph. At the end every gathered parameter is freed:
    without a backward, FSDP2 keeps those of the last unit."""
    offload = getattr(model, "activation_offload", None)
    if offload is not None:
        offload.enabled = False
    try:
        with saved_tensors_hooks(_drop, _refuse):
            yield
    finally:
        if offload is not None:
            offload.enabled = True
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def _drop(_tensor: Any) -> None:
    """Nothing, for what a forward saves."""


def _refuse(_nothing: None) -> NoReturn:
    raise RuntimeError("a backward of what was computed without_backward: nothing was kept for it")
