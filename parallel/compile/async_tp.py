"""Async tensor parallelism: all-gathers and reduce-scatters over tp run in pieces, overlapped with the matrix
products next to them.

Inductor's pass (torch/_inductor/fx_passes/micro_pipeline_tp.py) replaces an all-gather and the products that
read its result by one operator of torch.ops.symm_mem, and likewise a product and the reduce-scatter of its
result. One piece is sent through memory that the GPUs of a group share while another piece is multiplied. If
the pass does not recognize the graph, it silently leaves it unchanged, so the compiled code is searched for
these operators.

A GPU profile of such an operator shows matrix products in pieces on two streams, device-to-device copies and
small kernels named barrier_kernel; it has no NCCL kernels of all-gather and reduce-scatter over tp.
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
# Calls in the code that inductor writes. Comments and checks of results name the same operators without the
# parenthesis.
_FUSED = re.compile(r"torch\.ops\.symm_mem\.fused_\w+\.default\(")
_PLAIN = re.compile(
    r"torch\.ops\._c10d_functional\.(?:all_gather_into_tensor|reduce_scatter_tensor)\w*\.default\("
)
_PASS = "torch._inductor.fx_passes.micro_pipeline_tp"


def check_async_tp(tp: int, device_type: str, local_processes: int) -> None:
    """Raise PlanError if the GPUs of a tp group cannot share memory.

    `local_processes`: the processes of this node, one per GPU.
    """
    if device_type != "cuda":
        raise PlanError(
            "parallel.async_tp=true sends pieces through memory that GPUs share (NVLink), but this run "
            f"computes on the CPU: {WAY_OUT}, or run on GPUs"
        )
    if not dist.is_nccl_available():
        raise PlanError(
            f"parallel.async_tp=true needs a torch with NCCL, but this one was built without it: {WAY_OUT}"
        )
    if missing := missing_peer_access(tp, local_processes, torch.cuda.can_device_access_peer):
        raise PlanError(f"parallel.async_tp=true {missing}: {WAY_OUT}")


def missing_peer_access(tp: int, gpus: int, can_access: Callable[[int, int], bool]) -> str:
    """Return why the GPUs of a node cannot share memory within groups of `tp` neighbors; "" if they can.

    `can_access(a, b)`: whether GPU a can read the memory of GPU b.
    """
    if gpus % tp:
        return f"needs tp groups within a node, but tp={tp} does not divide its {gpus} processes"
    for a in range(gpus):
        first = a - a % tp
        for b in range(first, first + tp):
            if a != b and not can_access(a, b):
                return (
                    f"needs GPUs that can read each other's memory (NVLink), but GPU {a} of this node "
                    f"cannot read that of GPU {b}"
                )
    return ""


def enable_async_tp(group_name: str) -> None:
    """Enable inductor's pass in this process, and the shared memory of the group of tp ranks.

    Every rank of the group calls it before anything is compiled.
    """
    import torch._inductor.config
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    torch._inductor.config._micro_pipeline_tp = True
    # hides warnings on single products on every rank; `describe_async_tp` reports the total
    logging.getLogger(_PASS).setLevel(logging.ERROR)
    # torch 2.11 to 2.13 deprecate it as unnecessary, but the pass checks that it was called
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        enable_symm_mem_for_group(group_name)  # type: ignore[arg-type]


def describe_async_tp() -> str:
    """Return one line to log after the first step: the number of fused all-gathers and reduce-scatters in
    this process's compiled code, or why there are none. docs/speed.md lists those that are not fused."""
    return describe_fusion(_sources())


def describe_fusion(sources: Iterable[str]) -> str:
    """Return the line of `describe_async_tp` for source code that inductor has written."""
    code = "\n".join(sources)
    fused, plain = len(_FUSED.findall(code)), len(_PLAIN.findall(code))
    if fused:
        return f"async tp: fused {fused} of {fused + plain} gathers and scatters"
    if not plain:
        return "async tp: NOT fused, because the compiled code has no gathers and no scatters"
    return (
        f"async tp: NOT fused, because inductor's pass found none of the {plain} gathers and scatters next "
        f"to a matrix product that it can fuse: for details, set TORCH_LOGS=+{_PASS} and a new "
        "parallel.compile.cache_dir"
    )


def _sources() -> list[str]:
    """Return the source of each module that inductor wrote for this process or loaded from its cache."""
    from torch._inductor.codecache import PyCodeCache

    paths = {Path(str(module.__file__)) for module in PyCodeCache.modules}
    return [path.read_text(encoding="utf-8") for path in sorted(paths)]
