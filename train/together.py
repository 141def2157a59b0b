"""What one rank does for all."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from train.config import USER_ERRORS
from train.place import Place

T = TypeVar("T")


def from_main(place: Place, make: Callable[[], T]) -> T:
    """What rank 0 makes, on every rank; every rank calls it. What the user did wrong is raised on all of
    them alike."""
    made: list[Any] = [None]
    if place.is_main:
        try:
            made = [make()]
        except USER_ERRORS as error:
            made = [error]
    dist.broadcast_object_list(made, src=0, device=torch.device("cpu"))
    if isinstance(made[0], USER_ERRORS):
        raise made[0]
    return made[0]  # type: ignore[no-any-return]


def with_restarts_of_all(place: Place) -> Place:
    """The place with the most restarts that any rank knows of: each node's launcher counts its own."""
    restarts = torch.tensor([place.restarts, place.torchrun_restarts])
    dist.all_reduce(restarts, op=dist.ReduceOp.MAX)
    most, torchrun = restarts.tolist()
    return replace(place, restarts=most, torchrun_restarts=torchrun)
