"""What compiling needs from the machine, and whether it got what it needed from the cache."""

import shutil
import sysconfig
from pathlib import Path

import torch

from parallel.plan import Plan, PlanError


def check_compiler(plan: Plan, device_type: str) -> None:
    """Raise PlanError where inductor would fail for want of a compiler or of Python's headers."""
    if not plan.compile.enabled or plan.compile.backend != "inductor":
        return
    missing = _missing_for_cpu() if device_type == "cpu" else _missing_for_gpu()
    if not missing and not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        missing = "the headers of this Python (Python.h)"
    if missing:
        raise PlanError(f"parallel.compile.enabled=true needs {missing}, which this machine lacks. Install it "
                        "(Debian, Ubuntu: apt-get install g++ python3-dev), or train without compiling: "
                        "--parallel.compile.enabled=false")  # fmt: skip


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


def describe_cache() -> str:
    """One line on the compiled graphs of this process so far: from the cache, or compiled anew; "" if there are none."""
    counters = torch._dynamo.utils.counters["inductor"]
    hits, misses = counters["fxgraph_cache_hit"], counters["fxgraph_cache_miss"]
    bypassed = counters["fxgraph_cache_bypass"]
    if not hits + misses + bypassed:
        return ""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return f"compile cache {cache_dir()}: {hits} graphs found there, {misses + bypassed} compiled anew"
