"""Makes a plan from config keys or reads it from a plan file, without a process group: for any devices
(`plan_run`) or for those of this machine (`plan_on_device`); and what `auto` resolves to by device: the dtype
of parameters (bfloat16 if the device multiplies it faster than float32) and the attention kernel."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from meshwright.models.attention import DOCUMENT_MASK_KERNELS, HALF_PRECISION_KERNELS, KERNELS
from meshwright.parallel.config import Dtype
from meshwright.parallel.errors import PlanError
from meshwright.parallel.plan.make import RunShape, make_plan
from meshwright.parallel.plan.schema import ModelUnits, Plan
from meshwright.parallel.plan.serialize import load_plan
from meshwright.parallel.plan.validate import plan_file_mistakes
from meshwright.train.config import TrainingJob
from meshwright.train.distributed.ranks import RankInfo
from meshwright.train.model.trained_model import model_of

if TYPE_CHECKING:
    from meshwright.parallel.planner.hardware import Hardware

# CUDA compute capabilities; Ampere's are the first GPUs that multiply bfloat16
HOPPER, AMPERE = (9, 0), (8, 0)
# Instructions that multiply bfloat16, by their names in torch.cpu.get_capabilities(). Without them oneDNN
# converts to float32.
FAST_ON_CPUS = {"amx_bf16": "AMX_BF16", "avx512_bf16": "AVX512_BF16", "bf16": "Arm's BF16"}


def read_plan(job: TrainingJob, model: ModelUnits, world_size: int) -> Plan:
    """Read the plan file that `parallel.plan` names and check it for the run. Raises PlanError that lists all
    mistakes, one line each."""
    path = Path(os.path.expanduser(job.parallel.plan))
    if not path.is_file():
        raise PlanError(
            f"parallel.plan={job.parallel.plan}: there is no such file. Use manual, auto, or the path of a "
            "plan file, such as plan.yaml in the folder of a run"
        )
    plan = load_plan(path)
    batch = {f"train.{key}": getattr(job, key) for key in ("micro_batch_size", "global_batch_size")}
    if mistakes := plan_file_mistakes(plan, path, job.parallel, model, world_size, job.seq_len, batch):
        raise PlanError("\n".join(mistakes))
    return plan


def plan_on_device(job: TrainingJob, ranks: RankInfo, device: torch.device, device_name: str) -> Plan:
    """Make or read the plan as `plan_run` does, for this process and its device.

    Raises PlanError, also for an attention kernel or float8 products that the device does not support.
    """
    attention = attention_on_device(job, device, device_name)
    plan = plan_run(job, ranks.world_size, ranks.local_world_size, attention, dtype_on_device(device))
    check_device_support(job, plan, device)
    return plan


def check_device_support(job: TrainingJob, plan: Plan, device: torch.device) -> None:
    """Raise PlanError for an attention kernel or float8 products that this device does not support."""
    check_attention(job, plan, device.type)
    if plan.float8.linears:
        from meshwright.parallel.float8 import check_float8  # late: few plans need torchao

        check_float8(plan.float8, device)


def plan_run(
    job: TrainingJob,
    world_size: int,
    gpus_per_node: int | None = None,
    attention: str = "cpu",
    param_dtype: str = "float32",
) -> Plan:
    """Make the plan of a run on `world_size` processes from the job, or read it from the file that it names.

    Args:
        gpus_per_node: None: all processes share a node
        attention, param_dtype: what `auto` resolves to on the run's devices: `best_attention`, `best_dtype`

    Raises PlanError that lists all mistakes, one line each.
    """
    model = model_of(job.model).units
    if job.parallel.plan == "auto":
        raise PlanError(
            "parallel.plan=auto works only in train.main and tools.plan: run tools.plan with --save FILE, "
            "and use --parallel.plan=FILE"
        )
    if job.parallel.plan == "manual":
        shape = make_shape(job, world_size, gpus_per_node or world_size, attention, param_dtype)
        return make_plan(job.parallel, model, shape)
    return read_plan(job, model, world_size)


def make_shape(
    job: TrainingJob, world_size: int, gpus_per_node: int, attention: str, param_dtype: str
) -> RunShape:
    """Return the sizes that the plan is made for; `attention` and `param_dtype` as in `plan_run`."""
    sizes = job.seq_len, job.micro_batch_size, job.global_batch_size
    return RunShape(world_size, gpus_per_node, *sizes, attention, param_dtype, dynamic=False)


def best_attention(job: TrainingJob, hardware: "Hardware | None") -> str:
    """Return the fastest attention kernel that supports the job on such devices. None is a CPU."""
    if hardware is None or hardware.cores:
        return "cpu"
    return _first_able(hardware.attention, job, best_dtype(hardware))


def attention_on_device(job: TrainingJob, device: torch.device, device_name: str) -> str:
    """Return the fastest attention kernel that supports the job on this process's device. A GPU that no file
    in configs/hardware describes gets that of the H100, or before Hopper that of the A100."""
    if device.type == "cpu":
        return "cpu"
    # late: a run on a CPU needs no planner
    from meshwright.parallel.planner.hardware import find_hardware, load_hardware

    if kind := find_hardware(device_name):
        return best_attention(job, kind)
    similar = "h100-sxm" if torch.cuda.get_device_capability(device) >= HOPPER else "a100-80gb"
    return _first_able(load_hardware()[similar].attention, job, dtype_on_device(device))


def check_attention(job: TrainingJob, plan: Plan, device_type: str) -> None:
    """Raise PlanError if the plan's attention kernel does not support the job on "cpu" or "cuda"."""
    kernel, document_mask = plan.attention, job.document_mask
    model = model_of(job.model).units
    if not model.attention_kernels:  # the model's own business
        return
    dtypes = {unit.param_dtype for unit in plan.units if not model.checkpointed.isdisjoint(unit.modules)}
    able = [name for name in KERNELS if _supports(name, device_type, document_mask, dtypes)]
    if kernel not in able:
        documents = "with data.document_mask=true" if document_mask else "without data.document_mask"
        case = f"a {device_type} device in {' and '.join(sorted(dtypes))} {documents}"
        others = ", ".join(able) + (
            " (param_dtype=bfloat16 has more)" if (device_type, dtypes) == ("cuda", {"float32"}) else ""
        )
        if job.parallel.plan in ("manual", "auto"):
            raise PlanError(f"parallel.attention={kernel} does not support {case}: use auto, or {others}")
        raise PlanError(
            f"attention={kernel} of {job.parallel.plan} does not support {case}: use {others} in that file, "
            "or make a new plan with tools.plan --gpu KIND"
        )


def _first_able(kernels: Iterable[str], job: TrainingJob, best: str) -> str:
    """Return the first kernel that supports the job. `best`: the dtype that `auto` resolves to."""
    dtype = best if job.parallel.param_dtype == "auto" else job.parallel.param_dtype
    able = (name for name in kernels if _supports(name, "cuda", job.document_mask, {dtype}))
    return next(able, "flex" if job.document_mask else "efficient")


def _supports(kernel: str, device_type: str, document_mask: bool, dtypes: Iterable[str]) -> bool:
    masks = kernel in DOCUMENT_MASK_KERNELS if document_mask else kernel != "flex"
    too_wide = device_type == "cuda" and kernel in HALF_PRECISION_KERNELS and "float32" in dtypes
    return masks and device_type in KERNELS[kernel] and not too_wide


def best_dtype(hardware: "Hardware | None") -> str:
    """Return the dtype with the higher peak on a kind of device. None is an unknown CPU: float32."""
    rates = hardware.peak_tflops if hardware else {}
    return "bfloat16" if rates.get("bfloat16", 0.0) > rates.get("float32", 0.0) else "float32"


def dtype_on_device(device: torch.device) -> Dtype:
    """Return the dtype that `auto` resolves to on this process's device."""
    return _choose_dtype(device)[0]


def describe_dtype(device: torch.device) -> str:
    """Return the line that prints the dtype that `auto` resolves to, and the reason."""
    dtype, reason = _choose_dtype(device)
    return f"param_dtype: auto is {dtype}: {reason}"


def gpu_dtype(capability: tuple[int, int]) -> tuple[Dtype, str]:
    """Return the dtype for a GPU of this CUDA compute capability, and the reason."""
    gpu, newer = "a GPU of compute capability {}.{} multiplies".format(*capability), capability >= AMPERE
    return ("bfloat16", f"{gpu} bfloat16 faster") if newer else ("float32", f"{gpu} no bfloat16")


def cpu_dtype(reported: Mapping[str, object], onednn: bool) -> tuple[Dtype, str]:
    """Return the dtype for a CPU of which torch reports these capabilities, and the reason.

    `onednn`: this build of torch has oneDNN; without it, as on a Mac, nothing uses the instructions.
    """
    if onednn and (instructions := [name for key, name in FAST_ON_CPUS.items() if reported.get(key)]):
        return "bfloat16", f"this CPU multiplies it faster, with {' and '.join(instructions)}"
    return (
        "float32",
        f"torch finds none of {', '.join(FAST_ON_CPUS.values())} on this CPU, the instructions that multiply "
        "bfloat16 faster",
    )


def _choose_dtype(device: torch.device) -> tuple[Dtype, str]:
    if device.type == "cuda":
        return gpu_dtype(torch.cuda.get_device_capability(device))
    return cpu_dtype(torch.cpu.get_capabilities(), torch.backends.mkldnn.is_available())
