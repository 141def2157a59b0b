"""Where the processes of one start meet: a part of the launcher's store that no earlier start has written
into."""

import time
import uuid
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

POLL_S = 0.02


def join(backend: str, timeout: timedelta, alone: bool) -> None:
    """Make the process group of this start; of one process if `alone`, so that the same code runs
    everywhere."""
    if alone:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
        return
    store, rank, world_size = next(rendezvous("env://", timeout=timeout))
    dist.init_process_group(
        backend, store=meet(store, rank, world_size), rank=rank, world_size=world_size, timeout=timeout
    )


def meet(store: Store, rank: int, world_size: int) -> Store:
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
