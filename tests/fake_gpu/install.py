"""Installs the fake GPU in a cache folder: torch's plain CUDA build, the Triton that belongs to it, and the
fake libraries.

The two wheels (0.53 GB to fetch, 1.9 GB on disk) lie in a folder that is put before the environment's own
packages by PYTHONPATH, so the same interpreter, pytest and project run on either build of torch.
"""

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from tests.fake_gpu.build import PLACE, SOURCES, build_libraries

TORCH, TRITON = "2.13.0", "3.7.1"
ROOT = Path(__file__).parents[2]
# Variables of the tests or the user that would change what a process on the fake GPU does.
NOT_HANDED_ON = ("CUDA_VISIBLE_DEVICES", "TRITON_INTERPRET", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


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
        caches = {
            name: str(scratch / folder)
            for name, folder in (
                ("TORCHINDUCTOR_CACHE_DIR", "inductor"),
                ("TRITON_CACHE_DIR", "triton"),
                ("HOME", "home"),
            )
        }
        (scratch / "home").mkdir(parents=True, exist_ok=True)
        kept = {name: value for name, value in os.environ.items() if name not in NOT_HANDED_ON}
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
    """The folders, then those that the variable names already."""
    return ":".join([*map(str, folders), *filter(None, [os.environ.get(variable)])])


def install() -> FakeGpu:
    """Install what is not there yet in MESHWRIGHT_TESTS_CACHE, or ~/.cache/meshwright-tests (tests have a
    HOME of their own).

    Raises AbsentError where it cannot be had, and BuildError where the libraries do not compile.
    """
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        raise AbsentError(
            f"the fake GPU is for Linux on x86_64, and this is {platform.system()} on {platform.machine()}"
        )
    for tool in ("gcc", "g++", "nm"):
        if not shutil.which(tool):
            raise AbsentError(f"the fake GPU's libraries are compiled here, and there is no {tool}")
    folder = _cache_folder()
    sources = b"".join(
        path.read_bytes() for path in [*sorted(SOURCES.iterdir()), SOURCES.parent / "build.py"]
    )
    python = sysconfig.get_config_var("SOABI")
    site = folder / f"torch-{TORCH}-triton-{TRITON}-{python}"
    libraries = folder / f"libraries-{python}-{hashlib.sha256(sources).hexdigest()[:12]}"
    if not (site.exists() and libraries.exists()):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with FileLock(folder / "lock"):
                _make(site, _fetch)
                _make(libraries, lambda out: build_libraries(site, out))
        except OSError as error:
            said = f"the fake GPU cannot be put into {folder} ({error}); MESHWRIGHT_TESTS_CACHE names another"
            raise AbsentError(said) from error
    return FakeGpu(site, libraries)


def _cache_folder() -> Path:
    if named := os.environ.get("MESHWRIGHT_TESTS_CACHE"):
        return Path(named).absolute()
    try:
        return Path.home() / ".cache/meshwright-tests"
    except RuntimeError as error:
        raise AbsentError(
            f"there is no folder for the fake GPU ({error}); MESHWRIGHT_TESTS_CACHE names one"
        ) from error


def _make(folder: Path, fill: Callable[[Path], None]) -> None:
    """Make and fill a folder that is not there, in one step: a half-filled one of an earlier attempt is made
    anew."""
    if folder.exists():
        return
    begun = folder.with_name(folder.name + ".partial")
    shutil.rmtree(begun, ignore_errors=True)
    fill(begun)
    begun.rename(folder)


def _fetch(folder: Path) -> None:
    """The wheels of PyPI. `===` takes the plain version, a CUDA build, where `==` would also take a local
    one, as +cpu."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-compile",
        "--disable-pip-version-check",
        "--target",
        str(folder),
        f"torch==={TORCH}",
        f"triton==={TRITON}",
    ]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise AbsentError(
            f"torch {TORCH} and triton {TRITON} for the fake GPU cannot be fetched:\n{result.stderr[-500:]}"
        )
    if not (folder / "torch/lib/libtorch_cuda.so").exists():
        raise AbsentError(
            f"the fake GPU needs PyPI's torch {TORCH}, a CUDA build, and the package index here gave another "
            "build"
        )
