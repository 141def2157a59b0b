"""Steps as hooks are told of them."""

from typing import Any

from meshwright.train.checkpoint.manifest import TrainPosition
from meshwright.train.hooks import StepDone


def step_done(
    step: int, result: Any = None, data: Any = None, first_sample: int = 0, last: bool = False
) -> StepDone:
    """What hooks are told after a step."""
    return StepDone(TrainPosition(step=step), first_sample, data, result, 3e-4, last)
