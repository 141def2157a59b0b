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

WAY_OUT = "use parallel.async_tp=false"
# A call in the code that inductor writes: comments and checks of results name operators too, without the
# bracket.
_FUSED = re.compile(r"torch\.ops\.symm_mem\.fused_\w+\.default\(")
_PLAIN = re.compile(
    r"torch\.ops\._c10d_functional\.(?:all_gather_into_tensor|reduce_scatter_tensor)\w*\.default\("
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


def describe_async_tp() -> str:
    """One line, after the first step: how many of the gathers and scatters in this process's compiled code
    are fused, or why none is. Where the others stand: docs/speed.md."""
    return verdict(_sources())


def verdict(sources: Iterable[str]) -> str:
    """`describe_async_tp` of the code that inductor has written."""
    code = "\n".join(sources)
    fused, plain = len(_FUSED.findall(code)), len(_PLAIN.findall(code))
    if fused:
        return f"async tp: fused {fused} of {fused + plain} gathers and scatters"
    if not plain:
        return "async tp: NOT fused, because the compiled code has no gather and no scatter"
    return (
        f"async tp: NOT fused, because inductor's pass found none of the {plain} gathers and scatters next "
        f"to a matrix product of a kind that it knows (TORCH_LOGS=+{_PASS} with a fresh "
        "parallel.compile.cache_dir says more)"
    )


def _sources() -> list[str]:
    """The code that inductor has written for this process, or found in its cache, a module each."""
    from torch._inductor.codecache import PyCodeCache

    paths = {Path(str(module.__file__)) for module in PyCodeCache.modules}
    return [path.read_text(encoding="utf-8") for path in sorted(paths)]
