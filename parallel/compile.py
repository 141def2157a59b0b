"""torch.compile, in place, module by module; and what it needs from the machine."""

import shutil
import sysconfig
from pathlib import Path

import torch
from torch import nn

from parallel.config import CompileConfig
from parallel.plan import Plan, PlanError


def apply_compile(model: nn.Module, plan: Plan) -> None:
    """Compile every module of the plan's compiled units in place, as one graph each (fullgraph).

    Blocks of equal shape share one compiled graph, so compile time does not grow with depth. `module.compile`
    keeps parameter names, where `torch.compile(module)` would prefix them. The embedding stays eager: it is one
    look-up, and under tensor parallelism its masked partial result cannot enter a graph.
    """
    if plan.compile.enabled and plan.compile.backend == "inductor":
        _trust_the_cpu()
    options = {"mode": plan.compile.mode} if plan.compile.mode != "default" else {}
    for unit in plan.units:
        for name in unit.modules if unit.compiled else ():
            module = model.get_submodule(name)
            if not isinstance(module, nn.Embedding):
                module.compile(backend=plan.compile.backend, fullgraph=True, dynamic=False, **options)


def _trust_the_cpu() -> None:
    """Let inductor use the vector instructions that the CPU reports, without building a test program for each.

    The tests start Python and the compiler several times, in every process: 5.5 of 22 s of a cold start.
    """
    from torch._inductor import config

    config.cpp.vec_isa_ok = True


def check_compiler(plan: Plan, device_type: str) -> None:
    """Raise PlanError for a backend or mode that torch does not know, and where inductor would fail for want of a
    compiler or of Python's headers."""
    if not plan.compile.enabled:
        return
    _check_names(plan.compile)
    if plan.compile.backend != "inductor":
        return
    missing = _missing_for_cpu() if device_type == "cpu" else _missing_for_gpu()
    if not missing and not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        missing = "the headers of this Python (Python.h)"
    if missing:
        raise PlanError(f"parallel.compile.enabled=true needs {missing}, which this machine lacks. Install it "
                        "(Debian, Ubuntu: apt-get install g++ python3-dev), or train without compiling: "
                        "--parallel.compile.enabled=false")  # fmt: skip


def _check_names(config: CompileConfig) -> None:
    backends = torch._dynamo.list_backends(exclude_tags=None)
    if config.backend not in backends:
        raise PlanError(f"parallel.compile.backend={config.backend} is not one of {', '.join(backends)}")
    if config.mode != "default" and config.mode not in (modes := torch._inductor.list_mode_options()):
        raise PlanError(f"parallel.compile.mode={config.mode} is not one of {', '.join(modes)}")


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


def count_compiled_graphs() -> int:
    """How many graphs dynamo has captured in this process; every recompile adds one."""
    # Not counters["frames"]: with fullgraph=True dynamo does not count those.
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])
