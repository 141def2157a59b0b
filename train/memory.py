"""Memory of the machine and of this process: what is free, what can be given back, and Python's collector of
cyclic garbage, which runs between steps and not in the middle of one."""

import ctypes
import gc
import resource
import sys
from pathlib import Path

import torch

from meshwright.train.cgroups import memory_left_bytes
from meshwright.train.distributed.ranks import RankInfo


class GarbageCollector:
    """Collects after every `every`-th step, so on all ranks after the same one: a rank whose Python collects
    when it likes makes all others wait for it in the next collective. With `every` 0 Python keeps its own
    ways.

    What is there after the first step (300,000 objects, mostly modules and the compiler's) is set apart and
    not looked at again. A collection of everything then takes 0.1 ms, without that 150 ms (on one CPU core),
    so no generation is left out and nothing unreachable grows old.
    """

    def __init__(self, every: int) -> None:
        self._every, self._took_over, self._was_enabled = every, False, gc.isenabled()

    def step_done(self, step: int) -> None:
        """Called after each step; the first call, of whatever step, takes over from Python."""
        if not self._every:
            return
        if not self._took_over:
            gc.disable()
            gc.collect()
            gc.freeze()
            self._took_over = True
        elif step % self._every == 0:
            gc.collect()

    def close(self) -> None:
        """Leave the collector as it was."""
        if self._took_over:
            gc.unfreeze()
            if self._was_enabled:
                gc.enable()
            self._took_over = False


def device_memory_bytes(device: torch.device, ranks: RankInfo) -> int:
    """Memory that one process can have: a whole GPU, or its share of what the node has free."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return free_host_bytes() // ranks.local_world_size


def free_host_bytes(root: Path = Path("/")) -> int:
    """Memory that all processes of this machine, or of this container, can still have together: also what the
    kernel can give back of its page cache. `root`: where /proc and /sys are, of the container's limit."""
    import psutil

    free, left = int(psutil.virtual_memory().available), memory_left_bytes(root)
    return free if left is None else min(free, left)


def peak_resident_bytes(root: Path = Path("/")) -> int:
    """The most that this process has had in memory. Linux's getrusage(2) would count its launcher too, before
    the exec."""
    status = root / "proc/self/status"
    if status.is_file():
        lines = status.read_text(encoding="utf-8", errors="replace").splitlines()
        if peak := [int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")]:
            return peak[0]
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def return_free_memory() -> None:
    """Give memory that Python and C++ have freed back to the system, where the C library can (glibc).

    Compiling frees over 100 MiB in small pieces that glibc would keep, besides what training then takes.
    """
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
