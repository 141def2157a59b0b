"""How fast collectives are between the devices of a node: timed at several sizes, then latency and bandwidth
fitted.

The model is the planner's: a ring of n members takes n - 1 hops (an all-reduce twice as many), each with the
same latency, and every member sends its part of the full side, (n - 1) / n of it (twice in an all-reduce).
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

GPU_SIZES_BYTES = tuple(2**power for power in range(14, 31, 2))  # 16 KiB to 1 GiB
# 16 KiB to 16 MiB: the layers of small models
CPU_SIZES_BYTES = (2**14, 2**17, *(2**power for power in range(19, 25)))
QUICK_SIZES_BYTES = (2**14, 2**18, 2**22)
WARM_UP_RUNS = 3
BUDGET_S = 0.3  # that each collective of each size is repeated for
MIN_RUNS, MAX_RUNS = 5, 100


@dataclass(frozen=True)
class Timing:
    """One collective: its operation, the ranks that take part, the bytes of its full side, and its seconds
    (median)."""

    op: str
    members: int
    size_bytes: int
    seconds: float


@dataclass(frozen=True)
class LinkFit:
    """Latency of a hop, bandwidth by operation and number of members, and the fit's mean error relative to
    the timings."""

    latency_s: float
    bytes_s: Mapping[str, Mapping[int, float]]
    mean_error: float


def hops(op: str, members: int) -> int:
    """Steps of a ring, one after the other."""
    return (members - 1) * (2 if op == "all_reduce" else 1)


def sent_bytes(op: str, members: int, size_bytes: float) -> float:
    """What each member of a ring sends."""
    return size_bytes * hops(op, members) / members


def fit_link(timings: Sequence[Timing]) -> LinkFit:
    """Least squares of the relative errors of seconds = hops x latency + sent / bandwidth, one latency for
    all, a bandwidth for each operation and number of members. A negative latency becomes 0."""
    groups = sorted({(t.op, t.members) for t in timings})
    rows = np.zeros((len(timings), 1 + len(groups)))
    for row, t in zip(rows, timings, strict=True):
        row[0] = hops(t.op, t.members) / t.seconds
        row[1 + groups.index((t.op, t.members))] = sent_bytes(t.op, t.members, t.size_bytes) / t.seconds
    solution = np.linalg.lstsq(rows, np.ones(len(rows)), rcond=None)[0]
    if solution[0] < 0:
        solution = np.concatenate(([0.0], np.linalg.lstsq(rows[:, 1:], np.ones(len(rows)), rcond=None)[0]))
    bytes_s: dict[str, dict[int, float]] = {}
    for (op, members), seconds_per_byte in zip(groups, solution[1:], strict=True):
        bytes_s.setdefault(op, {})[members] = 1 / max(seconds_per_byte, 1e-15)
    return LinkFit(float(solution[0]), bytes_s, float(np.abs(rows @ solution - 1).mean()))


def measure_collectives(device: torch.device, sizes_bytes: Sequence[int]) -> list[Timing]:
    """Every collective at every size over all ranks of the process group; every rank returns the same."""
    members = dist.get_world_size()
    timings = []
    for size_bytes in sizes_bytes:
        for op, run in _collectives(device, size_bytes).items():
            timings.append(Timing(op, members, size_bytes, _seconds(run, device)))
    return timings


def _collectives(device: torch.device, size_bytes: int) -> dict[str, Callable[[], Any]]:
    """In float32 and on flat tensors, as FSDP2 issues them; of zeros, so that sums of sums stay finite."""
    members = dist.get_world_size()
    full, part = (torch.zeros(size_bytes // 4 // n, device=device) for n in (1, members))
    return {
        "all_gather": lambda: dist.all_gather_into_tensor(full, part),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, full),
        "all_reduce": lambda: dist.all_reduce(full),
    }


def _seconds(run: Callable[[], Any], device: torch.device) -> float:
    """Median of the repetitions, of each the mean over the ranks: all wait for each other, and agree on the
    number."""
    _times(run, device, WARM_UP_RUNS)
    first_s = statistics.median(_times(run, device, 3))
    return statistics.median(_times(run, device, max(MIN_RUNS, min(MAX_RUNS, int(BUDGET_S / first_s)))))


def _times(run: Callable[[], Any], device: torch.device, count: int) -> list[float]:
    times = []
    dist.barrier()
    for _ in range(count):
        started_at = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - started_at)
    mean = torch.tensor(times, dtype=torch.float64, device=device)
    dist.all_reduce(mean)
    return (mean / dist.get_world_size()).tolist()
