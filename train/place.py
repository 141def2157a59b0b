"""The place of this process among the others, and its device."""

import os
from dataclasses import dataclass

import torch

from meshwright.parallel.errors import PlanError
from meshwright.train.run_config import RunConfig


@dataclass(frozen=True)
class Place:
    """This process among the others, as torchrun tells it; alone without torchrun."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    under_torchrun: bool
    restarts: int = 0  # how often torchrun or Slurm has started the run again by itself
    torchrun_restarts: int = 0  # and of these torchrun alone

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def machine(self) -> int:
        """The lowest rank on this machine, whose ranks follow one another, as torchrun numbers them: a number
        of its own."""
        return self.rank - self.local_rank


def read_place() -> Place:
    """Read the launcher's environment variables, here and nowhere else."""
    env = os.environ
    torchrun, slurm = (
        int(env.get(name, 0)) for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
    )
    return Place(
        rank=int(env.get("RANK", 0)),
        world_size=int(env.get("WORLD_SIZE", 1)),
        local_rank=int(env.get("LOCAL_RANK", 0)),
        local_world_size=int(env.get("LOCAL_WORLD_SIZE", 1)),
        under_torchrun="TORCHELASTIC_RUN_ID" in env,
        restarts=torchrun + slurm,
        torchrun_restarts=torchrun,
    )


def choose_device(config: RunConfig, place: Place) -> tuple[torch.device, str]:
    """The device of this process, and a sentence that says why. Raises PlanError where cuda is asked for in
    vain."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    enough = gpus >= place.local_world_size
    if config.device == "cuda" and not enough:
        raise PlanError(
            f"run.device=cuda needs {place.local_world_size} GPUs for as many local processes, here are "
            f"{gpus}: start {max(gpus, 1)} per node, or use --run.device=cpu"
        )
    if config.device == "cpu" or not enough:
        why = f"{gpus} GPUs for {place.local_world_size} local processes" if gpus else "no GPU"
        return torch.device("cpu"), f"CPU ({'asked for' if config.device == 'cpu' else why})"
    device = torch.device("cuda", place.local_rank)
    return device, torch.cuda.get_device_name(device)
