"""Look at this machine: the facts that decide whether a run fails or is slow."""

import importlib.metadata
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from meshwright import __version__
from meshwright.parallel.compile.setup import cache_folder
from meshwright.parallel.config import CompileConfig
from meshwright.parallel.errors import one_line
from meshwright.parallel.memory_breakdown import GIB
from meshwright.tools.doctor.trials import run_trial, start_trial
from meshwright.train.distributed.process_group import usable_cores
from meshwright.train.memory import free_host_bytes

PACKAGES = ("torch", "triton", "numpy", "safetensors", "tokenizers", "tensorboard", "transformers", "torchao")
# Variables that can affect a run begin with one of these.
SHOWN = "NCCL_ TORCH PYTORCH_ GLOO_ OMP_ MKL_ CUDA_ NVIDIA_TF32 KMP_ LD_LIBRARY_ LD_PRELOAD TRITON_ PET_ CXX"
QUERY = ("name", "driver_version", "power.limit", "power.default_limit")
DRIVER_S = 20.0  # timeout: nvidia-smi hangs if a GPU has fallen off the bus
MAX_REASON = 300  # characters


@dataclass(frozen=True)
class Gpu:
    """A GPU as the driver reports it: QUERY; None for a limit that it does not report."""

    name: str
    driver: str = ""
    power_limit_w: float | None = None
    default_power_limit_w: float | None = None


@dataclass(frozen=True)
class Facts:
    """All facts, by their names in the report. None: unknown, with the reason in `failed`, or for a limit:
    there is none. The defaults are a good machine without GPUs."""

    compiled: str | None = ""  # what the trials measured
    all_reduce: str | None = ""
    versions: Mapping[str, str] | None = field(default_factory=dict)
    cuda_of_torch: str = ""  # "" for a CPU build
    cudnn: str | None = ""
    gpus: tuple[Gpu, ...] | None = ()
    gpus_of_torch: int | None = 0
    memory_gib: float | None = 64.0  # that the processes of this machine or container can still allocate
    cores: int | None = 8  # physical ones that this process may use
    open_files: int | None = None  # the limit to which a run raises its own
    memlock_kib: int | None = None
    infiniband: tuple[str, ...] | None = ()
    shm_gib: float | None = 32.0
    hostname: str = "node"
    addresses: tuple[str, ...] | None = ("10.0.0.1",)  # to which the host name resolves
    run_folder: str = "runs"
    run_free_gib: float | None = 1000.0
    cache_folder: str = "cache"
    cache_filesystem: str | None = "ext4"
    environment: Mapping[str, str] = field(default_factory=dict)
    failed: Mapping[str, str] = field(default_factory=dict)


def look(run_dir: Path) -> Facts:
    """Collect all facts; one that is unknown does not end the report. The compile trial runs beside the other
    looks, the all-reduce alone."""
    # first: torch's compiler sets environment variables
    environment = {key: os.environ[key] for key in sorted(os.environ) if key.startswith((*SHOWN.split(),))}
    cache, host, failed = cache_folder(CompileConfig()), socket.gethostname(), dict[str, str]()
    found = dict[str, Any](hostname=host, run_folder=str(run_dir), cache_folder=str(cache), failed=failed)
    with start_trial("compile", 1) as compiled:
        looks: dict[str, Callable[[], Any]] = {
            "versions": find_versions,
            "cudnn": lambda: str(torch.backends.cudnn.version()) if torch.cuda.is_available() else "",
            "gpus": look_at_gpus,
            "gpus_of_torch": lambda: torch.cuda.device_count() if torch.cuda.is_available() else 0,
            "memory_gib": lambda: gib(free_host_bytes()),
            "cores": usable_cores,
            "open_files": lambda: limit(resource.RLIMIT_NOFILE, 1),
            "memlock_kib": lambda: limit(resource.RLIMIT_MEMLOCK, 0, 1024),
            "infiniband": lambda: tuple(path.name for path in Path("/sys/class/infiniband").glob("*")),
            "shm_gib": lambda: gib(shutil.disk_usage("/dev/shm").free),
            "addresses": lambda: tuple(sorted({str(end[0]) for *_, end in socket.getaddrinfo(host, None)})),
            "run_free_gib": lambda: gib(shutil.disk_usage(try_write(run_dir)).free),
            "cache_filesystem": lambda: find_filesystem(try_write(cache)),
            "compiled": compiled,
            "all_reduce": lambda: run_trial("all_reduce", 2),
        }
        for name, find in looks.items():
            try:
                found[name] = find()
            except Exception as error:
                found[name], failed[name] = None, one_line(str(error), MAX_REASON) or type(error).__name__
    return Facts(**found, cuda_of_torch=torch.version.cuda or "", environment=environment)


def gib(size_bytes: int) -> float:
    """Return bytes in GiB."""
    return round(size_bytes / GIB, 4)


def limit(kind: int, which: int, unit: int = 1) -> int | None:
    """Return a limit: 0, the one in force, or 1, to which a process may raise it; None is unlimited."""
    value = resource.getrlimit(kind)[which]
    return None if value == resource.RLIM_INFINITY else value // unit


def find_versions() -> dict[str, str]:
    """Return the versions of Python, the system and installed packages; with GPUs also of NCCL."""
    installed = {
        each.name: each.version for each in importlib.metadata.distributions() if each.name in PACKAGES
    }
    versions = {"meshwright": __version__, "python": platform.python_version(), "system": platform.platform()}
    nccl = torch.cuda.nccl.version() if torch.cuda.is_available() else ()
    return {**versions, **installed, "NCCL": ".".join(map(str, nccl))}


def look_at_gpus() -> tuple[Gpu, ...]:
    """Return the driver's GPUs, () without nvidia-smi. Raises RuntimeError if it fails, TimeoutExpired if it
    hangs."""
    if not shutil.which("nvidia-smi"):
        return ()
    command = ["nvidia-smi", f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DRIVER_S, check=False)
    if done.returncode:
        raise RuntimeError((done.stdout or done.stderr).strip())
    return parse_gpus(done.stdout)


def parse_gpus(text: str) -> tuple[Gpu, ...]:
    """Parse nvidia-smi's CSV table, one line per GPU. An unknown limit, such as [N/A], becomes None."""
    rows = ([cell.strip() for cell in line.split(",")] for line in text.splitlines())
    limits = re.compile(r"[\d.]+")
    return tuple(
        Gpu(name, driver, *(float(each) if limits.fullmatch(each) else None for each in watts))
        for name, driver, *watts in (row for row in rows if len(row) == len(QUERY))
    )


def try_write(path: Path) -> Path:
    """Write 1 MiB into a folder, or into its nearest parent that exists, and return that. Raises OSError."""
    path = path.expanduser().absolute()
    folder = next(candidate for candidate in (path, *path.parents) if os.path.lexists(candidate))
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(bytes(2**20))
        file.flush()
        os.fsync(file.fileno())
    return folder


def find_filesystem(folder: Path) -> str:
    """Return the type of the folder's file system: that of the longest mount point above it."""
    import psutil

    mounts = psutil.disk_partitions(all=True)
    above = [mount for mount in mounts if folder.resolve().is_relative_to(mount.mountpoint)]
    # of several mounts at one point this takes the first; they are rare
    return str(max(above, key=lambda mount: len(mount.mountpoint)).fstype)
