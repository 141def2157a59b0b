"""Who this process is among the ranks, as its launcher says. Imports no torch."""

import os
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from meshwright.train.errors import ConfigError


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


def read_rank_info(env: Mapping[str, str] = os.environ, has_group: bool = False) -> RankInfo:
    """Return the RankInfo from the launcher's environment variables, which only this function reads. Raises
    ConfigError for variables with which this process could join no run, or would train beside others, unless
    it `has_group`: a loop of the user's may start its process group without them."""
    numbers = {
        name: _number(env, name, default) for name, default in {**NUMBERS, **dict.fromkeys(TASKS, 1)}.items()
    }
    if not has_group:
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
