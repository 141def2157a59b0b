"""Count what start-up costs a rank: the rendezvous of all ranks, as threads with one store, and the process
groups of one rank of a world of any size, whose gloo groups connect only when they are used."""

import copy
import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import HashStore, PrefixStore, ProcessGroupGloo  # type: ignore[attr-defined]
from torch.testing._internal.distributed import fake_pg  # noqa: F401  (registers the backend fake)

from meshwright.parallel.mesh import build_mesh, data_parallel_group
from meshwright.parallel.plan.schema import MeshPlan
from meshwright.tools.bench.ranks.counting_store import CountingStore, StoreTraffic
from meshwright.train.checkpoint.save import CheckpointSaver
from meshwright.train.config import CheckpointConfig, RunConfig
from meshwright.train.distributed.devices import ProcessFacts, compare_texts
from meshwright.train.distributed.process_group import connect_lazily, group_timeout
from meshwright.train.distributed.ranks import RankInfo
from meshwright.train.distributed.rendezvous import rendezvous
from meshwright.train.fault_tolerance.peers import PeerConnections
from meshwright.train.fault_tolerance.watchdog import Watchdog

GPUS_PER_NODE = 8
WAIT_S = 300.0  # for all threads of a rendezvous
STACK_BYTES = 256 * 2**10  # of a thread
# NCCL's part of a group is replaced by torch's fake backend; the gloo part is the real one
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:fake"}


@dataclass(frozen=True)
class PhaseCost:
    """The cost of a phase for a rank.

    Args:
        store_operations: by kind
        set_bytes, got_bytes: of the values in the store
        descriptors: of open files and sockets; a store in this process needs none
        store_connections: connections to the store
        groups: process groups
        cpu_s: CPU seconds
    """

    store_operations: Mapping[str, int]
    set_bytes: int
    got_bytes: int
    descriptors: int
    store_connections: int
    groups: int
    cpu_s: float


def count_rendezvous(world_size: int) -> dict[str, Any]:
    """Run the rendezvous of at least two ranks, each in a thread; return the operations and bytes of rank 0,
    the most of another rank, and the sums, and the CPU seconds of rank 0, which compares all ranks' facts.

    The CPU time of the others is not that of processes: this store wakes every waiting thread at each entry.
    """
    store, traffics, cpu_s = HashStore(), [StoreTraffic() for _ in range(world_size)], [0.0] * world_size
    verdicts = [""] * world_size

    def join(rank: int) -> None:
        counting, fact = CountingStore(store, traffics[rank]), json.dumps(asdict(make_facts(rank)))
        verdicts[rank] = rendezvous(counting, rank, world_size, fact, compare_texts)[1]
        cpu_s[rank] = time.thread_time()

    _run_threads(world_size, join)
    if len(set(verdicts)) > 1 or not verdicts[0]:
        raise RuntimeError(f"the rendezvous of {world_size} ranks ended with {len(set(verdicts))} verdicts")
    totals, sizes = [t.total for t in traffics], [t.set_bytes + t.got_bytes for t in traffics]
    return {
        "rank_0": {"store_operations": totals[0], "bytes": sizes[0], "cpu_s": cpu_s[0]},
        "other_ranks": {"store_operations": max(totals[1:]), "bytes": max(sizes[1:])},
        "all_ranks": {"store_operations": sum(totals), "bytes": sum(sizes)},
    }


def make_facts(rank: int) -> ProcessFacts:
    """Return the facts of a rank on a node with GPUs."""
    node, uuid = rank // GPUS_PER_NODE, f"00000000-0000-0000-0000-{rank:012d}"
    return ProcessFacts(f"node-{node:04d}", "cuda", "NVIDIA H100 80GB HBM3", uuid)


def _run_threads(count: int, work: Callable[[int], None]) -> None:
    earlier = threading.stack_size(STACK_BYTES)
    try:
        threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(count)]
        for thread in threads:
            thread.start()
    finally:
        threading.stack_size(earlier)
    deadline_s = time.monotonic() + WAIT_S
    for thread in threads:
        thread.join(max(0.0, deadline_s - time.monotonic()))
    if any(thread.is_alive() for thread in threads):
        raise RuntimeError(f"{count} threads did not end within {WAIT_S:g} s")


def count_groups(mesh: MeshPlan, rank: int, device_type: str, store: Any = None) -> dict[str, PhaseCost]:
    """Create the process groups of a run as `rank` of the mesh, and the watchdog's connection; return the
    cost of each phase. Without a `store` no other rank is needed. The process must not have a process group;
    afterwards it has none again."""
    traffic, costs, config = StoreTraffic(), dict[str, PhaseCost](), RunConfig()
    timeout, ranks = group_timeout(config), _rank_info(rank, mesh.world_size)
    counting = CountingStore(store or HashStore(), traffic)  # C++ keeps no reference to its Python half
    connect_lazily()
    model = nn.Linear(1, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    watchdog = Watchdog(config.timeouts, ranks, lambda message: None)
    with _counted("default group", traffic, costs):
        dist.init_process_group(
            BACKENDS[device_type],
            store=PrefixStore("start 1", counting),
            rank=rank,
            world_size=mesh.world_size,
            timeout=timeout,
        )
    try:
        with _counted("watchdog", traffic, costs):
            watchdog.connect()
        watchdog.close()
        with _counted("stop group", traffic, costs):  # as GracefulShutdown.connect, without its connections
            dist.new_group(backend="gloo", timeout=timeout)
        with _counted("mesh", traffic, costs):
            device_mesh = build_mesh(mesh, device_type, timeout)
        with _counted("data-parallel group", traffic, costs):
            data_parallel_group(device_mesh, timeout)
        with _counted("checkpoint group", traffic, costs):
            CheckpointSaver(
                CheckpointConfig(), Path(), model, optimizer, device_mesh, texts={}, group_timeout=timeout
            )
    finally:
        dist.destroy_process_group()
    return costs


def _rank_info(rank: int, world_size: int) -> RankInfo:
    local = min(GPUS_PER_NODE, world_size)
    return RankInfo(rank, world_size, rank % local, local, under_torchrun=True)


@contextmanager
def _counted(name: str, traffic: StoreTraffic, costs: dict[str, PhaseCost]) -> Iterator[None]:
    """Add the cost of the context to `costs`."""
    before = copy.deepcopy(traffic)
    descriptors, groups, start_s = _count_descriptors(), _count_groups(), time.process_time()
    yield
    cpu_s = time.process_time() - start_s
    costs[name] = PhaseCost(
        store_operations=dict(traffic.operations - before.operations),
        set_bytes=traffic.set_bytes - before.set_bytes,
        got_bytes=traffic.got_bytes - before.got_bytes,
        descriptors=_count_descriptors() - descriptors,
        store_connections=traffic.connections - before.connections,
        groups=_count_groups() - groups,
        cpu_s=cpu_s,
    )


def _count_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def _count_groups() -> int:
    return len(dist.distributed_c10d._world.pg_map)


def count_connections(world_size: int) -> dict[str, int]:
    """Connect two gloo groups of all ranks, each a thread, as a start does; return the most connections of a
    rank in each. A rank reads the address of a peer when it connects to it.

    default: a broadcast from rank 0 and an all-reduce (an all-gather uses the same ring). stop: the
    connections to the neighbors, and the all-reduce of each step.
    """
    connect_lazily()
    names = ("default", "stop")
    traffics = {name: [StoreTraffic() for _ in range(world_size)] for name in names}
    store = HashStore()
    stores = {name: [CountingStore(store, traffic) for traffic in traffics[name]] for name in names}
    kept, everyone = list[Any](), threading.Barrier(world_size)  # groups, until all ranks have finished

    def connect(rank: int) -> None:
        groups: dict[str, Any] = {
            name: ProcessGroupGloo(
                PrefixStore(name, stores[name][rank]), rank, world_size, timedelta(seconds=WAIT_S)
            )
            for name in names
        }
        kept.append(groups)
        groups["default"].broadcast(torch.zeros(1), 0).wait()
        groups["default"].allreduce([torch.zeros(1)]).wait()
        neighbors = PeerConnections(groups["stop"], lambda lost: None)
        groups["stop"].allreduce([torch.zeros(1)]).wait()
        neighbors.close(WAIT_S)
        everyone.wait()

    _run_threads(world_size, connect)
    return {name: max(traffic.operations["get"] for traffic in traffics[name]) for name in names}


def predict_connections(world_size: int, counted: Mapping[int, int]) -> int | None:
    """Return the connections of a rank in a larger world, if those of the counted worlds are linear in the
    logarithm of the world size, as of a tree, or constant; otherwise None."""
    (first, least), (second, more) = list(counted.items())[:2]
    slope = (more - least) / math.log2(second / first)

    def law(size: int) -> float:
        return least + slope * math.log2(size / first)

    exact = all(law(size) == connections for size, connections in counted.items())
    return math.ceil(law(world_size)) if exact else None
