"""Forwards without a backward, with the graphs compiled for training."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from meshwright.parallel.compile.stats import of_evaluation
from meshwright.parallel.fsdp import free_gathered


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Context manager for evaluations, which leave nothing behind: modules are in eval mode, no random number
    of training is drawn, no activations are saved or offloaded, and at the end all parameters are sharded.

    Autograd stays enabled, because compiled blocks would need a second graph without it; those that ask for
    `self.training`, as dropout and transformers' attention do, need it anyway. A backward raises
    RuntimeError.
    """
    modes = [(module, module.training) for module in model.modules()]
    offload = getattr(model, "activation_offload", None)
    offloads = offload is not None and offload.enabled
    if offload is not None:
        offload.enabled = False
    gpus = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    try:
        model.eval()
        with torch.random.fork_rng(gpus), saved_tensors_hooks(_drop, _refuse), of_evaluation():
            yield
    finally:
        for module, training in modes:
            module.training = training
        if offload is not None:
            offload.enabled = offloads
        free_gathered(model)


def _drop(_tensor: Any) -> None:
    """Return None in place of a saved tensor."""


def _refuse(_nothing: None) -> NoReturn:
    raise RuntimeError(
        "backward of an output computed in mw.evaluating: no activations were saved for it: compute it "
        "outside of that context"
    )
