"""Which attention kernel a run really uses: read from a profile of one step, and said once."""

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch.profiler import ProfilerActivity

CHECKED_STEP = 2  # of this process: the first one compiles
# How a kernel's names begin or what is in them, on a GPU as the driver reports them, on a CPU as torch's
# operators.
NAMES = {
    "cudnn": r"cudnn.*(sdpa|attention|flash_fprop)",
    "flash": r"flash_(fwd|attention|fprop)",
    "efficient": r"fmha|efficient_attention",
    "flex": r"flex_attention",
    "cpu": r"cpu_causal_attention",
    "math": r"softmax",
}


class KernelCheck:
    """Profiles one step and says which attention ran in it. `kernel`: of the plan."""

    def __init__(self, kernel: str, device: torch.device, say: Callable[[str], None]) -> None:
        self._kernel, self._device, self._say = kernel, device, say
        self._steps_left = CHECKED_STEP

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Around every step."""
        self._steps_left -= 1
        if self._steps_left != 0:
            yield
            return
        on_gpu = self._device.type == "cuda"
        profile = torch.profiler.profile(
            activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU], acc_events=True
        )
        with profile:
            yield
            if on_gpu:
                torch.cuda.synchronize(self._device)
        self._say(describe_attention(self._kernel, {event.name for event in profile.events() or ()}))


def describe_attention(kernel: str, names: Iterable[str]) -> str:
    """One line: the attention kernels among all names of a step, and whether they are what was asked for."""
    first = {
        kind: min(found)
        for kind, pattern in NAMES.items()
        if kind != "math" and (found := [name for name in names if re.search(pattern, name, re.IGNORECASE)])
    }
    if first.keys() & {"cudnn", "cpu"}:
        first.pop("flash", None)  # cuDNN's names say flash too, and our own forward is torch's
    ran = ", ".join(f"{kind} ({name[:100]})" for kind, name in first.items()) or "math (no fused kernel)"
    if kernel in first or (kernel == "math" and not first):
        return f"attention: {ran} ran, as planned"
    return f"warning: attention={kernel} was planned, but a profile of a step shows {ran}"
