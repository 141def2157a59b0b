"""Writes control groups as Linux shows them below /proc and /sys into a folder."""

from collections.abc import Mapping
from pathlib import Path


def write_groups(
    root: Path, *groups: Mapping[str, str | int], version_1: str = "", container: bool = False
) -> Path:
    """Write nested groups (the files of each by name) with this process in the last one. Returns the root.

    `version_1`: the controllers of a version 1 hierarchy; "" is version 2. `container`: only the process's
    own group is mounted, as Docker does with version 1.
    """
    names = [f"group_{depth}" for depth in range(1, len(groups))]
    own = "/".join(["", *names]) or "/"
    point = root / "sys/fs/cgroup" / version_1
    for depth, files in enumerate(groups):
        folder = point if container else point.joinpath(*names[:depth])
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items() if not container or depth == len(groups) - 1 else ():
            (folder / name).write_text(f"{text}\n")
    process = root / "proc/self"
    process.mkdir(parents=True, exist_ok=True)
    (process / "cgroup").write_text(f"12:pids:{own}\n{4 if version_1 else 0}:{version_1}:{own}\n")
    return root
