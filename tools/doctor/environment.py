"""Environment variables that change how a run behaves."""

import re
from collections.abc import Iterator, Mapping

from meshwright.tools.doctor.finding import Finding, is_slow, note

SHOWN = (
    "NCCL_",
    "TORCH",
    "PYTORCH_",
    "GLOO_",
    "OMP_",
    "MKL_",
    "CUDA_",
    "NVIDIA_TF32",
    "KMP_",
    "LD_LIBRARY_PATH",
    "LD_PRELOAD",
    "TRITON_",
    "PET_",
    "CXX",
)
OFF = ("", "0", "false", "False", "OFF")
# Variable, what it does when on (source: NCCL's and PyTorch's documentation of their environment variables).
SWITCHES = {
    "CUDA_LAUNCH_BLOCKING": "waits for every kernel: nothing overlaps",
    "NCCL_P2P_DISABLE": "sends between GPUs of a node through host memory, not over NVLink",
    "NCCL_IB_DISABLE": "sends between nodes over TCP, not InfiniBand",
    "NCCL_SHM_DISABLE": "sends between processes of a node over the network",
    "TORCHDYNAMO_DISABLE": "compiles nothing, whatever parallel.compile says",
    "TORCH_COMPILE_DISABLE": "compiles nothing, whatever parallel.compile says",
    "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "compiles everything anew at each start",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "asks the driver for every tensor",
    "TORCH_NCCL_BLOCKING_WAIT": "makes the host wait for every collective",
    "TORCH_SHOW_CPP_STACKTRACES": "looks up symbols at each error, which takes minutes",
}


def judge_environment(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Variables that cost speed, or that take a setting of ours away."""
    for name, effect in SWITCHES.items():
        if environment.get(name, "") not in OFF:
            yield is_slow(f"{name}={environment[name]} {effect}", f"unset {name}")
    if environment.get("TORCH_DISTRIBUTED_DEBUG") == "DETAIL":
        yield is_slow(
            "TORCH_DISTRIBUTED_DEBUG=DETAIL compares every collective over all ranks",
            "unset TORCH_DISTRIBUTED_DEBUG",
        )
    threads = environment.get("OMP_NUM_THREADS", "1")
    # a list: for nested regions (OpenMP 5.2, 21.2.1)
    if not re.fullmatch(r"\s*[1-9]\d*(\s*,\s*[1-9]\d*)*\s*", threads):
        yield is_slow(
            f"OMP_NUM_THREADS={threads} is no number of threads: OpenMP ignores it, and says so in every "
            f"process",
            "OMP_NUM_THREADS=1, or unset it: a run's threads are run.threads",
        )
    if environment.get("NCCL_DEBUG") in ("INFO", "TRACE"):
        yield note(
            f"NCCL_DEBUG={environment['NCCL_DEBUG']} prints pages", "NCCL_DEBUG=WARN names what failed"
        )
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        if name in environment and "expandable_segments:True" not in environment[name]:
            yield note(
                f"{name}={environment[name]} switches run.expandable_segments off",
                f"add expandable_segments:True, or unset {name}",
            )


def choose_shown(environment: Mapping[str, str]) -> dict[str, str]:
    """Of all variables those that a run can feel."""
    return {name: environment[name] for name in sorted(environment) if name.startswith(SHOWN)}
