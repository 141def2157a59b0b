"""Memory of the machine and of this process: free memory, returning memory to the system, and Python's
garbage collector, which runs between steps instead of within one."""

import ctypes
import gc
import resource
import sys
from pathlib import Path

import torch

from meshwright.train.cgroups import memory_left_bytes
from meshwright.train.distributed.ranks import RankInfo
from meshwright.train.hooks import Hook, StepDone


class GarbageCollector(Hook):
    """Collects garbage after every `every`-th step, on all ranks after the same step. A rank that Python
    pauses at another moment makes all others wait in the next collective. 0 leaves the timing to Python.

    The objects that exist after the first step (300,000, mostly of modules and the compiler) are frozen, so
    later collections skip them. A full collection then takes 0.1 ms instead of 150 ms (on one CPU core), and
    therefore each one covers all generations.
    """

    def __init__(self, every: int) -> None:
        self._every, self._took_over, self._was_enabled = every, False, gc.isenabled()

    def after_step(self, done: StepDone) -> None:
        """Collect if due. The first call disables Python's automatic collection. With
        `every` 0 nothing changes."""
        if not self._every:
            return
        if not self._took_over:
            gc.disable()
            gc.collect()
            gc.freeze()
            self._took_over = True
        elif done.step % self._every == 0:
            gc.collect()

    def close(self) -> None:
        """Restore the collector's previous state."""
        if self._took_over:
            gc.unfreeze()
            if self._was_enabled:
                gc.enable()
            self._took_over = False


def device_memory_bytes(device: torch.device, ranks: RankInfo) -> tuple[int, int]:
    """Memory that is free for the tensors of one process, and all there is: of its GPU, which others may use
    too, or of its share of the node's free host memory."""
    if device.type == "cuda":
        free, in_total = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device), in_total
    return (free_host_bytes() // ranks.local_world_size,) * 2


def free_host_bytes(root: Path = Path("/")) -> int:
    """Host memory that the processes of this machine or container can still allocate together, including
    reclaimable page cache. `root`: folder that contains /proc and /sys, for the container's limit."""
    import psutil

    free, left = int(psutil.virtual_memory().available), memory_left_bytes(root)
    return free if left is None else min(free, left)


def peak_resident_bytes(root: Path = Path("/")) -> int:
    """Peak resident memory of this process, from VmHWM: Linux's getrusage(2) would include the launcher
    before the exec."""
    status = root / "proc/self/status"
    if status.is_file():
        lines = status.read_text(encoding="utf-8", errors="replace").splitlines()
        if peak := [int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")]:
            return peak[0]
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def resident_bytes() -> int:
    """Resident memory of this process now."""
    import psutil

    return int(psutil.Process().memory_info().rss)


def return_free_memory() -> None:
    """Return memory that Python and C++ have freed to the system, if the C library can (glibc).

    Compiling frees over 100 MiB in small pieces, which glibc would otherwise keep during training.
    """
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
