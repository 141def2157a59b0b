"""What one rank does for all."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from train.config import USER_ERRORS, ConfigError
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


def check_alike(place: Place, settings: Mapping[str, object]) -> None:
    """That every rank was started with rank 0's settings, in the words of repr. Raises ConfigError on all of them, with the first
    that differs: else each rank would train its part of the model in its own way."""
    mine = {key: repr(value) for key, value in settings.items()}
    box = [mine]
    dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
    (theirs,) = box
    different = [key for key in {**theirs, **mine} if mine.get(key) != theirs.get(key)][:1]
    mine_differs = "".join(f"{key} is {theirs.get(key)} on rank 0, {mine.get(key)} on rank {place.rank}" for key in different)
    said = [""] * place.world_size
    dist.all_gather_object(said, mine_differs)
    if others := [one for one in said if one]:
        raise ConfigError(f"the ranks were started with different settings: {others[0]} (so {len(others)} of {place.world_size} "
                          "ranks). Start them all by the same command, with the same files on every node")  # fmt: skip


def with_restarts_of_all(place: Place) -> Place:
    """The place with the most restarts that any rank knows of: each node's launcher counts its own."""
    restarts = torch.tensor([place.restarts, place.torchrun_restarts])
    dist.all_reduce(restarts, op=dist.ReduceOp.MAX)
    most, torchrun = restarts.tolist()
    return replace(place, restarts=most, torchrun_restarts=torchrun)
