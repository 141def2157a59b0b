"""The process: its place among the others, its device, its threads and its process group."""

import logging
import os
from dataclasses import astuple, dataclass, field
from datetime import timedelta

import torch

from parallel.plan import PlanError
from train.allocator import use_expandable_segments
from train.bounds import bounded
from train.meeting import join
from train.watchdog import TimeoutConfig


@dataclass(frozen=True)
class RunConfig:
    """Where a run lives and how long.

    Args:
        dir: folder of the run, in which the same command goes on where it stopped. null: runs/ plus the config's name
        seed: seed of the initial weights and of the order of the data
        device: auto takes the GPU where every local process has one, else the CPU; or cpu, or cuda
        threads: CPU threads per process; 0 shares the cores among the local processes
        max_hours: stop after this many hours, saving first; 0 is never
        expandable_segments: on a GPU, let segments of allocated memory grow instead of leaving gaps between them; without
            effect where PYTORCH_CUDA_ALLOC_CONF or PYTORCH_ALLOC_CONF is set
        grace_s: seconds a stop may take after a signal, before the process ends without saving; torchrun allows its workers
            30, or what --shutdown-timeout (torch 2.13) says. Slurm: --signal=TERM@180
        timeouts: after which a section of the run counts as stuck
    """

    dir: str | None = None
    seed: int = bounded(0, low=0, high=2**63 - 1)
    device: str = "auto"
    threads: int = bounded(0, low=0, high=4096)
    expandable_segments: bool = True
    max_hours: float = bounded(0.0, low=0, high=1e6)
    grace_s: float = bounded(120.0, low=1, high=1e6)
    timeouts: TimeoutConfig = field(default_factory=TimeoutConfig)

    def __post_init__(self) -> None:
        if self.device not in ("auto", "cpu", "cuda"):
            raise ValueError(f"run.device={self.device} must be auto, cpu or cuda")


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


def read_place() -> Place:
    """Read the launcher's environment variables, here and nowhere else."""
    env = os.environ
    torchrun, slurm = (int(env.get(name, 0)) for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"))
    return Place(
        rank=int(env.get("RANK", 0)),
        world_size=int(env.get("WORLD_SIZE", 1)),
        local_rank=int(env.get("LOCAL_RANK", 0)),
        local_world_size=int(env.get("LOCAL_WORLD_SIZE", 1)),
        under_torchrun="TORCHELASTIC_RUN_ID" in env,
        restarts=torchrun + slurm, torchrun_restarts=torchrun)  # fmt: skip


def choose_device(config: RunConfig, place: Place) -> tuple[torch.device, str]:
    """The device of this process, and a sentence that says why. Raises PlanError where cuda is asked for in vain."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    enough = gpus >= place.local_world_size
    if config.device == "cuda" and not enough:
        raise PlanError(f"run.device=cuda needs {place.local_world_size} GPUs for as many local processes, here are "
                        f"{gpus}: start {max(gpus, 1)} per node, or use --run.device=cpu")  # fmt: skip
    if config.device == "cpu" or not enough:
        why = f"{gpus} GPUs for {place.local_world_size} local processes" if gpus else "no GPU"
        return torch.device("cpu"), f"CPU ({'asked for' if config.device == 'cpu' else why})"
    device = torch.device("cuda", place.local_rank)
    return device, torch.cuda.get_device_name(device)


def group_timeout(config: RunConfig) -> timedelta:
    """How long a collective may wait: longer than any section, so that the watchdog speaks first; a day where it never does."""
    return timedelta(days=1) if 0 in astuple(config.timeouts) else timedelta(seconds=max(astuple(config.timeouts)) + 60)


def start_process(config: RunConfig, place: Place, device: torch.device) -> None:
    """Set threads and device, and join the process group (alone too: the same code runs everywhere)."""
    if device.type == "cuda":
        if config.expandable_segments:
            use_expandable_segments()
        torch.cuda.set_device(device)
    else:  # it warns of a CUDA toolkit without a GPU, which is no fault here
        logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(config.threads or max(1, cores // place.local_world_size))
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    join(backend, group_timeout(config), alone=not place.under_torchrun and place.world_size == 1)
    torch.manual_seed(config.seed)
