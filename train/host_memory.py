"""Memory of the machine: how much a process can have, and giving some back."""

import ctypes
import os
import resource
import sys
from pathlib import Path

import torch

from train.place import Place


def device_memory_bytes(device: torch.device, place: Place) -> int:
    """Memory that one process can have: a whole GPU, or its share of what the node has free."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    meminfo = "/proc/meminfo"
    if os.path.exists(meminfo):  # counts what the page cache can give back
        with open(meminfo, encoding="ascii") as lines:
            free = next((int(x.split()[1]) * 1024 for x in lines if x.startswith("MemAvailable:")), free)
    limit, used = (Path("/sys/fs/cgroup", name) for name in ("memory.max", "memory.current"))
    if limit.is_file() and used.is_file() and limit.read_text().strip().isdigit():  # a container's own limit
        free = min(free, int(limit.read_text()) - int(used.read_text()))
    return free // place.local_world_size


def peak_resident_bytes() -> int:
    """The most that this process has had in memory."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def return_free_memory() -> None:
    """Give memory that Python and C++ have freed back to the system, where the C library can (glibc).

    Compiling frees over 100 MiB in small pieces that glibc would keep, besides what training then takes.
    """
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
