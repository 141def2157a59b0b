"""Linux's control groups: how much memory and processor time a container, a pod or a Slurm job leaves to this
process.

A process is in one group of each hierarchy, and the limits of all groups above hold for it too. Version 2 has
one hierarchy, version 1 one for memory and one for processors; a machine can have both. In a container the
groups above its own cannot be seen. Sources: cgroups(7), and the kernel's admin-guide, cgroup-v2 and
cgroup-v1/memory. `root` is where /proc and /sys are.
"""

import math
from collections.abc import Iterator
from pathlib import Path

_UNLIMITED_BYTES = 2**60  # version 1 says "no limit" by a number near 2^63


def memory_left_bytes(root: Path = Path("/")) -> int | None:
    """Memory that these processes may still take, of the group that has least left; None without a limit.

    What a group uses contains the page cache, all files that were read in it. That is not counted: the kernel
    takes it back before it refuses memory.
    """
    left = [
        limit - _used_bytes(group) for group in own_groups("memory", root) for limit in _memory_limits(group)
    ]
    return max(0, min(left)) if left else None


def memory_limit_bytes(root: Path = Path("/")) -> int | None:
    """The lowest limit of memory; None without one."""
    return min(
        (limit for group in own_groups("memory", root) for limit in _memory_limits(group)), default=None
    )


def processors(root: Path = Path("/")) -> int | None:
    """How many processors' time the groups leave, the smallest quota rounded up; None without a quota."""
    return min(
        (math.ceil(quota) for group in own_groups("cpu", root) for quota in _cpu_quotas(group)), default=None
    )


def own_groups(controller: str, root: Path = Path("/")) -> list[Path]:
    """Folders of the groups that this process is in, each before those above it."""
    paths = dict(_own_paths(controller, root))
    mounts = [
        (point, mounted, paths[kind]) for kind, mounted, point in _mounts(controller, root) if kind in paths
    ]
    shown = [mount for mount in mounts if _is_shown(*mount[1:])]
    return [group for mount in shown or mounts for group in _from_own(*mount)]


def _own_paths(controller: str, root: Path) -> Iterator[tuple[str, str]]:
    """Type of the hierarchy's file system -> the path of this process's group in it."""
    for line in _read(root / "proc/self/cgroup").split("\n"):
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if not controllers:
            yield "cgroup2", path
        elif controller in controllers.split(","):
            yield "cgroup", path


def _mounts(controller: str, root: Path) -> Iterator[tuple[str, str, Path]]:
    """Where such hierarchies are mounted: type of the file system, the group that stands at the mount point,
    mount point."""
    for line in _read(root / "proc/self/mountinfo").split("\n"):
        mount, _, filesystem = line.partition(" - ")
        kind, _, options = (*filesystem.split(" ", 2), "", "")[:3]
        if kind == "cgroup2" or (kind == "cgroup" and controller in options.split(",")):
            _, _, _, mounted, point, *_ = map(unescaped, mount.split(" "))
            yield kind, mounted, root / point.lstrip("/")


def _is_shown(mounted: str, path: str) -> bool:
    """Whether a mount of the group `mounted` shows the group `path`."""
    return Path(path).is_relative_to(mounted) and ".." not in Path(path).parts


def _from_own(point: Path, mounted: str, path: str) -> list[Path]:
    """The folder of the group `path`, and all above it up to the mount point, as far as they are there: a
    container sees its own group at the mount point, whatever the host calls it."""
    own = point / (Path(path).relative_to(mounted) if _is_shown(mounted, path) else "")
    return [folder for folder in (own, *own.parents) if folder.is_relative_to(point) and folder.is_dir()]


def _memory_limits(group: Path) -> list[int]:
    """Bytes: of version 2 also memory.high, above which the kernel stops processes for as long as it takes to
    get below."""
    found = (_number(group / name) for name in ("memory.max", "memory.high", "memory.limit_in_bytes"))
    return [limit for limit in found if limit is not None and limit < _UNLIMITED_BYTES]


def _used_bytes(group: Path) -> int:
    used = _number(group / "memory.current") or _number(group / "memory.usage_in_bytes") or 0
    stat = dict(line.split(" ", 1) for line in _read(group / "memory.stat").split("\n") if " " in line)
    # version 1: with the groups below, as the usage is
    total = "total_" if "total_inactive_file" in stat else ""
    # Read a moment later, so perhaps more than what was used.
    return max(0, used - sum(int(stat.get(f"{total}{name}", 0)) for name in ("inactive_file", "active_file")))


def _cpu_quotas(group: Path) -> Iterator[float]:
    """Processors: microseconds of quota in microseconds of period. "max", or -1 in version 1, is no quota."""
    version_1 = f"{_read(group / 'cpu.cfs_quota_us')} {_read(group / 'cpu.cfs_period_us')}"
    quota, _, period = (_read(group / "cpu.max") or version_1).partition(" ")
    if quota.isdecimal() and period.isdecimal():
        yield int(quota) / int(period)


def _number(path: Path) -> int | None:
    text = _read(path)
    return int(text) if text.isdecimal() else None


def unescaped(name: str) -> str:
    """A path as it is, of one in Linux's lists of mounts: spaces are \\040 there (proc(5))."""
    return name.replace("\\040", " ")


def _read(path: Path) -> str:
    """The text of a file; nothing where there is none: of Linux's files that a kernel or a container may not
    have."""
    try:
        return path.read_text(encoding="utf-8", errors="surrogateescape").strip()
    except OSError:
        return ""
