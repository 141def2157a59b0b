"""What one rank does for all."""

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from meshwright.parallel.plan.schema import Plan
from meshwright.parallel.plan.serialize import plan_to_yaml
from meshwright.train.config import USER_ERRORS, Config, ConfigError, keys_of
from meshwright.train.place import Place

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


def check_alike(place: Place, mine: Mapping[str, str]) -> None:
    """That every rank was started with rank 0's settings, or makes its plan of them. Raises ConfigError on
    all ranks, with the first difference: else each would train its part of the model in its own way."""
    box = [mine]
    dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
    (theirs,) = box
    different = [key for key in {**theirs, **mine} if mine.get(key) != theirs.get(key)][:1]
    mine_differs = "".join(
        f"{key} is {theirs.get(key)} on rank 0, {mine.get(key)} on rank {place.rank}" for key in different
    )
    said = [""] * place.world_size
    dist.all_gather_object(said, mine_differs)
    if others := [one for one in said if one]:
        raise ConfigError(
            f"the ranks were started with different settings: {others[0]} ({len(others)} of "
            f"{place.world_size} "
            "ranks differ from rank 0). Start all by the same command, with the same files; where auto means "
            "another thing on another kind of machine, give the key a value"
        )


def settings_of(config: Config) -> dict[str, str]:
    """Every key of the config, but those that nodes may have for themselves: folders of caches, and
    threads."""
    sections = {section.name: getattr(config, section.name) for section in fields(config)}
    return {
        name: repr(value)
        for section, own in sections.items()
        for name, value, _ in keys_of(own, section)
        if not name.endswith(("cache_dir", "run.threads"))
    }


def lines_of(plan: Plan) -> dict[str, str]:
    """The lines of the plan, in which what is auto in the config has a value."""
    text = plan_to_yaml(replace(plan, compile=replace(plan.compile, cache_dir=None)))
    return {f"line {number} of the plan": repr(line) for number, line in enumerate(text.splitlines(), 1)}


def with_restarts_of_all(place: Place) -> Place:
    """The place with the most restarts that any rank knows of: each node's launcher counts its own."""
    restarts = torch.tensor([place.restarts, place.torchrun_restarts])
    dist.all_reduce(restarts, op=dist.ReduceOp.MAX)
    most, torchrun = restarts.tolist()
    return replace(place, restarts=most, torchrun_restarts=torchrun)
