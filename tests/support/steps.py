"""Steps: their batches, what they leave, and how hooks are told of them."""

from typing import Any

import torch
from torch import Tensor, nn

from meshwright.parallel.fsdp import local_part
from meshwright.train.checkpoint.manifest import TrainPosition
from meshwright.train.data.sequences import Batch
from meshwright.train.hooks import StepDone


def make_batches(count: int) -> list[Batch]:
    """Micro batches of two random sequences of 32 tokens."""
    tokens = torch.randint(0, 257, (count, 2, 33))
    return [Batch(row[:, :-1], row[:, 1:]) for row in tokens]


def bits(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The bits of this rank's parameters and optimizer state, so that NaN equals itself."""
    state = [value for of_parameter in optimizer.state.values() for value in of_parameter.values()]
    parts = [local_part(x).detach().clone().contiguous() for x in (*model.parameters(), *state)]
    return [part.view(torch.int16 if part.dtype == torch.bfloat16 else torch.int32) for part in parts]


def step_done(
    step: int, result: Any = None, data: Any = None, first_sample: int = 0, last: bool = False
) -> StepDone:
    """What hooks are told after a step."""
    return StepDone(TrainPosition(step=step), first_sample, data, result, 3e-4, last)
