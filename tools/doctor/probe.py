"""What this machine has: memory, cores, limits, network, the folders that a run writes to, what is installed,
and what of it torch really uses."""

import importlib.metadata
import os
import platform
import re
import resource
import secrets
import shutil
import socket
import subprocess
import sysconfig
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch

from meshwright import __version__
from meshwright.parallel.memory_breakdown import GIB
from meshwright.tools.doctor.facts import OPTIONAL, Folder, Gpu, MachineFacts, Software, Unknown, find
from meshwright.train.cgroups import memory_limit_bytes
from meshwright.train.distributed.process_group import usable_cores
from meshwright.train.files import ENOUGH
from meshwright.train.memory import free_host_bytes
from meshwright.train.planning.device_defaults import describe_dtype

WRITTEN_BYTES = 256 * 2**20
SOFT, HARD = 0, 1  # of a limit: what holds, and how far a process may raise it


def look_at_machine() -> MachineFacts:
    """Everything of it; what cannot be found out is Unknown."""
    name = socket.gethostname()
    return MachineFacts(
        memory_gib=find_gib(lambda: os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")),
        available_gib=find_gib(free_host_bytes),
        cgroup_gib=find_gib(memory_limit_bytes),
        cores=find(usable_cores),
        threads=find(lambda: len(os.sched_getaffinity(0))),
        memlock_kib=find(lambda: limit(resource.RLIMIT_MEMLOCK, SOFT, 1024)),
        open_files=find(lambda: limit(resource.RLIMIT_NOFILE, SOFT)),
        most_open_files=find(lambda: min(limit(resource.RLIMIT_NOFILE, HARD) or ENOUGH, ENOUGH)),
        shm_gib=find_gib(lambda: shutil.disk_usage("/dev/shm").free),
        hostname=name,
        addresses=find(lambda: tuple(sorted({str(one[4][0]) for one in socket.getaddrinfo(name, None)}))),
        interfaces=find(look_at_interfaces),
        infiniband=tuple(sorted(path.name for path in Path("/sys/class/infiniband").glob("*"))),
    )


def find_gib(look: Callable[[], int | None]) -> float | Unknown | None:
    """Bytes in GiB; None for no limit."""
    found = find(look)
    return round(found / GIB, 4) if isinstance(found, int) else found


def limit(kind: int, which: int, unit: int = 1) -> int | None:
    """A limit of this process in `unit`s; None is unlimited."""
    found = resource.getrlimit(kind)[which]
    return None if found == resource.RLIM_INFINITY else found // unit


def look_at_interfaces() -> tuple[str, ...]:
    """Network interfaces that are up but the loopback, with their speed where they know it."""
    import psutil

    up = {name: stats.speed for name, stats in psutil.net_if_stats().items() if stats.isup and name != "lo"}
    return tuple(f"{name} ({speed / 1000:g} Gb/s)" if speed else name for name, speed in sorted(up.items()))


def look_at_run_folder(asked: Path) -> Folder:
    """Where runs go, made or not; measured by a file that is flushed to the disk."""
    found, folder, first = look_at_folder(asked), nearest_existing(asked), _first_there(asked)
    if first != folder:
        return replace(found, writable=False, problem=f"{first} is a file, or a link to nothing")
    if not found.writable:
        return found
    if isinstance(found.free_gib, float) and found.free_gib * GIB < 4 * WRITTEN_BYTES:
        return replace(found, write_mb_s=Unknown("not measured: less than 1 GiB is free"))
    try:
        return replace(found, write_mb_s=measure_write(folder))
    except OSError as error:
        return replace(found, writable=False, problem=f"a file of 256 MB there: {error.strerror or error}")


def look_at_folder(asked: Path) -> Folder:
    """A folder that a run writes to, made or not."""
    here = nearest_existing(asked)
    return Folder(
        str(asked),
        writable=os.access(here, os.W_OK | os.X_OK),
        free_gib=find_gib(lambda: shutil.disk_usage(here).free),
        filesystem=find(lambda: find_filesystem(here)),
    )


def _first_there(path: Path) -> Path:
    """The path itself, or the first above it at which there is anything."""
    path = path.expanduser().absolute()
    return next(one for one in (path, *path.parents) if os.path.lexists(one))


def nearest_existing(path: Path) -> Path:
    """The folder itself, or the first above it that exists: on the same disk, with the same rights to make
    it."""
    first = _first_there(path)
    return first if os.path.isdir(first) else first.parent


def find_filesystem(folder: Path) -> str:
    """Type of the file system it is on: that of the longest mount point above it."""
    import psutil

    mounts = psutil.disk_partitions(all=True)
    above = [mount for mount in mounts if folder.resolve().is_relative_to(mount.mountpoint)]
    # of several at one point the first is found: they are rare
    return str(max(above, key=lambda mount: len(mount.mountpoint)).fstype)


def measure_write(folder: Path) -> float:
    """10^6 bytes per second of a file of 256 MiB, flushed to the disk. Raises OSError."""
    # a disk may compress what repeats in small
    path, block = folder / f".doctor-{secrets.token_hex(8)}", os.urandom(2**22)
    start_s = time.perf_counter()
    try:
        with path.open("wb") as file:
            for _ in range(WRITTEN_BYTES // len(block)):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        return round(WRITTEN_BYTES / (time.perf_counter() - start_s) / 1e6, 1)
    finally:
        path.unlink(missing_ok=True)


PACKAGES = ("torch", "triton", "tensorboard", "numpy", "safetensors", "tokenizers")
QUERY = ("name", "power.limit", "power.default_limit")
DRIVER_S = 20.0  # nvidia-smi hangs where a GPU has fallen off the bus


def look_at_software() -> Software:
    """Everything of it; what cannot be found out is Unknown."""
    gpus = find(lambda: torch.cuda.device_count() if torch.cuda.is_available() else 0)
    return Software(
        versions=find_versions(bool(gpus)),
        torch_cuda=torch.version.cuda or "",
        gpus_of_torch=gpus,
        compiler=find(find_compiler),
        python_headers=(Path(sysconfig.get_path("include")) / "Python.h").exists(),
        bfloat16=find(lambda: describe_dtype(torch.device("cuda" if gpus else "cpu"))),
    )


def find_versions(gpu: bool) -> dict[str, str | Unknown]:
    """By name; "" for what is not there."""
    found: dict[str, str | Unknown] = {
        "meshwright": __version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        **dict.fromkeys((*PACKAGES, *OPTIONAL), ""),
    }
    for name in (*PACKAGES, *OPTIONAL):
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    found["CUDA of torch"] = torch.version.cuda or ""
    query = ("--query-gpu=driver_version", "--format=csv,noheader")
    found["driver"] = find(lambda: ask_driver(*query).partition("\n")[0])
    if gpu:
        found["NCCL"] = find(lambda: ".".join(map(str, torch.cuda.nccl.version())))  # type: ignore[no-untyped-call]
        # torch refuses one that is too old for it, and says where it comes from
        found["cuDNN"] = find(lambda: str(torch.backends.cudnn.version()))
    return found


def find_compiler() -> str:
    """The C++ compiler that inductor takes; "" where there is none, or $CXX names something that cannot be
    run. Raises what it raises for any other reason."""
    from torch._inductor import cpp_builder, exc

    try:
        return str(cpp_builder.get_cpp_compiler())
    except exc.InvalidCxxCompiler:
        return ""
    except OSError as error:
        if error.filename is None or error.filename != os.environ.get("CXX"):
            raise
        return ""


def look_at_gpus() -> tuple[Gpu, ...]:
    """Those that the driver sees. Raises as `ask_driver`."""
    return parse_gpus(ask_driver(f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader,nounits"))


def parse_gpus(text: str) -> tuple[Gpu, ...]:
    """Of nvidia-smi's table, one line a GPU, values by commas; what it does not know it calls [N/A] and the
    like."""
    rows = ([cell.strip() for cell in line.split(",")] for line in text.splitlines())
    return tuple(Gpu(row[0], *map(_number, row[1:])) for row in rows if len(row) == len(QUERY))


def look_at_topology() -> tuple[str, ...]:
    """What nvidia-smi says of the links, line by line. Raises as `ask_driver`."""
    return read_topology(ask_driver("topo", "-m"))


def read_topology(text: str) -> tuple[str, ...]:
    """Lines of nvidia-smi's table, whose head it underlines by escape sequences, also where nobody sees
    them."""
    return tuple(re.sub(r"\x1b\[[0-9;]*m", "", text).expandtabs().splitlines())


def ask_driver(*arguments: str) -> str:
    """What nvidia-smi prints; "" where there is none, so no driver. Raises RuntimeError where it fails,
    TimeoutExpired where it hangs."""
    if not shutil.which("nvidia-smi"):
        return ""
    done = subprocess.run(
        ["nvidia-smi", *arguments], capture_output=True, text=True, timeout=DRIVER_S, check=False
    )
    if done.returncode:
        raise RuntimeError(f"nvidia-smi: {(done.stdout or done.stderr).strip()}")
    return done.stdout


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
