"""The processor cores, and their hardware threads, that the processes of this machine may use, all
together."""

import os
from collections.abc import Collection
from pathlib import Path

from meshwright.train.control_groups import processors


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
