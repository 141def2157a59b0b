"""What compiling needs from the machine, where its graphs are kept, and how many there are."""

import os
import shutil
import sysconfig
from pathlib import Path

from meshwright.parallel.compile.async_tp import check_async_tp
from meshwright.parallel.config import CompileConfig
from meshwright.parallel.errors import PlanError
from meshwright.parallel.plan.schema import Plan

DEFAULT_CACHE = "~/.cache/meshwright/compile"


def check_compiler(plan: Plan, device_type: str, processes_here: int) -> None:
    """Raise PlanError where inductor would fail for want of a compiler, of Python's headers or of what async
    tp needs. `processes_here`: of this node."""
    if not plan.compile.enabled or plan.compile.backend != "inductor":
        return
    if plan.async_tp:
        check_async_tp(plan.mesh.tp, device_type, processes_here)
    missing = _missing_for_cpu() if device_type == "cpu" else _missing_for_gpu()
    if not missing and not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        missing = "the headers of this Python (Python.h)"
    if missing:
        raise PlanError(
            f"parallel.compile.enabled=true needs {missing}, which this machine lacks. Install it "
            "(Debian, Ubuntu: apt-get install g++ python3-dev), or train without compiling: "
            "--parallel.compile.enabled=false"
        )


def _missing_for_cpu() -> str | None:
    from torch._inductor import cpp_builder, exc

    try:
        cpp_builder.get_cpp_compiler()
    except (exc.InvalidCxxCompiler, OSError):  # OSError: $CXX names something that cannot be run
        return "a C++ compiler (g++)"
    return None


def _missing_for_gpu() -> str | None:
    # Triton builds its launcher with one of these.
    return None if any(map(shutil.which, ("cc", "gcc", "clang"))) else "a C compiler (gcc or clang)"


def cache_folder(config: CompileConfig) -> Path:
    """Of compiled graphs, and of what planning has found out by tracing."""
    return Path(config.cache_dir or os.environ.get("TORCHINDUCTOR_CACHE_DIR") or DEFAULT_CACHE).expanduser()


def use_cache_folder(config: CompileConfig) -> None:
    """Name the folder of compiled graphs, before anything asks inductor for it: from then on it is fixed.
    Raises PlanError if it cannot be made."""
    folder = cache_folder(config)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:  # ValueError: a name that no folder can have
        why = f"cannot make this folder ({getattr(error, 'strerror', error)}): name another"
        raise PlanError(f"parallel.compile.cache_dir={folder}: {why}") from None
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)  # inductor reads it from the environment alone
