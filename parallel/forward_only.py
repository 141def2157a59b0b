"""Forwards without a backward, with the graphs compiled for training."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.fsdp import FSDPModule


@contextmanager
def without_backward(model: nn.Module) -> Iterator[None]:
    """Context manager in which forwards save no activations and offload none, even with autograd enabled.

    Autograd stays enabled because compiled blocks would need a second graph without it. At the end all
    gathered parameters are freed: FSDP2 keeps those of the last unit gathered until its backward.
    """
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
    """Return None in place of a saved tensor."""


def _refuse(_nothing: None) -> NoReturn:
    raise RuntimeError(
        "backward of an output computed in without_backward: no activations were saved for it; compute it "
        "outside of without_backward"
    )
