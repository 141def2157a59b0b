"""A driver for Triton without a GPU: the project's launch code compiles for sm_90 (H100), and each launch is
recorded instead of run.

As on a GPU, Triton determines types, constants and which arguments are divisible by 16, so the compiled
kernels are those that an H100 would load.
"""

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

from triton.backends.compiler import GPUTarget
from triton.runtime.cache import get_cache_manager
from triton.runtime.driver import driver

# per block. CUDA C++ Programming Guide, technical specifications of compute capability 9.0
MAX_SHARED_BYTES = 232448
MAX_THREADS = 1024  # per block


@dataclass(frozen=True)
class Launch:
    """One launch of a compiled kernel: the files of its code."""

    ptx: Path
    cubin: Path


@dataclass(frozen=True)
class OfflineDriver:
    """The methods and attributes of a driver that Triton uses to compile and launch, with Triton's names."""

    launches: list[Launch] = field(default_factory=list)

    @property
    def utils(self) -> "OfflineDriver":
        return self

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": MAX_SHARED_BYTES}

    def load_binary(self, *_: Any) -> tuple[None, None, int, int, int]:
        """Return module, function, registers, spills, and threads of the largest block. The module is None,
        so that Triton unloads none."""
        return None, None, 0, 0, MAX_THREADS

    def launcher_cls(self, _source: Any, metadata: Any) -> Any:
        """Return the function that Triton calls at each launch of a compiled kernel."""

        def record(*_launch: Any) -> None:
            files = get_cache_manager(metadata.hash)
            paths = (Path(files.get_file(f"{metadata.name}.{kind}")) for kind in ("ptx", "cubin"))
            self.launches.append(Launch(*paths))

        return record


@contextmanager
def offline_triton(cache: Path) -> Iterator[list[Launch]]:
    """Inside this context Triton compiles for sm_90 into the folder `cache`, and its launches are appended to
    the list."""
    previous, offline = driver._active, OfflineDriver()
    with patch.dict(os.environ, TRITON_CACHE_DIR=str(cache)):
        driver.set_active(offline)
        try:
            yield offline.launches
        finally:
            driver.set_active(previous)


def load_copy(path: Path) -> ModuleType:
    """Load the file as a separate module, whose kernels share no compiled code with the imported module: a
    kernel caches compiled code by device number, and a real GPU also has number 0."""
    spec = importlib.util.spec_from_file_location(f"copy_of_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
