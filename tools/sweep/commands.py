"""The commands that a sweep starts, or prints."""

import os
import shlex
import sys
from collections.abc import Iterable, Sequence

from meshwright.tools.sweep.planned import Planned
from meshwright.train.errors import ConfigError

SLURM_SCRIPT = "configs/launch/slurm.sh"
LAUNCHER = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
)


def run_command(planned: Planned) -> list[str]:
    """The run on this machine: through torchrun, unless it is one process."""
    main = ["-m", "meshwright.train.main", *planned.arguments]
    if planned.world_size == 1:
        return [sys.executable, *main]
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={planned.cell.processes}",
        *main,
    ]


def run_environment(planned: Planned) -> dict[str, str]:
    """This process's, without what a launcher of its own has put there. torchrun (from torch 2.13 on) leaves
    the workers as long to save in as they allow themselves, instead of 30 s."""
    kept = {name: value for name, value in os.environ.items() if name not in LAUNCHER}
    return {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(round(planned.config.run.grace_s)), **kept}


def slurm_command(planned: Planned) -> list[str]:
    """The run as a Slurm job of its own."""
    cell, (config, *arguments) = planned.cell, planned.arguments
    place = [
        f"--job-name={cell.name}",
        f"--nodes={cell.nodes}",
        "--ntasks-per-node=1",
        f"--gpus-per-node={cell.processes}",
    ]
    return ["sbatch", *place, SLURM_SCRIPT, config.removeprefix("--config="), *arguments]


def as_lines(commands: Iterable[Sequence[str]]) -> str:
    """Each on a line of its own, as a shell takes it."""
    return "\n".join(shlex.join(command) for command in commands)


def refuse_nodes(planned: Sequence[Planned]) -> None:
    """ConfigError for runs on several nodes, which nobody can start from one."""
    if names := [one.cell.name for one in planned if one.cell.nodes > 1]:
        raise ConfigError(
            f"nodes is more than 1 for {', '.join(names[:3])}: a sweep starts processes on this machine "
            f"only. "
            "Use --slurm, which prints a job for each run"
        )
