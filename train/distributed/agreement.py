"""What the ranks tell each other on the host, so that all of them do the same."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from itertools import chain
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from meshwright.parallel.mesh import gather_from_all
from meshwright.parallel.plan.schema import Plan
from meshwright.parallel.plan.serialize import plan_to_yaml
from meshwright.train.config import Config
from meshwright.train.config_keys import keys_of
from meshwright.train.distributed.ranks import RankInfo
from meshwright.train.errors import USER_ERRORS, ConfigError

T = TypeVar("T")


def broadcast_from_rank0(ranks: RankInfo, make: Callable[[], T], meanwhile: Iterable[object] = ()) -> T:
    """Call `make` on rank 0 and return its result on every rank; every rank calls this. One of USER_ERRORS is
    raised on all ranks. `meanwhile`: what this rank does, step by step, as long as rank 0 has not made it."""
    made: list[Any] = [None]
    if ranks.is_main:
        try:
            made = [make()]
        except USER_ERRORS as error:
            made = [error]
    is_made = dist.broadcast(torch.empty(1), src=0, async_op=True)
    for _ in meanwhile:
        if is_made.is_completed():
            break
    is_made.wait()
    dist.broadcast_object_list(made, src=0, device=torch.device("cpu"))
    if isinstance(made[0], USER_ERRORS):
        raise made[0]
    return made[0]  # type: ignore[no-any-return]


def on_all_ranks(work: Callable[[], T]) -> T:
    """Call `work` on every rank and return its result; every rank calls this. One of USER_ERRORS on any rank
    is raised on all ranks: the others would wait for that rank in the next collective."""
    results, failures = list[T](), list[Exception]()
    try:
        results.append(work())
    except USER_ERRORS as error:
        failures.append(error)
    for failure in chain.from_iterable(gather_from_all(failures)):
        raise failure
    return results[0]


def check_same_settings(ranks: RankInfo, local: Mapping[str, str]) -> None:
    """Check that every rank has the settings, or the plan, of rank 0; otherwise the ranks would train the
    parts of the model differently. Raises ConfigError with the first difference on all ranks."""
    main = broadcast_from_rank0(ranks, lambda: local)
    differences = [
        f"{key} is {main.get(key)} on rank 0, {local.get(key)} on rank {ranks.rank}"
        for key in {**main, **local}
        if local.get(key) != main.get(key)
    ][:1]
    if differences := [*chain.from_iterable(gather_from_all(differences))]:
        raise ConfigError(
            f"the ranks were started with different settings: {differences[0]} ({len(differences)} of "
            f"{ranks.world_size} ranks differ from rank 0). Start all ranks with the same command and the "
            "same files; if auto resolves differently on different machines, set the key"
        )


def comparable_settings(config: Config) -> dict[str, str]:
    """Return every key of the config with its value, except those that may differ between nodes: cache
    folders and threads."""
    keys = keys_of(config, "")
    return {name: repr(value) for name, value in keys if not name.endswith(("cache_dir", "run.threads"))}


def plan_lines(plan: Plan) -> dict[str, str]:
    """Return the lines of the plan's YAML, in which every auto of the config has a value."""
    text = plan_to_yaml(replace(plan, compile=replace(plan.compile, cache_dir=None)))
    return {f"line {number} of the plan": repr(line) for number, line in enumerate(text.splitlines(), 1)}
