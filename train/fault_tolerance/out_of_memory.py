"""Out of memory: predicted memory, resident memory, and the config changes that would free most."""

import signal
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from meshwright.parallel.errors import one_line
from meshwright.parallel.fsdp import local_part
from meshwright.parallel.machine_memory import free_host_bytes, peak_resident_bytes
from meshwright.parallel.memory_breakdown import GIB
from meshwright.parallel.plan.schema import Plan
from meshwright.train.config import TrainingJob
from meshwright.train.distributed.ranks import RankInfo, read_rank_info
from meshwright.train.errors import NoPredictionError, OutOfMemory

ON_CPU = "DefaultCPUAllocator: can't allocate memory"  # torch/c10/core/impl/alloc_cpu.cpp
# The other ranks wait this long, so that rank 0 prints its message before torchrun ends all ranks.
RANK0_REPORT_S = 30.0
ERROR_SHOWN = 400  # characters of torch's message


@contextmanager
def explaining_out_of_memory(
    job: TrainingJob, plan: Plan, device: torch.device, optimizer: torch.optim.Optimizer, folder: Path
) -> Iterator[None]:
    """Raise OutOfMemory for a failed allocation within this context; its message shows where the memory went
    and which changes would help."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        ranks = read_rank_info()
        lines = [
            f"rank {ranks.rank} ran out of memory: {one_line(error, ERROR_SHOWN)}",
            # before the frames are cleared, which hold the step's tensors
            _in_gib("resident", resident_bytes(device, optimizer)),
            *_save_snapshot(device, folder / f"out-of-memory-rank-{ranks.rank}.pickle"),
        ]
        # free the step's tensors: the advice needs memory too
        traceback.clear_frames(error.__traceback__)
        if not ranks.is_main:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            time.sleep(RANK0_REPORT_S)
        raise OutOfMemory("\n  ".join([*lines, *_advice(job, plan, device, ranks)])) from None


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an allocation failed, on a GPU or on the host."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or ON_CPU in str(error)


def resident_bytes(device: torch.device, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Return this rank's bytes of parameters, gradients and optimizer state; on a GPU also the rest of the
    allocated memory (activations, gathered parameters, buffers) and the allocator's free reserve; on a CPU
    the peak of the process."""
    # the sharded parameters, gathered or not
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    values = [value for state in optimizer.state.values() for value in state.values()]
    states = [value for value in values if isinstance(value, torch.Tensor)]
    held = {
        "params": _bytes(parameters),
        "grads": _bytes([p.grad for p in parameters if p.grad is not None]),
        "optimizer": _bytes(states),
    }
    if device.type == "cuda":
        allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
        held |= {
            "activations, gathered parameters and buffers": allocated - sum(held.values()),
            "reserved but free": reserved - allocated,
        }
    else:
        held["process at its peak"] = peak_resident_bytes()
    return held


def _bytes(tensors: list[torch.Tensor]) -> int:
    return sum(local_part(tensor).untyped_storage().nbytes() for tensor in tensors)


def _advice(job: TrainingJob, plan: Plan, device: torch.device, ranks: RankInfo) -> Iterator[str]:
    """Yield the predicted memory and the changes that would free most; if computing them fails, which it does
    without free memory, one line with the error."""
    try:
        # late: only a failed run needs it
        from meshwright.parallel.planner.hardware import Machines, find_hardware, load_hardware
        from meshwright.parallel.planner.memory_model import host_memory
        from meshwright.train.planning.fit import suggest_savings
        from meshwright.train.planning.predict import predict_memory, run_workload

        predicted = predict_memory(job, plan)
        yield _in_gib(
            f"predicted {predicted.peak_bytes / GIB:.2f} GiB at the peak", asdict(predicted.at_peak)
        )
        on_cpu = device.type == "cpu"
        kind = load_hardware()["cpu"] if on_cpu else find_hardware(torch.cuda.get_device_name(device))
        held = host_memory(plan, run_workload(job, plan)).total
        host = None if on_cpu else held + free_host_bytes() // ranks.local_world_size
        machines = Machines(plan.mesh.world_size, ranks.local_world_size, 0, kind, host)
        for change in suggest_savings(job, plan, machines):
            yield f"would help: {change.describe()}"
        if job.parallel.plan not in ("manual", "auto"):
            yield (
                f"(--parallel.plan={job.parallel.plan} overrides these keys: edit that plan, or leave it out)"
            )
    except (RuntimeError, MemoryError, OSError, ImportError, NoPredictionError) as error:
        yield f"no advice, because computing it failed: {one_line(error, ERROR_SHOWN)}"


def _in_gib(name: str, sizes: Mapping[str, Any]) -> str:
    shown = ", ".join(f"{kind} {size / GIB:.2f}" for kind, size in sizes.items() if size)
    return f"{name}, in GiB: {shown or 'nothing'}"


def _save_snapshot(device: torch.device, path: Path) -> list[str]:
    """Save a snapshot of a GPU's memory and return a line about it, none on a CPU. Within the profiled window
    of a run with profile.memory the snapshot includes the stacks of the allocations."""
    if device.type != "cuda":
        return []
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.cuda.memory._dump_snapshot(str(path))
    except (OSError, RuntimeError) as error:
        return [f"memory snapshot {path} could not be written: {one_line(error, ERROR_SHOWN)}"]
    return [f"memory snapshot: {path} (open it at pytorch.org/memory_viz)"]
