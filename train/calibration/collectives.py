"""Time the collectives between the processes of a node, and fit the planner's formula to them.

The formula: a ring of n members takes n - 1 hops with equal latency (twice as many in an all-reduce), and
every member sends (n - 1) / n of the full tensor (twice as much in an all-reduce; in an all-to-all, of its
own tensor).
"""

import itertools
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from meshwright.parallel.planner.hardware import Curve, Link
from meshwright.train.calibration.timing import Run, make_interlude

ROUNDS = 3
ROTATED, ROTATED_BYTES = 8, 2**25  # tensors of an operation: at most, and together
WARM_UP_RUNS = 3
MIN_RUNS, MAX_RUNS = 5, 100


@dataclass(frozen=True)
class CollectiveTiming:
    """A timed collective: operation, number of ranks, bytes of the full tensor, and median seconds."""

    op: str
    members: int
    size_bytes: int
    seconds: float


def hops(op: str, members: int) -> int:
    """Return the number of consecutive steps of a ring collective."""
    return (members - 1) * (2 if op == "all_reduce" else 1)


def sent_bytes(op: str, members: int, size_bytes: float) -> float:
    """Return the bytes that each member of a ring sends."""
    return size_bytes * hops(op, members) / members


def fit_link(timings: Sequence[CollectiveTiming]) -> tuple[Link, float]:
    """Fit a link to timings. Returns the link (latency of a hop, best bandwidth, and its share by operation
    and number of members) and the mean relative error of the fit.

    The fit minimizes the squared relative errors of seconds = hops x latency + sent / bandwidth, with one
    latency for all and a bandwidth for each operation and number of members. A negative latency becomes 0.
    """
    groups = sorted({(t.op, t.members) for t in timings})
    rows = np.zeros((len(timings), 1 + len(groups)))
    for row, t in zip(rows, timings, strict=True):
        row[0] = hops(t.op, t.members) / t.seconds
        row[1 + groups.index((t.op, t.members))] = sent_bytes(t.op, t.members, t.size_bytes) / t.seconds
    solution = np.linalg.lstsq(rows, np.ones(len(rows)), rcond=None)[0]
    if solution[0] < 0:
        solution = np.concatenate(([0.0], np.linalg.lstsq(rows[:, 1:], np.ones(len(rows)), rcond=None)[0]))
    bytes_s = 1 / np.maximum(solution[1:], 1e-15)
    shares: dict[str, Curve] = {}
    for (op, members), share in zip(groups, bytes_s / bytes_s.max(), strict=True):
        shares[op] = (*shares.get(op, ()), (float(members), float(share)))
    error = float(np.abs(rows @ solution - 1).mean())
    return Link(float(bytes_s.max()) / 1e9, float(solution[0]), shares), error


def curves_of(timings: Sequence[CollectiveTiming]) -> dict[str, dict[int, Curve]]:
    """Return the seconds of each collective by number of ranks: a curve over the bytes."""
    by_op: dict[str, dict[int, Curve]] = {}
    for t in sorted(timings, key=lambda t: (t.op, t.members, t.size_bytes)):
        by_members = by_op.setdefault(t.op, {})
        by_members[t.members] = (*by_members.get(t.members, ()), (float(t.size_bytes), t.seconds))
    return by_op


def group_sizes(processes: int) -> list[int]:
    """Return the sizes of the groups that a mesh can have in a node: the divisors except 1."""
    return [size for size in range(2, processes + 1) if processes % size == 0]


def time_collectives(
    device: torch.device, local_processes: int, sizes_bytes: Sequence[int], budget_s: float
) -> list[CollectiveTiming]:
    """Time every collective at every size over groups of each possible number of processes of a node. All
    groups of a size run at the same time, and all processes of the run call this. Returns the same values on
    every rank.

    Args:
        budget_s: seconds of repetition of each collective, size and group
    """
    timings = []
    for members in group_sizes(local_processes):
        group, _ = dist.new_subgroups(members)
        runs = {
            (op, members, size_bytes): run
            for size_bytes in sizes_bytes
            for op, run in _collectives(device, size_bytes, members, group).items()
        }
        times: dict[tuple[str, int, int], list[float]] = {key: [] for key in runs}
        for _ in range(ROUNDS):  # in turn, so that a disturbance of the machine affects few of them
            for key, run in runs.items():
                times[key] += _seconds(run, device, budget_s / ROUNDS)
        timings += [CollectiveTiming(*key, statistics.median(seconds)) for key, seconds in times.items()]
        dist.destroy_process_group(group)
    return timings


def _collectives(
    device: torch.device, size_bytes: int, members: int, group: dist.ProcessGroup
) -> dict[str, Run]:
    """Return the collectives by name, on flat float32 tensors as FSDP2 issues them: into new memory, from
    tensors that are used in turn, and on zeros, so that repeated sums stay finite."""
    values = max(1, size_bytes // 4 // members)
    rotated = max(2, min(ROTATED, ROTATED_BYTES // size_bytes))
    wholes, parts = (
        itertools.cycle([torch.zeros(n, device=device) for _ in range(rotated)])
        for n in (values * members, values)
    )

    def all_gather() -> None:
        part = next(parts)
        dist.all_gather_into_tensor(part.new_empty(values * members), part, group)

    def reduce_scatter() -> None:
        whole = next(wholes)
        dist.reduce_scatter_tensor(whole.new_empty(values), whole, group=group)

    def all_to_all() -> None:
        whole = next(wholes)
        dist.all_to_all_single(whole.new_empty(values * members), whole, group=group)

    return {
        "all_gather": all_gather,
        "reduce_scatter": reduce_scatter,
        "all_to_all": all_to_all,
        "all_reduce": lambda: dist.all_reduce(next(wholes), group=group),
    }


def _seconds(run: Run, device: torch.device, budget_s: float) -> list[float]:
    """Return the mean seconds over the ranks of each repetition. All ranks compute the same means, so they
    repeat equally often."""
    interlude = make_interlude(device, dist.get_world_size())
    first_s = statistics.median(_times(run, interlude, device, WARM_UP_RUNS))
    return _times(run, interlude, device, max(MIN_RUNS, min(MAX_RUNS, int(budget_s / first_s))))


def _times(run: Run, interlude: Run, device: torch.device, count: int) -> list[float]:
    times = []
    dist.barrier()
    for _ in range(count):
        interlude()
        started_at = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - started_at)
    mean = torch.tensor(times, dtype=torch.float64, device=device)
    dist.all_reduce(mean)
    return (mean / dist.get_world_size()).tolist()
