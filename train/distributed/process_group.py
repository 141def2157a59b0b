"""Process setup of a rank: limits, threads and cores, GPU allocator, and the process group."""

import json
import logging
import os
from collections.abc import Collection, Mapping
from dataclasses import asdict, astuple
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous as launcher_rendezvous

from meshwright.train.cgroups import processors
from meshwright.train.config import RunConfig
from meshwright.train.distributed.devices import Comparison, ProcessFacts, compare_texts, read_facts
from meshwright.train.distributed.ranks import RankInfo, check_same_settings
from meshwright.train.distributed.rendezvous import rendezvous, wait_until_read
from meshwright.train.errors import ConfigError
from meshwright.train.files import allow_open_files

# torch reads these at the first use of the allocator
VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def use_expandable_segments() -> bool:
    """Let the allocator's segments grow in place; call it before the first GPU allocation. Returns False, and
    changes nothing, if one of VARIABLES is set.

    Growing segments avoid fragmentation: gaps of reserved memory that are too small for the next request.
    Sharded training fragments memory, because it gathers and frees units of different sizes all the time
    (https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-alloc-conf).
    """
    if any(name in os.environ for name in VARIABLES):
        return False
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    return True


def usable_cores(root: Path = Path("/"), cpus: Collection[int] | None = None) -> int:
    """Number of physical cores that this process may use. Hardware threads of one core count once, because a
    second thread on a core does not speed up matrix products.

    Counts the cores of `cpus`, by default the CPUs of the process's affinity, up to the container's CPU
    quota, rounded up. `root`: folder that contains /proc and /sys.
    """
    cpus = _affinity() if cpus is None else cpus
    cores = len({_thread_siblings(root, cpu) for cpu in cpus})
    return max(1, min(cores, processors(root) or cores))


def usable_threads() -> int:
    """Number of hardware threads that this process may use, for work that gains from both threads of a core,
    such as text processing."""
    return min(len(_affinity()), processors() or len(_affinity()))


def _affinity() -> Collection[int]:
    """The hardware threads on which the scheduler may run this process."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)


def _thread_siblings(root: Path, cpu: int) -> str:
    """The hardware threads of the core of `cpu`, the same text for all; without that file `cpu` itself."""
    try:
        return (
            (root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
            .read_text(encoding="ascii")
            .strip()
        )
    except OSError:
        return str(cpu)


def init_process_group(backend: str, timeout: timedelta, facts: ProcessFacts | None = None) -> Comparison:
    """Initialize the process group after a comparison of the `facts` of all ranks, and return it; without
    `facts` a group of one, so that the same code runs without a launcher. Raises ConfigError on all ranks if
    they cannot train together."""
    if facts is None:
        own = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=own, rank=0, world_size=1, timeout=timeout)
        return Comparison()
    launcher_store, rank, world_size = next(launcher_rendezvous("env://", timeout=timeout))
    store, verdict = rendezvous(launcher_store, rank, world_size, json.dumps(asdict(facts)), compare_texts)
    comparison = Comparison(**json.loads(verdict))
    if comparison.error:
        wait_until_read(store, rank, world_size)
        raise ConfigError(comparison.error)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    return comparison


def connect_lazily() -> None:
    """Let the ranks of gloo groups connect when they first exchange data. Otherwise each rank connects to all
    others in every group, and the addresses in the store grow with the square of the world size."""
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")


def group_timeout(config: RunConfig) -> timedelta:
    """Timeout of a collective: longer than any timeout of the config, so that the watchdog reports first; one
    day if one of them is 0 (no timeout)."""
    return (
        timedelta(days=1)
        if 0 in astuple(config.timeouts)
        else timedelta(seconds=max(astuple(config.timeouts)) + 60)
    )


def start_process(config: RunConfig, ranks: RankInfo, device: torch.device) -> list[str]:
    """Set limits, threads and device, and join the process group; a single process gets a group of one.
    Returns warnings about the devices of the ranks. Raises ConfigError."""
    allow_open_files()
    if device.type == "cuda":
        if config.expandable_segments:
            use_expandable_segments()
        torch.cuda.set_device(device)
    else:  # torch would warn about a CUDA toolkit without a GPU, which is not an error here
        logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    # OMP_NUM_THREADS is ignored: torchrun sets it to 1 if it is unset.
    torch.set_num_threads(config.threads or max(1, usable_cores() // ranks.local_world_size))
    connect_lazily()
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    alone = not ranks.under_torchrun and ranks.world_size == 1
    comparison = init_process_group(backend, group_timeout(config), None if alone else read_facts(device))
    return [comparison.warning] if comparison.warning else []


def init_distributed(
    config: RunConfig, settings: Mapping[str, str], ranks: RankInfo, device: torch.device
) -> list[str]:
    """Join the process group, unless this process has done so, and check that all ranks have the same
    settings. Returns the warnings of `start_process`. Raises ConfigError."""
    warnings = [] if dist.is_initialized() else start_process(config, ranks, device)
    check_same_settings(ranks, settings)
    return warnings
