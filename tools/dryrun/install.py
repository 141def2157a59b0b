"""Install the fake GPU in a cache folder: torch's plain CUDA build, its version of Triton, and the fake
libraries; and run the steps of a plan on it.

The two wheels (a download of 0.53 GB, 1.9 GB on disk) are in a folder that PYTHONPATH puts before the
environment's packages, so the same interpreter and project run with either build of torch.
"""

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

import meshwright
from meshwright.parallel.plan.schema import Plan
from meshwright.parallel.plan.serialize import plan_to_yaml
from meshwright.tools.dryrun.build import PLACE, SOURCES, build_libraries
from meshwright.tools.dryrun.log import PLAN_FILE
from meshwright.tools.processes import find_reason, run_to_end
from meshwright.train.errors import ConfigError

TORCH, TRITON = "2.13.0", "3.7.1"
SIZE = "0.53 GB, 1.9 GB on disk"
ROOT = Path(meshwright.__file__).parents[1]
# Variables that would change the behavior of a process on the fake GPU.
NOT_INHERITED = ("CUDA_VISIBLE_DEVICES", "TRITON_INTERPRET", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
ENVIRONMENT = {
    "TORCHINDUCTOR_BENCHMARK_KERNEL": "1",  # inductor writes its estimate of a kernel's bytes into the kernel
    "FAKE_CUDA_REFUSES_GIB": "100000",  # the memory of a plan that does not fit an H100 is counted too
    # In a group of more ranks than this (128 by default) rank 0 would wait for ids from other ranks.
    "TORCH_NCCL_RANKS_PER_ROOT": "1000000",
}
PROGRESS = "progress: "  # begins the lines of step.py's output that are for the user


class FakeGpuError(ConfigError):
    """The fake GPU cannot be installed on this machine; the message contains the reason."""


@dataclass(frozen=True)
class FakeGpu:
    """An installed fake GPU: the folder of torch and triton, and the folder of the libraries."""

    site: Path
    libraries: Path

    def environment(self, scratch: Path, devices: int = 1, root: Path = ROOT) -> dict[str, str]:
        """Return the environment of a process that sees `devices` H100s and imports the project in `root`.

        `scratch` gets a log of each process (log.PID), and the caches of inductor and Triton.
        """
        caches = {
            name: str(scratch / folder)
            for name, folder in (
                ("TORCHINDUCTOR_CACHE_DIR", "inductor"),
                ("TRITON_CACHE_DIR", "triton"),
                ("HOME", "home"),
            )
        }
        (scratch / "home").mkdir(parents=True, exist_ok=True)
        kept = {name: value for name, value in os.environ.items() if name not in NOT_INHERITED}
        return {
            **kept,
            **caches,
            "PYTHONPATH": _before("PYTHONPATH", self.libraries, self.site, root),
            "LD_LIBRARY_PATH": _before("LD_LIBRARY_PATH", self.libraries / PLACE),
            "FAKE_CUDA_LOG": str(scratch / "log"),
            "FAKE_CUDA_DEVICES": str(devices),
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
        }


def _before(variable: str, *folders: Path) -> str:
    """Return the folders, followed by those that the variable already contains."""
    return ":".join([*map(str, folders), *filter(None, [os.environ.get(variable)])])


def install(folder: Path, report: Callable[[str], None]) -> FakeGpu:
    """Install the missing parts in the folder. `report` receives lines of progress.

    Raises FakeGpuError if it cannot be installed, and BuildError if the libraries do not compile.
    """
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        raise FakeGpuError(
            f"the fake GPU needs Linux on x86_64, but this is {platform.system()} on {platform.machine()}"
        )
    for tool in ("gcc", "g++", "nm"):
        if not shutil.which(tool):
            raise FakeGpuError(
                f"the fake GPU's libraries must be compiled, but there is no {tool}: install it"
            )
    sources = [*sorted(SOURCES.glob("*.cc")), *sorted(SOURCES.glob("*.h")), SOURCES.parent / "build.py"]
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:12]
    python = sysconfig.get_config_var("SOABI")
    site = folder / f"torch-{TORCH}-triton-{TRITON}-{python}"
    libraries = folder / f"libraries-{python}-{digest}"
    if not (site.exists() and libraries.exists()):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with FileLock(folder / "lock"):
                if not site.exists():
                    report(f"downloading torch {TORCH} and triton {TRITON} to {folder}: {SIZE}, once")
                make_whole(site, _fetch)
                make_whole(libraries, lambda out: build_libraries(site, out))
        except OSError as error:
            raise FakeGpuError(
                f"the fake GPU cannot be installed in {folder} ({error}): name another folder"
            ) from error
    return FakeGpu(site, libraries)


def make_whole(folder: Path, fill: Callable[[Path], None]) -> None:
    """Create and fill a missing folder atomically; after an error or an interrupt nothing of it remains."""
    if folder.exists():
        return
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed
    try:
        fill(partial)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _fetch(folder: Path) -> None:
    """Install the wheels of PyPI. `===` matches only the plain version, a CUDA build; `==` would also match a
    local version such as +cpu."""
    options = ("--quiet", "--no-deps", "--no-compile", "--disable-pip-version-check", "--target", str(folder))
    wheels = (f"torch==={TORCH}", f"triton==={TRITON}")
    command = [sys.executable, "-m", "pip", "install", *options, *wheels]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise FakeGpuError(
            f"torch {TORCH} and triton {TRITON} for the fake GPU cannot be downloaded ({SIZE}): "
            f"{find_reason(result.stderr, 300)}"
        )
    if not (folder / "torch/lib/libtorch_cuda.so").exists():
        raise FakeGpuError(
            f"the fake GPU needs PyPI's torch {TORCH}, a CUDA build, but the package index returned another "
            "build"
        )


def step_command(scratch: Path, arguments: Sequence[str], record: bool = False) -> list[str]:
    """Return the command that runs the steps of the plan in `scratch`, with the config of the arguments."""
    options = ["--record"] if record else []
    return [sys.executable, "-m", "meshwright.tools.dryrun.step", str(scratch), *options, *arguments]


def run_program(
    gpu: FakeGpu, scratch: Path, plan: Plan, arguments: Sequence[str], report: Callable[[str], None]
) -> None:
    """Run the steps of the plan and record one, in a separate process; its files are written to `scratch`.
    `report` receives lines of progress. Raises BenchError if the process fails."""
    (scratch / PLAN_FILE).write_text(plan_to_yaml(plan))
    output = scratch / "output.log"
    shown = 0

    def show_progress() -> None:
        nonlocal shown
        lines = output.read_text(errors="replace").split("\n")[:-1]
        progress = [line.removeprefix(PROGRESS) for line in lines if line.startswith(PROGRESS)]
        for line in progress[shown:]:
            report(line)
        shown = len(progress)

    environment = gpu.environment(scratch) | ENVIRONMENT
    run_to_end(step_command(scratch, arguments, record=True), environment, output, show_progress)
    show_progress()
