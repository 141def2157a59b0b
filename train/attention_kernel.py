"""Which attention kernel a run takes, and whether it can."""

from collections.abc import Iterable

import torch

from meshwright.models.attention import HALF_ON_GPUS, KERNELS, WITHIN_DOCUMENTS
from meshwright.parallel.errors import PlanError
from meshwright.parallel.plan.schema import Plan
from meshwright.parallel.planner.hardware import Hardware, find_hardware
from meshwright.train.best_dtype import best_dtype, dtype_here
from meshwright.train.config import Config

HOPPER = (9, 0)  # CUDA compute capability
# the fastest first, of GPUs that no file in configs/hardware describes
ON_HOPPER = ("cudnn", "flash", "efficient", "flex")
ON_OLDER = ("flash", "efficient", "flex")


def best_attention(config: Config, hardware: Hardware | None) -> str:
    """The attention kernel that `auto` means on such devices: the fastest that can; None is a CPU."""
    if hardware is None or hardware.cores:
        return "cpu"
    return _first_able(hardware.attention_kernels, config, best_dtype(hardware))


def attention_here(config: Config, device: torch.device, device_name: str) -> str:
    """The same for the device at hand. One that no file in configs/hardware describes gets cuDNN's from
    Hopper on."""
    if device.type == "cpu":
        return "cpu"
    if kind := find_hardware(device_name):
        return best_attention(config, kind)
    kernels = ON_HOPPER if torch.cuda.get_device_capability(device) >= HOPPER else ON_OLDER
    return _first_able(kernels, config, dtype_here(device))


def check_attention(config: Config, plan: Plan, device_type: str) -> None:
    """Raise PlanError for an attention kernel that cannot do what is asked on this kind of device ("cpu" or
    "cuda")."""
    kernel, apart = plan.attention, config.data.document_mask
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
        if config.parallel.plan in ("manual", "auto"):
            raise PlanError(f"parallel.attention={kernel} is no kernel for {what}: use auto, or {others}")
        raise PlanError(
            f"attention={kernel} of {config.parallel.plan} is no kernel for {what}: put {others} there, or "
            f"make the "
            "plan anew, with tools.plan --gpu KIND"
        )


def _first_able(kernels: Iterable[str], config: Config, best: str) -> str:
    """`best`: the dtype that auto is."""
    apart, dtypes = (
        config.data.document_mask,
        {best if config.parallel.param_dtype == "auto" else config.parallel.param_dtype},
    )
    return next(
        (name for name in kernels if _suits(name, "cuda", apart, dtypes)), "flex" if apart else "efficient"
    )


def _suits(kernel: str, device_type: str, documents_apart: bool, dtypes: Iterable[str]) -> bool:
    able = kernel in WITHIN_DOCUMENTS if documents_apart else kernel != "flex"
    too_wide = device_type == "cuda" and kernel in HALF_ON_GPUS and "float32" in dtypes
    return able and device_type in KERNELS[kernel] and not too_wide
