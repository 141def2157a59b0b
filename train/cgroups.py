"""Linux control groups (cgroups): the memory and CPU limits of a container, a pod or a Slurm job.

A process is in one group of each hierarchy, and the limits of all parent groups also apply. Version 2 has one
hierarchy; version 1 has separate ones for memory and CPU; a machine can have both. A container does not see
the parents of its own group. Sources: cgroups(7), and the kernel's admin-guide, cgroup-v2 and
cgroup-v1/memory. `root` is the folder that contains /proc and /sys.
"""

import math
from collections.abc import Iterator
from pathlib import Path

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


def processors(root: Path = Path("/")) -> int | None:
    """Number of CPUs whose time the groups allow: the smallest quota, rounded up; None without a quota."""
    return min(
        (math.ceil(quota) for group in own_groups("cpu", root) for quota in _cpu_quotas(group)), default=None
    )


def own_groups(controller: str, root: Path = Path("/")) -> list[Path]:
    """Folders of this process's groups, each before its parents."""
    paths = dict(_own_paths(controller, root))
    mounts = [
        (point, mounted, paths[kind]) for kind, mounted, point in _mounts(controller, root) if kind in paths
    ]
    shown = [mount for mount in mounts if _is_shown(*mount[1:])]
    return [group for mount in shown or mounts for group in _from_own(*mount)]


def _own_paths(controller: str, root: Path) -> Iterator[tuple[str, str]]:
    """Yield the file system type of each hierarchy with the path of this process's group in it."""
    for line in _read(root / "proc/self/cgroup").split("\n"):
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if not controllers:
            yield "cgroup2", path
        elif controller in controllers.split(","):
            yield "cgroup", path


def _mounts(controller: str, root: Path) -> Iterator[tuple[str, str, Path]]:
    """Yield file system type, group at the mount point, and mount point of each mounted hierarchy."""
    for line in _read(root / "proc/self/mountinfo").split("\n"):
        mount, _, filesystem = line.partition(" - ")
        kind, _, options = (*filesystem.split(" ", 2), "", "")[:3]
        if kind == "cgroup2" or (kind == "cgroup" and controller in options.split(",")):
            _, _, _, mounted, point, *_ = map(unescaped, mount.split(" "))
            yield kind, mounted, root / point.lstrip("/")


def _is_shown(mounted: str, path: str) -> bool:
    """Return whether a mount of the group `mounted` contains the group `path`."""
    return Path(path).is_relative_to(mounted) and ".." not in Path(path).parts


def _from_own(point: Path, mounted: str, path: str) -> list[Path]:
    """Existing folders of the group `path` and its parents, up to the mount point. A container sees its own
    group at the mount point, under any path that the host gives it."""
    own = point / (Path(path).relative_to(mounted) if _is_shown(mounted, path) else "")
    return [folder for folder in (own, *own.parents) if folder.is_relative_to(point) and folder.is_dir()]


def _memory_limits(group: Path) -> list[int]:
    """Memory limits of a group in bytes. They include memory.high of version 2, above which the kernel
    throttles the processes of the group and reclaims their memory."""
    limits = (_number(group / name) for name in ("memory.max", "memory.high", "memory.limit_in_bytes"))
    return [limit for limit in limits if limit is not None and limit < _UNLIMITED_BYTES]


def _used_bytes(group: Path) -> int:
    used = _number(group / "memory.current") or _number(group / "memory.usage_in_bytes") or 0
    stat = dict(line.split(" ", 1) for line in _read(group / "memory.stat").split("\n") if " " in line)
    # version 1: totals include the child groups, as the usage does
    total = "total_" if "total_inactive_file" in stat else ""
    # max(0, ...): memory.stat is read after the usage and may exceed it
    return max(0, used - sum(int(stat.get(f"{total}{name}", 0)) for name in ("inactive_file", "active_file")))


def _cpu_quotas(group: Path) -> Iterator[float]:
    """CPUs: microseconds of quota per microseconds of period. "max", or -1 in version 1, is no quota."""
    version_1 = f"{_read(group / 'cpu.cfs_quota_us')} {_read(group / 'cpu.cfs_period_us')}"
    quota, _, period = (_read(group / "cpu.max") or version_1).partition(" ")
    if quota.isdecimal() and period.isdecimal():
        yield int(quota) / int(period)


def _number(path: Path) -> int | None:
    text = _read(path)
    return int(text) if text.isdecimal() else None


def unescaped(name: str) -> str:
    """Decode a path of Linux's mount lists, in which a space is \\040 (proc(5))."""
    return name.replace("\\040", " ")


def _read(path: Path) -> str:
    """The text of a file; "" if it cannot be read, because a kernel or container may not have it."""
    try:
        return path.read_text(encoding="utf-8", errors="surrogateescape").strip()
    except OSError:
        return ""
