"""Memory of the machine and of this process: free memory, the limits of a container, a pod or a Slurm job
(Linux control groups), and returning memory to the system. `root`: the folder of /proc and /sys."""

import ctypes
import resource
import sys
from pathlib import Path

import torch
import torch.distributed as dist


def smallest_memory(device: torch.device, local_world_size: int) -> list[int]:
    """Return the free and the total device memory of a process, and the host memory for it, in bytes, each of
    the rank that has the least. Every rank calls it. The device is its GPU, which others may use too, or its
    share of the node's free host memory."""
    free = in_total = host = free_host_bytes() // local_world_size
    if device.type == "cuda":
        free, in_total = torch.cuda.mem_get_info(device)
        free += torch.cuda.memory_reserved(device)
    smallest = torch.tensor([free, in_total, host])
    dist.all_reduce(smallest, op=dist.ReduceOp.MIN)
    return list(map(int, smallest))


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


def keep_freed_memory() -> None:
    """Let the C library (glibc) keep freed tensors of at most 32 MiB for those to come. Otherwise it returns
    them, and each step faults their pages in again: a tenth of the CPU time of a Llama of 19M parameters."""
    if sys.platform == "linux" and (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)):
        for option, value in ((-1, 2**31 - 1), (-3, 2**25)):  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
            mallopt(option, value)


_UNLIMITED_BYTES = 2**60  # version 1 encodes "no limit" as a number near 2^63


def memory_left_bytes(root: Path = Path("/")) -> int | None:
    """Bytes that the processes of these groups may still allocate: the minimum over the groups; None without
    a limit.

    The usage of a group includes the page cache, which is subtracted: the kernel reclaims it before it
    refuses memory.
    """
    left = [
        limit - _used_bytes(group) for group in own_groups("memory", root) for limit in _memory_limits(group)
    ]
    return max(0, min(left)) if left else None


def memory_limit_bytes(root: Path = Path("/")) -> int | None:
    """The lowest memory limit of this process's groups in bytes; None without one."""
    return min(
        (limit for group in own_groups("memory", root) for limit in _memory_limits(group)), default=None
    )


def own_groups(controller: str, root: Path = Path("/")) -> list[Path]:
    """Folders of this process's control groups, each before its parents.

    A process is in one group of each hierarchy, and the limits of all parent groups also apply. Version 2 has
    one hierarchy; version 1 has separate ones for memory and CPU; a machine can have both. A container sees
    its own group at the mount point, under any path that the host gives it, and does not see the parents.
    Sources: cgroups(7), and the kernel's admin-guide, cgroup-v2 and cgroup-v1/memory.
    """
    groups = []
    for line in read_text(root / "proc/self/cgroup").split("\n"):
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if not controllers or controller in controllers.split(","):
            mount = root / "sys/fs/cgroup" / controllers
            own = mount / path.lstrip("/")
            own = own if own.is_dir() and ".." not in Path(path).parts else mount
            groups += [group for group in (own, *own.parents) if group.is_relative_to(mount)]
    return groups


def _memory_limits(group: Path) -> list[int]:
    """Memory limits of a group in bytes. They include memory.high of version 2, above which the kernel
    throttles the processes of the group and reclaims their memory."""
    limits = (_number(group / name) for name in ("memory.max", "memory.high", "memory.limit_in_bytes"))
    return [limit for limit in limits if limit is not None and limit < _UNLIMITED_BYTES]


def _used_bytes(group: Path) -> int:
    used = _number(group / "memory.current") or _number(group / "memory.usage_in_bytes") or 0
    stat = dict(line.split(" ", 1) for line in read_text(group / "memory.stat").split("\n") if " " in line)
    # version 1: totals include the child groups, as the usage does
    total = "total_" if "total_inactive_file" in stat else ""
    # max(0, ...): memory.stat is read after the usage and may exceed it
    return max(0, used - sum(int(stat.get(f"{total}{name}", 0)) for name in ("inactive_file", "active_file")))


def _number(path: Path) -> int | None:
    text = read_text(path)
    return int(text) if text.isdecimal() else None


def read_text(path: Path) -> str:
    """The text of a file; "" if it cannot be read, because a kernel or container may not have it."""
    try:
        return path.read_text(encoding="utf-8", errors="surrogateescape").strip()
    except OSError:
        return ""
