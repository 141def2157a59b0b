"""Async tensor parallelism: a gather or a scatter of tp runs in pieces, beside the matrix product next to it.

Inductor's pass (torch/_inductor/fx_passes/micro_pipeline_tp.py) puts one operator of torch.ops.symm_mem in
the place of an all-gather and the products of what it gathers, and one in the place of a product and the
reduce-scatter of its result. A piece is sent through memory that the GPUs of a group share while another
piece is multiplied. Where the pass does not know the graph again it leaves it as it was, and says nothing: so
the compiled code itself is searched for the operators.

In a profile of a GPU such operators show torch's own products, piece by piece on two streams, copies from
device to device and small kernels named barrier_kernel; NCCL's kernels of all-gather and reduce-scatter over
tp are gone.
"""

import logging
import re
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import torch.distributed as dist

from meshwright.parallel.errors import PlanError
from meshwright.parallel.plan.schema import Plan, UnitPlan

WAY_OUT = "use parallel.async_tp=false"
# A call in the code that inductor writes: comments and checks of results name operators too, without the
# bracket.
_FUSED = re.compile(r"torch\.ops\.symm_mem\.fused_\w+\.default\(")
_PLAIN = re.compile(
    r"torch\.ops\._c10d_functional\.(all_gather_into_tensor|reduce_scatter_tensor)\w*\.default\(.*'(\w+)'"
)
_PASS = "torch._inductor.fx_passes.micro_pipeline_tp"


def check_async_tp(tp: int, device_type: str, processes_here: int) -> None:
    """Raise PlanError where the GPUs of a tp group do not share memory. `processes_here`: of this node, one
    for each GPU."""
    if device_type != "cuda":
        raise PlanError(
            "parallel.async_tp=true sends pieces through memory that GPUs share (NVLink), and this run "
            f"computes on the CPU: {WAY_OUT}, or run on GPUs"
        )
    if not dist.is_nccl_available():
        raise PlanError(
            f"parallel.async_tp=true needs a torch with NCCL, which this one is built without: {WAY_OUT}"
        )
    if missing := not_shared(tp, processes_here, torch.cuda.can_device_access_peer):
        raise PlanError(f"parallel.async_tp=true {missing}: {WAY_OUT}")


def not_shared(tp: int, gpus: int, reaches: Callable[[int, int], bool]) -> str:
    """What keeps the GPUs of a node, which make groups of `tp` neighbours, from sharing memory within each;
    "" if nothing. `reaches(a, b)`: whether GPU a can read the memory of GPU b."""
    if gpus % tp:
        return f"needs tp groups within a node, and tp={tp} does not divide its {gpus} processes"
    for a in range(gpus):
        first = a - a % tp
        for b in range(first, first + tp):
            if a != b and not reaches(a, b):
                return (
                    f"needs GPUs that reach each other's memory (NVLink), and GPU {a} of this node does "
                    f"not reach GPU {b}"
                )
    return ""


def use_async_tp(group_name: str) -> None:
    """Turn inductor's pass on, for this process, and the memory that the group of tp ranks shares. Every rank
    of the group calls it, before anything is compiled."""
    import torch._inductor.config
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    torch._inductor.config._micro_pipeline_tp = True
    # each rank's sentences on single products; `describe_async_tp` says it all
    logging.getLogger(_PASS).setLevel(logging.ERROR)
    # torch 2.11 to 2.13 call it needless, but the pass asks whether it has been called
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        enable_symm_mem_for_group(group_name)  # type: ignore[arg-type]


def describe_async_tp(plan: Plan) -> str:
    """One line, after the first step: how many of the gathers and scatters in this process's compiled code
    are fused, and what the others stand at; or why none is."""
    return verdict(_sources(), plan)


def verdict(sources: Iterable[str], plan: Plan) -> str:
    """`describe_async_tp` of the code that inductor has written."""
    code = "\n".join(sources)
    fused, plain = len(_FUSED.findall(code)), _PLAIN.findall(code)
    if not fused:
        return f"async tp: NOT fused, because {_why_not([group for _, group in plain])}"
    said = f"async tp: fused {fused} of {fused + len(plain)} gathers and scatters"
    scatters = sum(kind == "reduce_scatter_tensor" for kind, _ in plain)
    if not plain:
        return said
    return (
        f"{said}; the others (gathers: {len(plain) - scatters}, scatters: {scatters}) have no product of "
        f"their own beside them: {', '.join(_where_left(plan))}"
    )


def _why_not(groups: list[str]) -> str:
    """`groups`: the process group of each gather and scatter that is left in the code."""
    from torch.distributed._symmetric_memory import is_symm_mem_enabled_for_group

    if not groups:
        return "the compiled code has no gather and no scatter"
    if not torch._inductor.config._micro_pipeline_tp:
        return "inductor's pass for it is off (torch._inductor.config._micro_pipeline_tp)"
    if not dist.is_nccl_available():
        return "this torch is built without NCCL, and inductor's pass does nothing then"
    if not any(is_symm_mem_enabled_for_group(group) for group in groups):  # type: ignore[arg-type]
        return "the tp group has no symmetric memory"
    return (
        f"inductor's pass found none of the {len(groups)} gathers and scatters next to a matrix product of a "
        f"kind that it knows (TORCH_LOGS=+{_PASS} with a fresh parallel.compile.cache_dir says more)"
    )


def _where_left(plan: Plan) -> list[str]:
    """Where the pass is known to find nothing, in this plan."""
    places = ["the head, whose loss makes its products"]
    if not plan.fused_projections:
        places.append(
            "gradients that are summed over several projections first (parallel.fused_projections=true makes "
            "them one)"
        )
    if any(map(_recomputes_in_part, plan.units)):
        places.append("inputs that are gathered again for the gradients of weights alone")
    return places


def _recomputes_in_part(unit: UnitPlan) -> bool:
    return unit.activation_checkpoint in ("selective", "budget")


def _sources() -> list[str]:
    """The code that inductor has written for this process, or found in its cache, a module each."""
    from torch._inductor.codecache import PyCodeCache

    paths = {Path(str(module.__file__)) for module in PyCodeCache.modules}
    return [path.read_text(encoding="utf-8") for path in sorted(paths)]
