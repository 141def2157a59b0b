"""The rank of this process among the others, its device, and what one rank does for all."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from meshwright.parallel.errors import PlanError
from meshwright.parallel.plan.schema import Plan
from meshwright.parallel.plan.serialize import plan_to_yaml
from meshwright.train.config import Config, RunConfig
from meshwright.train.config_parser import keys_of
from meshwright.train.errors import USER_ERRORS, ConfigError


@dataclass(frozen=True)
class RankInfo:
    """This process among the others, as torchrun tells it; alone without torchrun."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    under_torchrun: bool
    restarts: int = 0  # how often torchrun or Slurm has started the run again by itself
    torchrun_restarts: int = 0  # and of these torchrun alone
    store_keeper: str = "rank 0"  # whose process keeps the store that the ranks meet at

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def machine(self) -> int:
        """The lowest rank on this machine, whose ranks follow one another, as torchrun numbers them: a number
        of its own."""
        return self.rank - self.local_rank


def read_rank_info() -> RankInfo:
    """Read the launcher's environment variables, here and nowhere else."""
    env = os.environ
    torchrun, slurm = (
        int(env.get(name, 0)) for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
    )
    by_torchrun = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return RankInfo(
        rank=int(env.get("RANK", 0)),
        world_size=int(env.get("WORLD_SIZE", 1)),
        local_rank=int(env.get("LOCAL_RANK", 0)),
        local_world_size=int(env.get("LOCAL_WORLD_SIZE", 1)),
        under_torchrun="TORCHELASTIC_RUN_ID" in env,
        restarts=torchrun + slurm,
        torchrun_restarts=torchrun,
        store_keeper="torchrun on the first node" if by_torchrun else "rank 0",
    )


def choose_device(config: RunConfig, ranks: RankInfo) -> tuple[torch.device, str]:
    """The device of this process, and a sentence that says why. Raises PlanError where cuda is asked for in
    vain."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    enough = gpus >= ranks.local_world_size
    if config.device == "cuda" and not enough:
        raise PlanError(
            f"run.device=cuda needs {ranks.local_world_size} GPUs for as many local processes, here are "
            f"{gpus}: start {max(gpus, 1)} per node, or use --run.device=cpu"
        )
    if config.device == "cpu" or not enough:
        why = f"{gpus} GPUs for {ranks.local_world_size} local processes" if gpus else "no GPU"
        return torch.device("cpu"), f"CPU ({'asked for' if config.device == 'cpu' else why})"
    device = torch.device("cuda", ranks.local_rank)
    return device, torch.cuda.get_device_name(device)


T = TypeVar("T")


def broadcast_from_rank0(ranks: RankInfo, make: Callable[[], T]) -> T:
    """What rank 0 makes, on every rank; every rank calls it. What the user did wrong is raised on all of
    them alike."""
    made: list[Any] = [None]
    if ranks.is_main:
        try:
            made = [make()]
        except USER_ERRORS as error:
            made = [error]
    dist.broadcast_object_list(made, src=0, device=torch.device("cpu"))
    if isinstance(made[0], USER_ERRORS):
        raise made[0]
    return made[0]  # type: ignore[no-any-return]


def gather_from_all(mine: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """What each rank has, on every rank, exchanged on the host; every rank calls it."""
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, mine, group=group)
    return gathered


def check_alike(ranks: RankInfo, mine: Mapping[str, str]) -> None:
    """That every rank was started with rank 0's settings, or makes its plan of them. Raises ConfigError on
    all ranks, with the first difference: else each would train its part of the model in its own way."""
    box = [mine]
    dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
    (theirs,) = box
    different = [key for key in {**theirs, **mine} if mine.get(key) != theirs.get(key)][:1]
    mine_differs = "".join(
        f"{key} is {theirs.get(key)} on rank 0, {mine.get(key)} on rank {ranks.rank}" for key in different
    )
    if others := [one for one in gather_from_all(mine_differs) if one]:
        raise ConfigError(
            f"the ranks were started with different settings: {others[0]} ({len(others)} of "
            f"{ranks.world_size} ranks differ from rank 0). Start all by the same command, with the same "
            "files; where auto means another thing on another kind of machine, give the key a value"
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


def with_restarts_of_all(ranks: RankInfo) -> RankInfo:
    """The place with the most restarts that any rank knows of: each node's launcher counts its own."""
    restarts = torch.tensor([ranks.restarts, ranks.torchrun_restarts])
    dist.all_reduce(restarts, op=dist.ReduceOp.MAX)
    most, torchrun = restarts.tolist()
    return replace(ranks, restarts=most, torchrun_restarts=torchrun)
