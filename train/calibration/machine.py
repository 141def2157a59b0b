"""The names of this machine's devices."""

import platform
import re
from pathlib import Path

import torch


def device_model(device: torch.device) -> str:
    """Return the name of the GPU, or of the CPU's model."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_model()


def cpu_model() -> str:
    """Return the model of this CPU as the system names it."""
    info = Path("/proc/cpuinfo")
    text = info.read_text(encoding="utf-8", errors="replace") if info.is_file() else ""
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return match[1].strip() if match else platform.processor() or platform.machine()
