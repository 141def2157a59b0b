"""Time the collectives between the processes of a node."""

import itertools
import statistics
import time
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from meshwright.parallel.planner.hardware import Curve
from meshwright.train.calibration.compute import Run, make_interlude

ROUNDS = 3
ROTATED, ROTATED_BYTES = 8, 2**25  # tensors of an operation: at most, and together
WARM_UP_RUNS = 3
MIN_RUNS, MAX_RUNS = 5, 100
# operation -> number of ranks -> a curve over the bytes of the full tensor
Seconds = Mapping[str, Mapping[int, Curve]]


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
