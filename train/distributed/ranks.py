"""Rank information of this process, and helpers that exchange Python objects between ranks."""

import os
import socket
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from meshwright.parallel.plan.schema import Plan
from meshwright.parallel.plan.serialize import plan_to_yaml
from meshwright.train.config import Config
from meshwright.train.config_parser import keys_of
from meshwright.train.errors import USER_ERRORS, ConfigError


@dataclass(frozen=True)
class RankInfo:
    """Rank and world size of this process, as set by torchrun; a single process without torchrun."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    under_torchrun: bool
    launch: str = ""  # of torchrun: the same for what it starts again on this machine; "" without it
    requeued: bool = False  # Slurm has started this job again
    store_host: str = "rank 0"  # the process that hosts the rendezvous store

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    @property
    def machine(self) -> int:
        """The lowest rank on this machine, which identifies the machine: torchrun gives the processes of a
        machine consecutive ranks."""
        return self.rank - self.local_rank


ALONE = RankInfo(0, 1, 0, 1, False)
# the numbers that launchers set, and their values without a launcher
NUMBERS = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "SLURM_RESTART_COUNT": 0}
# The number of started tasks, by srun, Open MPI and other mpiruns. Not SLURM_NTASKS, which a plain command in
# a batch script has too.
TASKS = {"SLURM_STEP_NUM_TASKS": "srun", "OMPI_COMM_WORLD_SIZE": "mpirun", "PMI_SIZE": "mpirun"}


def read_rank_info(env: Mapping[str, str] = os.environ) -> RankInfo:
    """Return the RankInfo from the launcher's environment variables, which only this function reads. Raises
    ConfigError for variables with which this process could join no run, or would train beside others."""
    numbers = {
        name: _number(env, name, default) for name, default in {**NUMBERS, **dict.fromkeys(TASKS, 1)}.items()
    }
    if not dist.is_initialized():  # a loop of the user's may start its process group without them
        _check_launcher(env, numbers)
    under_torchrun = "TORCHELASTIC_RUN_ID" in env
    by_torchrun = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return RankInfo(
        rank=numbers["RANK"],
        world_size=numbers["WORLD_SIZE"],
        local_rank=numbers["LOCAL_RANK"],
        local_world_size=numbers["LOCAL_WORLD_SIZE"],
        under_torchrun=under_torchrun,
        launch=_launch(env["TORCHELASTIC_RUN_ID"]) if under_torchrun else "",
        requeued=numbers["SLURM_RESTART_COUNT"] > 0,
        store_host="torchrun on the first node" if by_torchrun else "rank 0",
    )


def _number(env: Mapping[str, str], name: str, default: int) -> int:
    text = env.get(name, str(default))
    if not (text.isascii() and text.isdecimal()):
        by_torchrun = (
            "" if name in TASKS or name.startswith("SLURM") else ", or start with torchrun, which sets it"
        )
        raise ConfigError(f"{name}={text!r} must be a number: unset it{by_torchrun}")
    return int(text)


def _check_launcher(env: Mapping[str, str], numbers: Mapping[str, int]) -> None:
    ranked = {"RANK", "WORLD_SIZE"} & env.keys()
    tasks, launcher = max((numbers[name], TASKS[name]) for name in TASKS)
    if tasks > 1 and not ranked:
        raise ConfigError(
            f"{launcher} has started {tasks} tasks without RANK, and each would train the whole model alone: "
            f"on one machine use one task, torchrun --nproc-per-node={tasks} -m train.main ..., on several "
            "configs/launch/slurm.sh, or configs/launch/nodes.sh once per machine (docs/cluster.md)"
        )
    needed = ["RANK", "WORLD_SIZE"]
    if numbers["WORLD_SIZE"] > 1:
        needed += ["MASTER_ADDR", "MASTER_PORT"]
        _number(env, "MASTER_PORT", 0)
    if ranked and (missing := [name for name in needed if not env.get(name)]):
        raise ConfigError(
            f"{' and '.join(sorted(ranked))} without {missing[0]}: start all ranks with torchrun, which sets "
            "RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or unset them for a single process"
        )
    if numbers["RANK"] >= numbers["WORLD_SIZE"]:
        raise ConfigError(f"RANK={numbers['RANK']} must be less than WORLD_SIZE={numbers['WORLD_SIZE']}")


def _launch(run_id: str) -> str:
    """Return what torchrun's attempts have in common: its run id, and the process that starts the workers."""
    return f"{run_id} {socket.gethostname()} {os.getppid()} {start_ticks(os.getppid())}"


def start_ticks(pid: int) -> int:
    """Return the clock ticks from the machine's boot to a process's start (proc(5), /proc/PID/stat, field
    22); 0 if unknown."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return 0


T = TypeVar("T")


def broadcast_from_rank0(ranks: RankInfo, make: Callable[[], T]) -> T:
    """Call `make` on rank 0 and return its result on every rank; every rank calls this. One of USER_ERRORS is
    raised on all ranks."""
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


def gather_from_all(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return the values of all ranks on every rank, exchanged on the host; every rank calls it. A process
    without a group is alone."""
    if not dist.is_initialized():
        return [value]
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, value, group=group)
    return gathered


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
    return {name: repr(value) for name, value, _ in keys if not name.endswith(("cache_dir", "run.threads"))}


def plan_lines(plan: Plan) -> dict[str, str]:
    """Return the lines of the plan's YAML, in which every auto of the config has a value."""
    text = plan_to_yaml(replace(plan, compile=replace(plan.compile, cache_dir=None)))
    return {f"line {number} of the plan": repr(line) for number, line in enumerate(text.splitlines(), 1)}


MOST_RANGES = 12  # of ranks that a message names


def as_ranges(ranks: Iterable[int]) -> str:
    """Return ranks as ranges, such as 0-2, 5; of many ranges the first ones and the number of ranks."""
    ranges = list[list[int]]()
    for rank in (ordered := sorted(set(ranks))):
        if ranges and rank == ranges[-1][-1] + 1:
            ranges[-1] = [ranges[-1][0], rank]
        else:
            ranges.append([rank])
    texts = ["-".join(map(str, ends)) for ends in ranges]
    if len(texts) > MOST_RANGES:
        return f"{', '.join(texts[:MOST_RANGES])}, ... ({len(ordered)} in all)"
    return ", ".join(texts)
