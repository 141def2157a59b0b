"""The processor cores that the processes of this machine may use, all together."""

import os
from collections.abc import Collection
from pathlib import Path

from train.control_groups import processors


def usable_cores(root: Path = Path("/"), cpus: Collection[int] | None = None) -> int:
    """Cores, of which two hardware threads share one: a second thread on a core gains matrix products nothing.

    Counted are those of `cpus`, by default what the scheduler lets this process run on, and no more than a container's quota
    of processor time amounts to, rounded up. `root`: where /proc and /sys are.
    """
    if cpus is None:
        cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    cores = len({_siblings(root, cpu) for cpu in cpus})
    return max(1, min(cores, processors(root) or cores))


def _siblings(root: Path, cpu: int) -> str:
    """The hardware threads of this one's core, the same text for each of them; where nothing says so, itself."""
    try:
        return (root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text(encoding="ascii").strip()
    except OSError:
        return str(cpu)
