"""Inspect this machine: memory, cores, limits, network, the folders of a run, installed packages, and the
compiler, GPUs and dtype that torch uses."""

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
from meshwright.train.files import MAX_OPEN_FILES
from meshwright.train.memory import free_host_bytes
from meshwright.train.planning.device_defaults import describe_dtype

WRITTEN_BYTES = 256 * 2**20
SOFT, HARD = 0, 1  # resource.getrlimit: the limit in force, and the maximum to which a process may raise it


def look_at_machine() -> MachineFacts:
    """Return memory, cores, limits and network; Unknown for values that cannot be determined."""
    name = socket.gethostname()
    return MachineFacts(
        memory_gib=find_gib(lambda: os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")),
        available_gib=find_gib(free_host_bytes),
        cgroup_gib=find_gib(memory_limit_bytes),
        cores=find(usable_cores),
        threads=find(lambda: len(os.sched_getaffinity(0))),
        memlock_kib=find(lambda: limit(resource.RLIMIT_MEMLOCK, SOFT, 1024)),
        open_files=find(lambda: limit(resource.RLIMIT_NOFILE, SOFT)),
        most_open_files=find(
            lambda: min(limit(resource.RLIMIT_NOFILE, HARD) or MAX_OPEN_FILES, MAX_OPEN_FILES)
        ),
        shm_gib=find_gib(lambda: shutil.disk_usage("/dev/shm").free),
        hostname=name,
        addresses=find(lambda: tuple(sorted({str(entry[4][0]) for entry in socket.getaddrinfo(name, None)}))),
        interfaces=find(look_at_interfaces),
        infiniband=tuple(sorted(path.name for path in Path("/sys/class/infiniband").glob("*"))),
    )


def find_gib(look: Callable[[], int | None]) -> float | Unknown | None:
    """Return the bytes that `look` returns in GiB; None for no limit."""
    size = find(look)
    return round(size / GIB, 4) if isinstance(size, int) else size


def limit(kind: int, which: int, unit: int = 1) -> int | None:
    """Return a resource limit of this process in `unit`s; None is unlimited."""
    value = resource.getrlimit(kind)[which]
    return None if value == resource.RLIM_INFINITY else value // unit


def look_at_interfaces() -> tuple[str, ...]:
    """Return the network interfaces that are up, except the loopback, with their speed if known."""
    import psutil

    up = {name: stats.speed for name, stats in psutil.net_if_stats().items() if stats.isup and name != "lo"}
    return tuple(f"{name} ({speed / 1000:g} Gb/s)" if speed else name for name, speed in sorted(up.items()))


def look_at_run_folder(path: Path) -> Folder:
    """Inspect the folder of the runs, existing or not, and time a file that is flushed to its disk."""
    facts, folder, first = look_at_folder(path), nearest_existing(path), _nearest_entry(path)
    if first != folder:
        return replace(facts, writable=False, problem=f"{first} is a file or a broken link")
    if not facts.writable:
        return facts
    if isinstance(facts.free_gib, float) and facts.free_gib * GIB < 4 * WRITTEN_BYTES:
        return replace(facts, write_mb_s=Unknown("not measured: less than 1 GiB is free"))
    try:
        return replace(facts, write_mb_s=measure_write(folder))
    except OSError as error:
        return replace(facts, writable=False, problem=f"writing 256 MB: {error.strerror or error}")


def look_at_folder(path: Path) -> Folder:
    """Inspect a folder that a run writes to, existing or not."""
    folder = nearest_existing(path)
    return Folder(
        str(path),
        writable=os.access(folder, os.W_OK | os.X_OK),
        free_gib=find_gib(lambda: shutil.disk_usage(folder).free),
        filesystem=find(lambda: find_filesystem(folder)),
    )


def _nearest_entry(path: Path) -> Path:
    """Return the path itself, or its nearest parent that exists as a folder, file or link."""
    path = path.expanduser().absolute()
    return next(candidate for candidate in (path, *path.parents) if os.path.lexists(candidate))


def nearest_existing(path: Path) -> Path:
    """Return the folder itself, or its nearest existing parent, which is on the same disk and must be
    writable to create the folder."""
    first = _nearest_entry(path)
    return first if os.path.isdir(first) else first.parent


def find_filesystem(folder: Path) -> str:
    """Return the type of the folder's file system: that of the longest mount point above it."""
    import psutil

    mounts = psutil.disk_partitions(all=True)
    above = [mount for mount in mounts if folder.resolve().is_relative_to(mount.mountpoint)]
    # of several mounts at one point this takes the first; they are rare
    return str(max(above, key=lambda mount: len(mount.mountpoint)).fstype)


def measure_write(folder: Path) -> float:
    """Return the rate in 10^6 bytes per second of a 256 MiB file, flushed to the disk. Raises OSError."""
    # random bytes: a disk may compress repeated ones
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
DRIVER_S = 20.0  # timeout: nvidia-smi hangs if a GPU has fallen off the bus


def look_at_software() -> Software:
    """Return versions, compiler, GPUs and dtype of torch; Unknown for values that cannot be determined."""
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
    """Return versions by name, "" if a package is not installed; with `gpu` also those of NCCL and cuDNN."""
    versions: dict[str, str | Unknown] = {
        "meshwright": __version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        **dict.fromkeys((*PACKAGES, *OPTIONAL), ""),
    }
    for name in (*PACKAGES, *OPTIONAL):
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    versions["CUDA of torch"] = torch.version.cuda or ""
    query = ("--query-gpu=driver_version", "--format=csv,noheader")
    versions["driver"] = find(lambda: run_nvidia_smi(*query).partition("\n")[0])
    if gpu:
        versions["NCCL"] = find(lambda: ".".join(map(str, torch.cuda.nccl.version())))  # type: ignore[no-untyped-call]
        # torch raises for a cuDNN that is too old for it, and names its origin
        versions["cuDNN"] = find(lambda: str(torch.backends.cudnn.version()))
    return versions


def find_compiler() -> str:
    """Return the C++ compiler that inductor uses; "" if there is none or $CXX cannot be run.

    Any other error of the search is raised unchanged.
    """
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
    """Return the GPUs that the driver reports. Raises as `run_nvidia_smi`."""
    return parse_gpus(run_nvidia_smi(f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader,nounits"))


def parse_gpus(text: str) -> tuple[Gpu, ...]:
    """Parse nvidia-smi's CSV table, one line per GPU. Unknown values, such as [N/A], become None."""
    rows = ([cell.strip() for cell in line.split(",")] for line in text.splitlines())
    return tuple(Gpu(row[0], *map(_number, row[1:])) for row in rows if len(row) == len(QUERY))


def look_at_topology() -> tuple[str, ...]:
    """Return the lines of nvidia-smi's table of links. Raises as `run_nvidia_smi`."""
    return read_topology(run_nvidia_smi("topo", "-m"))


def read_topology(text: str) -> tuple[str, ...]:
    """Return the lines of nvidia-smi's table without the escape sequences that underline its header, which it
    prints to a pipe too."""
    return tuple(re.sub(r"\x1b\[[0-9;]*m", "", text).expandtabs().splitlines())


def run_nvidia_smi(*arguments: str) -> str:
    """Return the output of nvidia-smi; "" if it is not installed, so there is no driver. Raises RuntimeError
    if it fails, TimeoutExpired if it hangs."""
    if not shutil.which("nvidia-smi"):
        return ""
    result = subprocess.run(
        ["nvidia-smi", *arguments], capture_output=True, text=True, timeout=DRIVER_S, check=False
    )
    if result.returncode:
        raise RuntimeError(f"nvidia-smi: {(result.stdout or result.stderr).strip()}")
    return result.stdout


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
