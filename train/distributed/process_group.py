"""The process of a rank: its limits, its threads and cores, its allocator, and its process group, which meets
in a part of the launcher's store that no earlier start has written into."""

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
from meshwright.train.distributed.ranks import RankInfo, check_alike
from meshwright.train.files import allow_open_files

# what torch reads at the first use of the allocator
VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def use_expandable_segments() -> bool:
    """Let the allocator's segments grow in place, before anything is allocated on the GPU; False where one of
    VARIABLES is set, which then alone decides.

    A segment that can grow leaves no gaps too small for the next request: memory that is reserved and not
    allocated, of which sharded training has much, because units of different sizes are gathered and freed all
    the time
    (https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-alloc-conf).
    """
    if any(name in os.environ for name in VARIABLES):
        return False
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    return True


def usable_cores(root: Path = Path("/"), cpus: Collection[int] | None = None) -> int:
    """Cores, of which two hardware threads share one: a second thread on a core gains matrix products
    nothing.

    Counted are those of `cpus`, by default what the scheduler lets this process run on, and no more than a
    container's quota of processor time amounts to, rounded up. `root`: where /proc and /sys are.
    """
    cpus = _allowed() if cpus is None else cpus
    cores = len({_siblings(root, cpu) for cpu in cpus})
    return max(1, min(cores, processors(root) or cores))


def usable_threads() -> int:
    """Hardware threads that this process may use at a time: for work that gains from both of a core, as that
    of text."""
    return min(len(_allowed()), processors() or len(_allowed()))


def _allowed() -> Collection[int]:
    """The hardware threads that the scheduler lets this process run on."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)


def _siblings(root: Path, cpu: int) -> str:
    """The hardware threads of this one's core, the same text for each of them; where nothing says so,
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
    """Make the process group of this start; of one process if `alone`, so that the same code runs
    everywhere."""
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
    """The same store under a new name of this start's own, the same on every rank; all ranks call it.

    torchrun (torch 2.13, elastic/rendezvous/dynamic_rendezvous.py) keeps one store for its workers over all
    restarts, and what the dead have left in it is taken for the living's: gloo connects to addresses that
    nobody listens at any more. TORCHELASTIC_RESTART_COUNT is no name for a start, as each node counts its own
    failures only.

    Rank 0 makes up a name; each other rank answers to the name it reads there, and begins again when that
    changes, until rank 0 has greeted it by a word of its own: then both live.
    """
    if rank == 0:
        name = uuid.uuid4().hex
        store.set("start", name)
        for other in range(1, world_size):
            store.set(f"{name}/greeted/{store.get(f'{name}/came/{other}').decode()}", "")
        return PrefixStore(name, store)
    word, name = uuid.uuid4().hex, ""
    while not (name and store.check([f"{name}/greeted/{word}"])):
        if (now := store.get("start").decode()) != name:
            name = now
            store.set(f"{name}/came/{rank}", word)
        time.sleep(POLL_S)
    return PrefixStore(name, store)


def group_timeout(config: RunConfig) -> timedelta:
    """How long a collective may wait: longer than any section, so that the watchdog speaks first; a day where
    it never does."""
    return (
        timedelta(days=1)
        if 0 in astuple(config.timeouts)
        else timedelta(seconds=max(astuple(config.timeouts)) + 60)
    )


def start_process(config: RunConfig, ranks: RankInfo, device: torch.device) -> None:
    """Set limits, threads and device, and join the process group (alone too: the same code runs
    everywhere)."""
    allow_open_files()
    if device.type == "cuda":
        if config.expandable_segments:
            use_expandable_segments()
        torch.cuda.set_device(device)
    else:  # it warns of a CUDA toolkit without a GPU, which is no fault here
        logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    # OMP_NUM_THREADS does not count: torchrun sets it to 1 where nobody else has.
    torch.set_num_threads(config.threads or max(1, usable_cores() // ranks.local_world_size))
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    init_process_group(
        backend, group_timeout(config), alone=not ranks.under_torchrun and ranks.world_size == 1
    )
    torch.manual_seed(config.seed)


def init_distributed(
    config: RunConfig, settings: Mapping[str, str], ranks: RankInfo, device: torch.device
) -> None:
    """Join the other ranks, unless that is done, which must have been started with the same settings. Raises
    ConfigError."""
    if not dist.is_initialized():
        start_process(config, ranks, device)
    check_alike(ranks, settings)
