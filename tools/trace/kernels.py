"""Which kernels take the time of a profiled step, and how near each comes to the roof of its device.

On a GPU the kernels that ran on it; on a CPU its operators, each without those that it called (of a compiled
graph what is left are its fused loops: products and attention have rows of their own).
"""

from pathlib import Path

from meshwright.tools.trace.cpu_kernels import CpuTable
from meshwright.tools.trace.flops import work_of
from meshwright.tools.trace.gpu_kernels import GpuTable
from meshwright.tools.trace.kernel_rows import KernelRow, ranked
from meshwright.tools.trace.read import read_events
from meshwright.tools.trace.roofs import Roof
from meshwright.tools.trace.store import DEVICE_WORK
from meshwright.train.errors import DataError


def top_kernels(path: Path, steps: int, roof: Roof | None, most: int = 12) -> list[KernelRow]:
    """The kernels of a trace of so many steps that take longest, then its collectives, at most so many of
    each.

    The trace is read once, as a stream: in memory are a few numbers for every kernel of a GPU and operator
    that is a product, or a row for every name of a CPU's. Raises DataError for a trace that is broken.
    """
    gpu, cpu = GpuTable(), CpuTable()
    for event in read_events(path):
        if event.get("ph") != "X":
            continue
        try:
            match event.get("cat"):
                case "cpu_op":
                    work = work_of(event)
                    gpu.add_operator(event, work)
                    cpu.add_operator(event, work, roof)
                case "user_annotation":
                    cpu.add_annotation(event)
                case kind if kind in DEVICE_WORK:
                    gpu.add_kernel(event, roof)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError):
            raise DataError(
                f"{path}: an event of no kind that torch's profiler writes: {str(event)[:200]}"
            ) from None
    return ranked(gpu.tallies(roof) if gpu else cpu.tallies(roof), steps, most)
