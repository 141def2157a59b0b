"""torch.compile, in place, module by module; and what it has compiled."""

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from parallel.compile_budget import budget_backend
from parallel.config import CompileConfig
from parallel.plan import Plan, PlanError

DEFAULT_CACHE = "~/.cache/meshwright/compile"


def apply_compile(model: nn.Module, plan: Plan) -> None:
    """Compile every module of the plan's compiled units in place, as one graph each (fullgraph).

    Blocks of equal shape share one compiled graph, so compile time does not grow with depth. `module.compile`
    keeps parameter names, where `torch.compile(module)` would prefix them. The embedding stays eager: it is one
    look-up.
    """
    config = plan.compile
    torch.set_float32_matmul_precision(config.float32_matmul_precision)
    if config.enabled and config.backend == "inductor":
        _trust_the_cpu()
    kinds = {(unit.activation_checkpoint, unit.saved_ops, unit.activation_budget) for unit in plan.units}
    # Blocks treated differently are graphs of the same code, which dynamo would take for recompilations without end.
    torch._dynamo.config.recompile_limit += len(kinds)
    for unit in plan.units:
        for name in unit.modules if unit.compiled else ():
            module = model.get_submodule(name)
            if not isinstance(module, nn.Embedding):
                module.compile(fullgraph=True, dynamic=config.dynamic, **_backend(config, unit.activation_budget))


def use_cache_folder(config: CompileConfig) -> None:
    """Name the folder of compiled graphs, before anything asks inductor for it: from then on it is fixed. Raises PlanError
    if it cannot be made."""
    folder = Path(config.cache_dir or os.environ.get("TORCHINDUCTOR_CACHE_DIR") or DEFAULT_CACHE).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = f"cannot make this folder ({error.strerror}): name another"
        raise PlanError(f"parallel.compile.cache_dir={folder}: {why}") from None
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)  # inductor reads it from the environment alone


def _backend(config: CompileConfig, budget: float) -> dict[str, Any]:
    """Arguments of torch.compile that name the backend, and hold it to an activation memory budget below 1."""
    if budget < 1:
        return {"backend": budget_backend(config.backend, config.mode, budget)}
    return {"backend": config.backend} | ({"mode": config.mode} if config.mode != "default" else {})


def _trust_the_cpu() -> None:
    """Let inductor use the vector instructions that the CPU reports, without building a test program for each.

    The tests start Python and the compiler several times, in every process: 5.5 of 22 s of a cold start.
    """
    from torch._inductor import config

    config.cpp.vec_isa_ok = True


def count_compiled_graphs() -> int:
    """How many graphs dynamo has captured in this process; every recompile adds one."""
    # Not counters["frames"]: with fullgraph=True dynamo does not count those.
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])
