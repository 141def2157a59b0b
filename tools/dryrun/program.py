"""The steps of one rank on the fake GPU: the command that runs them, its files, and the parts of its log."""

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from meshwright.parallel.plan.schema import Plan
from meshwright.parallel.plan.serialize import plan_to_yaml
from meshwright.tools.dryrun import log
from meshwright.tools.dryrun.install import FakeGpu
from meshwright.tools.dryrun.log import Call
from meshwright.tools.processes import run_to_end

STEPS = 3  # the first compiles, the second still fills caches, the third equals all later ones
# In the scratch folder, beside the log and the compiler's caches. step.py says what they contain.
PLAN_FILE, MEMORY_FILE, AXES_FILE = "plan.yaml", "memory.json", "axes.json"
TRACE_FILE, OPERATORS_FILE = "trace.json", "operators.json"
ENVIRONMENT = {
    "TORCHINDUCTOR_BENCHMARK_KERNEL": "1",  # inductor writes its estimate of a kernel's bytes into the kernel
    "FAKE_CUDA_REFUSES_GIB": "100000",  # the memory of a plan that does not fit an H100 is counted too
    # In a group of more ranks than this (128 by default) rank 0 would wait for ids from other ranks.
    "TORCH_NCCL_RANKS_PER_ROOT": "1000000",
}
PROGRESS = "progress: "  # begins the lines of step.py's output that are for the user


def step_command(scratch: Path, arguments: Sequence[str], record: bool = False) -> list[str]:
    """Return the command that runs the steps of the plan in `scratch`, with the config of the arguments."""
    options = ["--record"] if record else []
    return [sys.executable, "-m", "meshwright.tools.dryrun.step", str(scratch), *options, *arguments]


def run_program(
    gpu: FakeGpu, scratch: Path, plan: Plan, arguments: Sequence[str], report: Callable[[str], None]
) -> None:
    """Run the steps of the plan and record one, in a separate process; its files are written to `scratch`.
    `report` receives lines of progress. Raises BenchError if the process fails."""
    (scratch / PLAN_FILE).write_text(plan_to_yaml(plan))
    output = scratch / "output.log"
    shown = 0

    def show_progress() -> None:
        nonlocal shown
        lines = output.read_text(errors="replace").split("\n")[:-1]
        progress = [line.removeprefix(PROGRESS) for line in lines if line.startswith(PROGRESS)]
        for line in progress[shown:]:
            report(line)
        shown = len(progress)

    environment = gpu.environment(scratch) | ENVIRONMENT
    run_to_end(step_command(scratch, arguments, record=True), environment, output, show_progress)
    show_progress()


def steady_step(calls: Sequence[Call]) -> list[Call]:
    """Return the calls of the last step."""
    return log.between(calls, f"step {STEPS - 1}", f"end {STEPS - 1}")


def steady_waits(calls: Sequence[Call]) -> Counter[tuple[int, int]]:
    """Return how often in the last step one stream waits for another: (waiting stream, awaited stream)."""
    end = calls.index(Call("mark", 0, (f"end {STEPS - 1}",)))
    return log.stream_waits(calls[:end], steady_step(calls))


def stream_numbers(step: Sequence[Call], waits: Iterable[tuple[int, int]]) -> dict[int, int]:
    """Return a number for each stream, by order of first use; 0 is the default one, which computes."""
    used = (call.stream for call in step if call.kind in log.ON_STREAMS)
    order = dict.fromkeys([0, *used, *sorted(stream for pair in waits for stream in pair)])
    return {stream: number for number, stream in enumerate(order)}


def grid_blocks(launch: Call) -> int:
    """Return the number of blocks in the grid of a torch or Triton kernel."""
    grid = launch.words[1 if launch.kind == "kernel" else 3]
    return math.prod(map(int, grid.split(",")))
