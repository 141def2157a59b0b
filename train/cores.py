"""The processor cores that the processes of this machine may use, all together."""

import math
import os
from collections.abc import Collection
from pathlib import Path


def usable_cores(system: Path = Path("/sys"), cpus: Collection[int] | None = None) -> int:
    """Cores, of which two hardware threads share one: a second thread on a core gains matrix products nothing.

    Counted are those of `cpus`, by default what the scheduler lets this process run on, and no more than a container's quota
    of processor time amounts to (cgroup 2: cpu.max is "microseconds period", or "max period"), rounded up.
    """
    if cpus is None:
        cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    cores = len({_siblings(system, cpu) for cpu in cpus})
    quota = _read(system / "fs/cgroup/cpu.max").split()
    if len(quota) == 2 and quota[0].isdecimal():
        cores = min(cores, math.ceil(int(quota[0]) / int(quota[1])))
    return max(1, cores)


def _siblings(system: Path, cpu: int) -> str:
    """The hardware threads of this one's core, the same text for each of them; where nothing says so, itself."""
    return _read(system / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") or str(cpu)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return ""
