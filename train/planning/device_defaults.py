"""Resolves `auto` by device: the dtype of parameters (bfloat16 if the device multiplies it faster than
float32) and the attention kernel."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch

from meshwright.models.attention import DOCUMENT_MASK_KERNELS, HALF_PRECISION_KERNELS, KERNELS
from meshwright.parallel.config import Dtype
from meshwright.parallel.errors import PlanError
from meshwright.parallel.plan.schema import Plan
from meshwright.train.config import TrainingJob
from meshwright.train.model.choose import source_of

if TYPE_CHECKING:
    from meshwright.parallel.planner.hardware import Hardware

HOPPER = (9, 0)  # CUDA compute capability
# fastest first; for GPUs that no file in configs/hardware describes
ON_HOPPER = ("cudnn", "flash", "efficient", "flex")
ON_OLDER = ("flash", "efficient", "flex")


def best_attention(job: TrainingJob, hardware: "Hardware | None") -> str:
    """Return the fastest attention kernel that supports the job on such devices. None is a CPU."""
    if hardware is None or hardware.cores:
        return "cpu"
    return _first_able(hardware.attention_kernels, job, best_dtype(hardware))


def attention_on_device(job: TrainingJob, device: torch.device, device_name: str) -> str:
    """Return the fastest attention kernel that supports the job on this process's device. A GPU that no file
    in configs/hardware describes gets the first of ON_HOPPER or ON_OLDER that does."""
    if device.type == "cpu":
        return "cpu"
    from meshwright.parallel.planner.hardware import find_hardware  # late: a run on a CPU needs no planner

    if kind := find_hardware(device_name):
        return best_attention(job, kind)
    kernels = ON_HOPPER if torch.cuda.get_device_capability(device) >= HOPPER else ON_OLDER
    return _first_able(kernels, job, dtype_on_device(device))


def check_attention(job: TrainingJob, plan: Plan, device_type: str) -> None:
    """Raise PlanError if the plan's attention kernel does not support the job on "cpu" or "cuda"."""
    kernel, document_mask = plan.attention, job.document_mask
    model = source_of(job.model).units
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
    document_mask, dtypes = (
        job.document_mask,
        {best if job.parallel.param_dtype == "auto" else job.parallel.param_dtype},
    )
    return next(
        (name for name in kernels if _supports(name, "cuda", document_mask, dtypes)),
        "flex" if document_mask else "efficient",
    )


def _supports(kernel: str, device_type: str, document_mask: bool, dtypes: Iterable[str]) -> bool:
    masks = kernel in DOCUMENT_MASK_KERNELS if document_mask else kernel != "flex"
    too_wide = device_type == "cuda" and kernel in HALF_PRECISION_KERNELS and "float32" in dtypes
    return masks and device_type in KERNELS[kernel] and not too_wide


# CUDA compute capability of the first GPUs that multiply bfloat16 (NVIDIA A100 whitepaper, 2020)
AMPERE = (8, 0)
# Instructions that multiply bfloat16, by their names in torch.cpu.get_capabilities(). Without them oneDNN
# converts to float32.
FAST_ON_CPUS = {"amx_bf16": "AMX_BF16", "avx512_bf16": "AVX512_BF16", "bf16": "Arm's BF16"}


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
    newer = capability >= AMPERE
    reason = "of compute capability {}.{} multiplies {}".format(
        *capability, "bfloat16 faster" if newer else "no bfloat16"
    )
    return "bfloat16" if newer else "float32", f"a GPU {reason}"


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
