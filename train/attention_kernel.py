"""Which attention kernel a run takes, and whether it can."""

import torch

from models.attention import KERNELS, WITHIN_DOCUMENTS
from parallel.plan import Plan, PlanError
from parallel.planner.hardware import Hardware, find_hardware
from train.config import Config

HOPPER = (9, 0)  # CUDA compute capability


def best_attention(config: Config, hardware: Hardware | None) -> str:
    """The attention kernel that `auto` means on such devices; None is a CPU. Few can keep documents apart."""
    best = next(iter(hardware.attention_kernels)) if hardware else "cpu"
    return best if best in WITHIN_DOCUMENTS or not config.data.document_mask else "flex"


def attention_here(config: Config, device: torch.device, device_name: str) -> str:
    """The same for the device at hand. One that no file in configs/hardware describes gets cuDNN's from Hopper on."""
    kind = find_hardware(device_name)
    if device.type == "cpu" or kind:
        return best_attention(config, kind if device.type == "cuda" else None)
    best = "cudnn" if torch.cuda.get_device_capability(device) >= HOPPER else "flash"
    return "flex" if config.data.document_mask else best


def check_attention(config: Config, plan: Plan, device_type: str) -> None:
    """Raise PlanError for an attention kernel that cannot do what is asked on this kind of device ("cpu" or "cuda")."""
    kernel, apart = plan.attention, config.data.document_mask
    able = [name for name, devices in KERNELS.items() if device_type in devices and _suits(name, apart)]
    if kernel not in able:
        what = f"a {device_type} device{' with data.document_mask=true' if apart else ' without data.document_mask'}"
        raise PlanError(f"parallel.attention={kernel} is no kernel for {what}: use auto, or {', '.join(able)}")


def _suits(kernel: str, documents_apart: bool) -> bool:
    return kernel in WITHIN_DOCUMENTS if documents_apart else kernel != "flex"
