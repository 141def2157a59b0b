"""What a device decides where the config leaves it to auto: the dtype of parameters (bfloat16 where the
device multiplies it faster than float32) and the attention kernel."""

from collections.abc import Iterable, Mapping

import torch

from meshwright.models.attention import HALF_ON_GPUS, KERNELS, WITHIN_DOCUMENTS
from meshwright.parallel.errors import PlanError
from meshwright.parallel.plan.schema import Plan
from meshwright.parallel.planner.hardware import Hardware, find_hardware
from meshwright.train.config import TrainingJob

HOPPER = (9, 0)  # CUDA compute capability
# the fastest first, of GPUs that no file in configs/hardware describes
ON_HOPPER = ("cudnn", "flash", "efficient", "flex")
ON_OLDER = ("flash", "efficient", "flex")


def best_attention(job: TrainingJob, hardware: Hardware | None) -> str:
    """The attention kernel that `auto` means on such devices: the fastest that can; None is a CPU."""
    if hardware is None or hardware.cores:
        return "cpu"
    return _first_able(hardware.attention_kernels, job, best_dtype(hardware))


def attention_here(job: TrainingJob, device: torch.device, device_name: str) -> str:
    """The same for the device at hand. One that no file in configs/hardware describes gets cuDNN's from
    Hopper on."""
    if device.type == "cpu":
        return "cpu"
    if kind := find_hardware(device_name):
        return best_attention(job, kind)
    kernels = ON_HOPPER if torch.cuda.get_device_capability(device) >= HOPPER else ON_OLDER
    return _first_able(kernels, job, dtype_here(device))


def check_attention(job: TrainingJob, plan: Plan, device_type: str) -> None:
    """Raise PlanError for an attention kernel that cannot do what is asked on this kind of device ("cpu" or
    "cuda")."""
    kernel, apart = plan.attention, job.document_mask
    dtypes = {
        unit.param_dtype for unit in plan.units if any(name.startswith("layers.") for name in unit.modules)
    }
    able = [name for name in KERNELS if _suits(name, device_type, apart, dtypes)]
    if kernel not in able:
        documents = "with data.document_mask=true" if apart else "without data.document_mask"
        what = f"a {device_type} device in {' and '.join(sorted(dtypes))} {documents}"
        others = ", ".join(able) + (
            " (param_dtype=bfloat16 has more)" if (device_type, dtypes) == ("cuda", {"float32"}) else ""
        )
        if job.parallel.plan in ("manual", "auto"):
            raise PlanError(f"parallel.attention={kernel} is no kernel for {what}: use auto, or {others}")
        raise PlanError(
            f"attention={kernel} of {job.parallel.plan} is no kernel for {what}: put {others} there, or "
            "make the plan anew, with tools.plan --gpu KIND"
        )


def _first_able(kernels: Iterable[str], job: TrainingJob, best: str) -> str:
    """`best`: the dtype that auto is."""
    apart, dtypes = (
        job.document_mask,
        {best if job.parallel.param_dtype == "auto" else job.parallel.param_dtype},
    )
    return next(
        (name for name in kernels if _suits(name, "cuda", apart, dtypes)), "flex" if apart else "efficient"
    )


def _suits(kernel: str, device_type: str, documents_apart: bool, dtypes: Iterable[str]) -> bool:
    able = kernel in WITHIN_DOCUMENTS if documents_apart else kernel != "flex"
    too_wide = device_type == "cuda" and kernel in HALF_ON_GPUS and "float32" in dtypes
    return able and device_type in KERNELS[kernel] and not too_wide


# CUDA compute capability of the first GPUs that multiply bfloat16 (NVIDIA A100 whitepaper, 2020)
AMPERE = (8, 0)
# Instructions that multiply bfloat16, by their names in torch.cpu.get_capabilities(). Without them oneDNN
# converts to float32.
FAST_ON_CPUS = {"amx_bf16": "AMX_BF16", "avx512_bf16": "AVX512_BF16", "bf16": "Arm's BF16"}


def best_dtype(hardware: Hardware | None) -> str:
    """That of a kind of device: the one with the higher peak. None is a CPU of which nothing is known:
    float32."""
    rates = hardware.peak_tflops if hardware else {}
    return "bfloat16" if rates.get("bfloat16", 0.0) > rates.get("float32", 0.0) else "float32"


def dtype_here(device: torch.device) -> str:
    """The same for the device at hand."""
    return _choose(device)[0]


def describe_dtype(device: torch.device) -> str:
    """The line that tells what auto has become, and why."""
    dtype, why = _choose(device)
    return f"param_dtype: auto is {dtype}: {why}"


def gpu_dtype(capability: tuple[int, int]) -> tuple[str, str]:
    """That of a GPU of this CUDA compute capability, and why."""
    newer = capability >= AMPERE
    words = "of compute capability {}.{} multiplies {}".format(
        *capability, "bfloat16 faster" if newer else "no bfloat16"
    )
    return "bfloat16" if newer else "float32", f"a GPU {words}"


def cpu_dtype(reported: Mapping[str, object], onednn: bool) -> tuple[str, str]:
    """That of a CPU of which torch reports these capabilities, and why. `onednn`: this build of torch has it;
    without it, as on a Mac, nothing uses the instructions."""
    if onednn and (found := [name for key, name in FAST_ON_CPUS.items() if reported.get(key)]):
        return "bfloat16", f"this CPU multiplies it faster, with {' and '.join(found)}"
    return (
        "float32",
        f"torch finds none of {', '.join(FAST_ON_CPUS.values())} on this CPU, which would multiply bfloat16 "
        "faster",
    )


def _choose(device: torch.device) -> tuple[str, str]:
    if device.type == "cuda":
        return gpu_dtype(torch.cuda.get_device_capability(device))
    return cpu_dtype(torch.cpu.get_capabilities(), torch.backends.mkldnn.is_available())
