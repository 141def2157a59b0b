"""The dtype that `parallel.param_dtype: auto` is: bfloat16 where the device multiplies it faster than
float32."""

from collections.abc import Mapping

import torch

from meshwright.parallel.planner.hardware import Hardware

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
        f"faster",
    )


def _choose(device: torch.device) -> tuple[str, str]:
    if device.type == "cuda":
        return gpu_dtype(torch.cuda.get_device_capability(device))
    return cpu_dtype(torch.cpu.get_capabilities(), torch.backends.mkldnn.is_available())
