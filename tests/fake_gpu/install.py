"""Installs the fake GPU in a cache folder: torch's plain CUDA build, the Triton that belongs to it, and the fake libraries.

The two wheels (0.53 GB to fetch, 1.9 GB on disk) lie in a folder that is put before the environment's own packages by PYTHONPATH,
so the same interpreter, pytest and project run on either build of torch.
"""

import hashlib
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from tests.fake_gpu.build import SOURCES, build_libraries

TORCH, TRITON = "2.13.0", "3.7.1"
ROOT = Path(__file__).parents[2]


class AbsentError(Exception):
    """The fake GPU cannot be had on this machine; the text says why."""


@dataclass(frozen=True)
class FakeGpu:
    """An installed one: the folder of torch and triton, and that of the libraries."""

    site: Path
    libraries: Path

    def environment(self, scratch: Path, devices: int = 1, root: Path = ROOT) -> dict[str, str]:
        """The variables of a process that sees so many H100s and imports the project of `root`.

        `scratch` gets a log of each process (log.PID), and the caches of what inductor and Triton compile.
        """
        caches = {name: str(scratch / folder) for name, folder in
                  (("TORCHINDUCTOR_CACHE_DIR", "inductor"), ("TRITON_CACHE_DIR", "triton"), ("HOME", "home"))}  # fmt: skip
        (scratch / "home").mkdir(parents=True, exist_ok=True)
        kept = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
        return {**kept, **caches, "PYTHONPATH": _before("PYTHONPATH", self.site, root),
                "LD_LIBRARY_PATH": _before("LD_LIBRARY_PATH", self.libraries), "FAKE_CUDA_LOG": str(scratch / "log"),
                "FAKE_CUDA_DEVICES": str(devices), "TORCHINDUCTOR_COMPILE_THREADS": "1"}  # fmt: skip


def _before(variable: str, *folders: Path) -> str:
    """The folders, then those that the variable names already."""
    return ":".join([*map(str, folders), *filter(None, [os.environ.get(variable)])])


def install() -> FakeGpu:
    """Install what is not there yet in MESHWRIGHT_TESTS_CACHE, or ~/.cache/meshwright-tests (tests have a HOME of their own).

    Raises AbsentError where it cannot be had, and subprocess.CalledProcessError where the libraries do not compile.
    """
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        raise AbsentError(f"the fake GPU is for Linux on x86_64, and this is {platform.system()} on {platform.machine()}")
    for tool in ("gcc", "g++", "nm"):
        if not shutil.which(tool):
            raise AbsentError(f"the fake GPU's libraries are compiled here, and there is no {tool}")
    folder = Path(os.environ.get("MESHWRIGHT_TESTS_CACHE") or Path.home() / ".cache/meshwright-tests")
    folder.mkdir(parents=True, exist_ok=True)
    sources = b"".join(path.read_bytes() for path in [*sorted(SOURCES.iterdir()), SOURCES.parent / "build.py"])
    python = f"{sys.implementation.name}{sys.version_info.major}{sys.version_info.minor}"
    site = folder / f"torch-{TORCH}-triton-{TRITON}-{python}"
    libraries = folder / f"libraries-{python}-{hashlib.sha256(sources).hexdigest()[:12]}"
    with FileLock(folder / "lock"):
        _make(site, _fetch)
        _make(libraries, lambda out: build_libraries(site, out))
    return FakeGpu(site, libraries)


def _make(folder: Path, fill: Callable[[Path], None]) -> None:
    """Make and fill a folder that is not there, in one step: a half-filled one of an earlier attempt is made anew."""
    if folder.exists():
        return
    begun = folder.with_name(folder.name + ".partial")
    shutil.rmtree(begun, ignore_errors=True)
    fill(begun)
    begun.rename(folder)


def _fetch(folder: Path) -> None:
    """The wheels of PyPI. `===` takes the plain version, a CUDA build, where `==` would also take a local one, as +cpu."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--disable-pip-version-check",
               "--target", str(folder), f"torch==={TORCH}", f"triton==={TRITON}"]  # fmt: skip
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise AbsentError(f"torch {TORCH} and triton {TRITON} for the fake GPU cannot be fetched:\n{result.stderr[-500:]}")
    if not (folder / "torch/lib/libtorch_cuda.so").exists():
        raise AbsentError(f"the fake GPU needs PyPI's torch {TORCH}, a CUDA build, and the package index here gave another build")
