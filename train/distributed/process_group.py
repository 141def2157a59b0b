"""Process setup of a rank: limits, threads and cores, GPU allocator, and the process group, whose rendezvous
uses a part of the launcher's store that no earlier start has written to."""

import logging
import os
import time
import uuid
from collections.abc import Collection, Mapping
from dataclasses import astuple
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from meshwright.train.cgroups import processors
from meshwright.train.config import RunConfig
from meshwright.train.distributed.ranks import RankInfo, check_same_settings
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
    """The hardware threads of the core of `cpu`, the same text for all of them; without that file `cpu`
    itself."""
    try:
        return (
            (root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
            .read_text(encoding="ascii")
            .strip()
        )
    except OSError:
        return str(cpu)


POLL_S = 0.02


def init_process_group(backend: str, timeout: timedelta, alone: bool) -> None:
    """Initialize the process group; with `alone` a group of one, so that the same code runs without a
    launcher."""
    if alone:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
        return
    store, rank, world_size = next(rendezvous("env://", timeout=timeout))
    dist.init_process_group(
        backend,
        store=rendezvous_fresh_store(store, rank, world_size),
        rank=rank,
        world_size=world_size,
        timeout=timeout,
    )


def rendezvous_fresh_store(store: Store, rank: int, world_size: int) -> Store:
    """Return the store with a key prefix that is new for this start and equal on all ranks (all call it).

    torchrun (torch 2.13, elastic/rendezvous/dynamic_rendezvous.py) keeps one store for its workers over all
    restarts, and the entries of dead processes remain in it: gloo would connect to addresses where no process
    listens. TORCHELASTIC_RESTART_COUNT cannot be the prefix, because each node counts only its own failures.

    Rank 0 writes a random prefix. Each other rank writes a random token under the prefix it reads, and
    repeats this when the prefix changes, until rank 0 has confirmed its token: then both processes belong to
    this start.
    """
    if rank == 0:
        prefix = uuid.uuid4().hex
        store.set("start", prefix)
        for peer in range(1, world_size):
            store.set(f"{prefix}/greeted/{store.get(f'{prefix}/came/{peer}').decode()}", "")
        return PrefixStore(prefix, store)
    token, prefix = uuid.uuid4().hex, ""
    while not (prefix and store.check([f"{prefix}/greeted/{token}"])):
        if (current := store.get("start").decode()) != prefix:
            prefix = current
            store.set(f"{prefix}/came/{rank}", token)
        time.sleep(POLL_S)
    return PrefixStore(prefix, store)


def group_timeout(config: RunConfig) -> timedelta:
    """Timeout of a collective: longer than any timeout of the config, so that the watchdog reports first; one
    day if one of them is 0 (no timeout)."""
    return (
        timedelta(days=1)
        if 0 in astuple(config.timeouts)
        else timedelta(seconds=max(astuple(config.timeouts)) + 60)
    )


def start_process(config: RunConfig, ranks: RankInfo, device: torch.device) -> None:
    """Set limits, threads and device, and join the process group; a single process gets a group of one."""
    allow_open_files()
    if device.type == "cuda":
        if config.expandable_segments:
            use_expandable_segments()
        torch.cuda.set_device(device)
    else:  # torch would warn about a CUDA toolkit without a GPU, which is not an error here
        logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    # OMP_NUM_THREADS is ignored: torchrun sets it to 1 if it is unset.
    torch.set_num_threads(config.threads or max(1, usable_cores() // ranks.local_world_size))
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    init_process_group(
        backend, group_timeout(config), alone=not ranks.under_torchrun and ranks.world_size == 1
    )
    torch.manual_seed(config.seed)


def init_distributed(
    config: RunConfig, settings: Mapping[str, str], ranks: RankInfo, device: torch.device
) -> None:
    """Join the process group, unless this process has done so, and check that all ranks have the same
    settings. Raises ConfigError."""
    if not dist.is_initialized():
        start_process(config, ranks, device)
    check_same_settings(ranks, settings)
