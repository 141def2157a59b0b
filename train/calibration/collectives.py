"""Time the collectives between the processes of a node, and fit the planner's formula to them.

The formula: a ring of n members takes n - 1 hops with equal latency (twice as many in an all-reduce), and
every member sends (n - 1) / n of the full tensor (twice as much in an all-reduce; in an all-to-all, of its
own tensor).
"""

import itertools
import statistics
import time
from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist

from meshwright.parallel.planner.hardware import Curve, Link
from meshwright.train.calibration.compute import Run, make_interlude

ROUNDS = 3
ROTATED, ROTATED_BYTES = 8, 2**25  # tensors of an operation: at most, and together
WARM_UP_RUNS = 3
MIN_RUNS, MAX_RUNS = 5, 100
# operation -> number of ranks -> a curve over the bytes of the full tensor
Seconds = Mapping[str, Mapping[int, Curve]]


def fit_link(collectives_s: Seconds) -> tuple[Link, float]:
    """Fit a link to measured seconds. Returns the link (latency of a hop, best bandwidth, and its share by
    operation and number of members) and the mean relative error of the fit.

    The fit minimizes the squared relative errors of seconds = hops x latency + sent / bandwidth, with one
    latency for all and a bandwidth for each operation and number of members. A negative latency becomes 0.
    """
    groups = sorted((op, members) for op, by_members in collectives_s.items() for members in by_members)
    points = [(i, *point) for i, (op, members) in enumerate(groups) for point in collectives_s[op][members]]
    rows = np.zeros((len(points), 1 + len(groups)))
    for row, (i, size_bytes, seconds) in zip(rows, points, strict=True):
        op, members = groups[i]
        hops = (members - 1) * (2 if op == "all_reduce" else 1)
        row[0], row[1 + i] = hops / seconds, size_bytes * hops / members / seconds
    solution = np.linalg.lstsq(rows, np.ones(len(rows)), rcond=None)[0]
    if solution[0] < 0:
        solution = np.concatenate(([0.0], np.linalg.lstsq(rows[:, 1:], np.ones(len(rows)), rcond=None)[0]))
    bytes_s = 1 / np.maximum(solution[1:], 1e-15)
    shares: dict[str, Curve] = {}
    for (op, members), share in zip(groups, bytes_s / bytes_s.max(), strict=True):
        shares[op] = (*shares.get(op, ()), (float(members), float(share)))
    error = float(np.abs(rows @ solution - 1).mean())
    return Link(float(bytes_s.max()) / 1e9, float(solution[0]), shares), error


def group_sizes(processes: int) -> list[int]:
    """Return the sizes of the groups that a mesh can have in a node: the divisors except 1."""
    return [size for size in range(2, processes + 1) if processes % size == 0]


def time_collectives(
    device: torch.device, local_processes: int, sizes_bytes: Sequence[int], budget_s: float
) -> Seconds:
    """Time every collective at every size over groups of each possible number of processes of a node. All
    groups of a size run at the same time, and all processes of the run call this. Returns the same values on
    every rank.

    Args:
        budget_s: seconds of repetition of each collective, size and group
    """
    seconds: dict[str, dict[int, Curve]] = {}
    for members in group_sizes(local_processes):
        group, _ = dist.new_subgroups(members)
        runs = {
            (op, float(size_bytes)): run
            for size_bytes in sorted(sizes_bytes)
            for op, run in _collectives(device, size_bytes, members, group).items()
        }
        times: dict[tuple[str, float], list[float]] = {key: [] for key in runs}
        for _ in range(ROUNDS):  # in turn, so that a disturbance of the machine affects few of them
            for key, run in runs.items():
                times[key] += _times(run, device, budget_s / ROUNDS)
        for op, size in times:
            curve = seconds.setdefault(op, {}).get(members, ())
            seconds[op][members] = (*curve, (size, statistics.median(times[op, size])))
        dist.destroy_process_group(group)
    return seconds


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


def _times(run: Run, device: torch.device, budget_s: float) -> list[float]:
    """Return the mean seconds over the ranks of each repetition. All ranks compute the same means, so they
    repeat equally often."""
    ranks = dist.get_world_size()
    interlude = make_interlude(device, ranks)

    def repeat(count: int) -> list[float]:
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
        return (mean / ranks).tolist()

    first_s = statistics.median(repeat(WARM_UP_RUNS))
    return repeat(max(MIN_RUNS, min(MAX_RUNS, int(budget_s / first_s))))
