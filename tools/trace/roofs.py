"""The most that a device can do: what the kernels of a profile are held against."""

from collections.abc import Mapping
from dataclasses import dataclass

from meshwright.parallel.planner.hardware import find_hardware
from meshwright.tools.trace.flops import Work


@dataclass(frozen=True)
class Roof:
    """Of one device, by its data sheet (configs/hardware).

    Args:
        dtype: what the run multiplies in
        peak_tflops: dense products of that dtype
        memory_gb_s: bandwidth of its memory, 10^9 bytes per second
        peaks_tflops: the same as `peak_tflops` for every dtype that is known
    """

    dtype: str
    peak_tflops: float
    memory_gb_s: float
    peaks_tflops: Mapping[str, float]

    def least_s(self, work: Work) -> float | None:
        """The time that the work takes at the roof: its operations or its bytes, whichever takes longer. None
        where neither is known, or where there are operations of a dtype without a peak."""
        parts = []
        if work.flops is not None:
            if not self.peaks_tflops.get(work.dtype):
                return None
            parts.append(work.flops / (self.peaks_tflops[work.dtype] * 1e12))
        if work.bytes is not None:
            parts.append(work.bytes / (self.memory_gb_s * 1e9))
        return max(parts, default=None)


def find_roof(device_name: str, dtype: str) -> Roof | None:
    """The roof of the device that torch calls so. None for one that no file in configs/hardware describes,
    such as a CPU, and for a dtype that it has no peak of."""
    hardware = find_hardware(device_name)
    if hardware is None or not hardware.peak_tflops.get(dtype):
        return None
    return Roof(dtype, hardware.peak_tflops[dtype], hardware.memory_gb_s, hardware.peak_tflops)
