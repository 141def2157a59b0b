"""Look at this machine: the facts that decide whether a run fails or is slow."""

import csv
import importlib.metadata
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from meshwright import __version__
from meshwright.parallel.compile.apply import cache_folder
from meshwright.parallel.config import CompileConfig
from meshwright.parallel.errors import one_line
from meshwright.parallel.machine_memory import free_host_bytes
from meshwright.parallel.memory_breakdown import GIB
from meshwright.tools.doctor.trials import run_trial, start_trial
from meshwright.train.distributed.process_group import usable_cores

PACKAGES = ("torch", "triton", "numpy", "safetensors", "tokenizers", "tensorboard", "transformers", "torchao")
# Variables that can affect a run begin with one of these.
SHOWN = "NCCL_ TORCH PYTORCH_ GLOO_ OMP_ MKL_ CUDA_ NVIDIA_TF32 KMP_ LD_LIBRARY_ LD_PRELOAD TRITON_ PET_ CXX"
NAMES = {"name": "name", "driver": "driver_version"}  # of a GPU: facts and what the driver calls them
GPU = NAMES | {"power_limit_w": "power.limit", "default_power_limit_w": "power.default_limit"}
DRIVER_S = 20.0  # timeout: nvidia-smi hangs if a GPU has fallen off the bus
MAX_REASON = 300  # characters
Facts = dict[str, Any]  # by their names in the report


def look(run_dir: Path) -> Facts:
    """Collect all facts, in the units of their names. None: unknown, with the reason in `failed`, or for a
    limit: there is none. The compile trial runs beside the other looks, the all-reduce alone."""
    # first: torch's compiler sets environment variables
    environment = {key: os.environ[key] for key in sorted(os.environ) if key.startswith((*SHOWN.split(),))}
    cache, host, failed = cache_folder(CompileConfig()), socket.gethostname(), dict[str, str]()
    found = Facts(compiled=None, all_reduce=None, hostname=host, failed=failed, environment=environment)
    found |= {
        "run_folder": str(run_dir),
        "cache_folder": str(cache),
        "cuda_of_torch": torch.version.cuda or "",
    }
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
    return found


def gib(size_bytes: int) -> float:
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


def look_at_gpus() -> tuple[Facts, ...]:
    """Return the driver's GPUs, () without nvidia-smi. Raises RuntimeError if it fails, TimeoutExpired if it
    hangs."""
    if not shutil.which("nvidia-smi"):
        return ()
    command = ["nvidia-smi", f"--query-gpu={','.join(GPU.values())}", "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DRIVER_S, check=False)
    if done.returncode:
        raise RuntimeError((done.stdout or done.stderr).strip())
    return parse_gpus(done.stdout)


def parse_gpus(text: str) -> tuple[Facts, ...]:
    """Parse nvidia-smi's CSV table, one line per GPU. An unknown limit, such as [N/A], becomes None."""
    rows = csv.DictReader(text.splitlines(), [*GPU], skipinitialspace=True)
    return tuple(
        {name: float(value) if re.fullmatch(r"[\d.]+", value) else None for name, value in row.items()}
        | {name: row[name] for name in NAMES}
        for row in rows
        if None not in row.values()
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
