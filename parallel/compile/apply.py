"""Applies torch.compile in place, module by module, with an activation memory budget per unit (torch has one
for the whole process); what compiling requires of a machine, and the cache folder of compiled graphs."""

import contextlib
import os
import shutil
import sysconfig
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from meshwright.parallel.compile.stats import count_compiled_graphs
from meshwright.parallel.config import CompileConfig
from meshwright.parallel.errors import PlanError
from meshwright.parallel.plan.schema import Plan

DEFAULT_CACHE = "~/.cache/meshwright"
MANY_GRAPHS = 9  # of one class: more than torch allows by default
_Call = Callable[..., Any]


def apply_compile(model: nn.Module, plan: Plan, tp: DeviceMesh) -> None:
    """Compile every module of the plan's compiled units in place, as one graph each unless `fullgraph` is
    off.

    Blocks of equal shape share one compiled graph, so compile time does not grow with depth. `module.compile`
    keeps parameter names; `torch.compile(module)` would prefix them. The embedding stays eager: it is one
    look-up. `tp`: the mesh axis.
    """
    config = plan.compile
    if config.enabled and config.backend == "inductor":
        _skip_cpu_probe()
        if plan.async_tp:
            from meshwright.parallel.compile.async_tp import enable_async_tp

            enable_async_tp(tp.get_group().group_name)
    graphs = Counter[type]()  # by class
    for unit in plan.units:
        for name in unit.modules if unit.compiled else ():
            module = model.get_submodule(name)
            if not isinstance(module, nn.Embedding):
                # Blocks with different settings or numbers are several graphs of the same code, which dynamo
                # would count as recompiles up to its limits; each may have another for evaluations.
                torch._dynamo.config.recompile_limit += 2
                torch._dynamo.config.accumulated_recompile_limit += 2
                through_own_frame(module)
                compile_module(module, config, unit.activation_budget)
                if module._compiled_call_impl is not None:
                    compiled = module._compiled_call_impl
                    module._compiled_call_impl = _explained(name, compiled, type(module), graphs, config)


def compile_module(module: nn.Module, config: CompileConfig, budget: float = 1.0) -> None:
    """Compile a module in place. `budget`: share of its activations that the compiler saves."""
    backend: dict[str, Any] = {"backend": config.backend}
    if budget < 1:
        backend["backend"] = budget_backend(config.backend, config.mode, budget)
    elif config.mode != "default":
        backend["mode"] = config.mode
    module.compile(fullgraph=config.fullgraph, dynamic=config.dynamic, **backend)


def _explained(name: str, compiled: _Call, kind: type, graphs: Counter[type], config: CompileConfig) -> _Call:
    """Return a compiled module's call that explains why a module cannot be one graph, and why modules of one
    class (`kind`) are many, which it counts in `graphs`."""

    def call(*args: Any, **kwargs: Any) -> Any:
        before = count_compiled_graphs()
        try:
            result = compiled(*args, **kwargs)
        except torch._dynamo.exc.FailOnRecompileLimitHit as error:
            many = f"more than {torch._dynamo.config.recompile_limit} graphs: {_why_many()}"
            raise PlanError(f"{name}: {kind.__name__} needs {many}") from error
        except torch._dynamo.exc.TorchDynamoException as error:
            failed = isinstance(error, torch._dynamo.exc.BackendCompilerFailed)
            cause: Any = vars(error)["inner_exception"] if failed else error
            reason = next(filter(None, map(str.strip, str(cause).splitlines())), type(cause).__name__)
            what, ways_out = f" by {config.backend}" if failed else "", ""
            if config.fullgraph and not failed:
                what = " as one graph"
                ways_out = "let it be several graphs (parallel.compile.fullgraph=false), "
            raise PlanError(
                f"{name} cannot be compiled{what}: {reason}. Change the module, {ways_out}or compile none "
                "(parallel.compile.enabled=false)"
            ) from error
        except AssertionError as error:
            if "tensors_saved_with_vc_check" not in str(error):
                raise
            # tests/distributed/test_torch_faults.py
            raise PlanError(
                f"{name}: on a CPU, torch 2.13 cannot recompute random operators, such as its own attention, "
                "in a compiled block with weights split over tp, or unsharded: use "
                "activation_checkpoint=none, compile.enabled=false, or a GPU"
            ) from error
        if made := count_compiled_graphs() - before:
            graphs[kind] += made
            if graphs[kind] - made < MANY_GRAPHS <= graphs[kind] and dist.get_rank() == 0:
                warnings.warn(
                    f"{name}: the {graphs[kind]}th graph of {kind.__name__}: {_why_many()}", stacklevel=2
                )
        return result

    return call


def _why_many() -> str:
    """Return the guard for which dynamo made, or would have to make, its last graph, and the ways out."""
    reason = torch._dynamo.utils.get_compilation_metrics()[-1].recompile_reason
    return (
        f"the guard that failed: {' '.join(str(reason).split())}. With parallel.compile.dynamic=true one "
        "graph serves all sizes, and all blocks that differ by a number; or make that number a buffer"
    )


def through_own_frame(module: nn.Module) -> None:
    """Let dynamo compile a module of torch's own, such as nn.TransformerEncoderLayer: it skips functions of
    torch, unless a function of somebody else calls them."""
    if "forward" not in vars(module) and type(module).forward.__module__.startswith("torch.nn."):
        module.forward = MethodType(_class_forward, module)


def _class_forward(module: Any, *args: Any, **kwargs: Any) -> Any:
    return type(module).forward(module, *args, **kwargs)


def _skip_cpu_probe() -> None:
    """Let inductor use the vector instructions that the CPU reports without a test program for each.

    These test programs start Python and the compiler several times in every process: 5.5 of 22 s of a cold
    start.
    """
    from torch._inductor import config

    config.cpp.vec_isa_ok = True


@cache
def budget_backend(name: str, mode: str, budget: float) -> Callable[..., Any]:
    """Return a backend that keeps the share `budget` of the activations and recomputes the rest.

    torch has one budget per process, but reads it inside the backend, while it partitions a graph: setting it
    there gives each unit its own budget. Cached, because blocks share a graph only if they share the backend.
    """
    from torch._dynamo import lookup_backend
    from torch._functorch import config as functorch
    from torch._inductor import list_mode_options

    settings: dict[str, Any] = {"activation_memory_budget": budget}
    if hasattr(functorch, "unsafe_treat_script_objects_as_zero_size"):  # torch 2.13
        # The partitioner computes the size of every graph input, and raises for the DeviceMesh of a weight
        # split over tp.
        settings["unsafe_treat_script_objects_as_zero_size"] = True
    inner = lookup_backend(name)
    options = {"config_patches": list_mode_options(mode)} if mode != "default" else {}

    def compile_within_budget(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        with functorch.patch(settings):
            return inner(graph, inputs, **options)

    return compile_within_budget


def check_compiler(plan: Plan, device_type: str, local_processes: int) -> None:
    """Raise PlanError if inductor would fail because this machine lacks a compiler, Python's headers, or the
    requirements of async tp.

    `local_processes`: the processes of this node.
    """
    if not plan.compile.enabled or plan.compile.backend != "inductor":
        return
    if plan.async_tp:
        from meshwright.parallel.compile.async_tp import check_async_tp

        check_async_tp(plan.mesh.tp, device_type, local_processes)
    missing = _missing_for_cpu() if device_type == "cpu" else _missing_for_gpu()
    if not missing and not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        missing = "the headers of this Python (Python.h)"
    if missing:
        raise PlanError(
            f"parallel.compile.enabled=true needs {missing}, which this machine lacks: install it "
            "(Debian, Ubuntu: apt-get install g++ python3-dev), or train without compiling: "
            "--parallel.compile.enabled=false"
        )


def _missing_for_cpu() -> str | None:
    from torch._inductor import cpp_builder, exc

    try:
        cpp_builder.get_cpp_compiler()
    except (exc.InvalidCxxCompiler, OSError):  # OSError: $CXX is not an executable program
        return "a C++ compiler (g++)"
    return None


def _missing_for_gpu() -> str | None:
    # Triton compiles its launcher with one of these.
    return None if any(map(shutil.which, ("cc", "gcc", "clang"))) else "a C compiler (gcc or clang)"


def cache_folder(config: CompileConfig) -> Path:
    """Return the folder that caches compiled graphs and the planner's traces."""
    named = config.cache_dir or os.environ.get("TORCHINDUCTOR_CACHE_DIR", "")
    # importing torch's compiler sets the variable to a folder of its own
    default = named.startswith(os.path.join(tempfile.gettempdir(), "torchinductor_"))
    return Path(os.path.expanduser(named)) if named and not default else user_cache() / "compile"


def user_cache() -> Path:
    """Return this user's cache folder: ~/.cache/meshwright, or one among the temporary files, and for Triton,
    if no home folder can be written, as in a container for a user id without a name. Raises PlanError."""
    with contextlib.suppress(OSError, RuntimeError):  # RuntimeError: ~ is unknown
        folder = Path(DEFAULT_CACHE).expanduser()
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    folder = Path(tempfile.gettempdir(), f"meshwright-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.lstat().st_uid != os.getuid():  # its compiled code would run
        raise PlanError(f"{folder} is another user's: set HOME, or TMPDIR, to a folder that can be written")
    os.environ.setdefault("TRITON_CACHE_DIR", str(folder / "triton"))
    return folder


def use_cache_folder(config: CompileConfig) -> None:
    """Create the cache folder and set TORCHINDUCTOR_CACHE_DIR to it, before inductor reads that variable.

    Raises PlanError if the folder cannot be created.
    """
    folder = cache_folder(config)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:  # ValueError: not a valid path
        problem = f"cannot create this folder ({getattr(error, 'strerror', error)}): name another"
        raise PlanError(f"parallel.compile.cache_dir={folder}: {problem}") from None
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)  # inductor reads it only from the environment
