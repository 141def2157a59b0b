"""Profiling: a Chrome trace of a window of steps for each profiled rank, which `tools.trace` analyzes; and a
check of which attention kernel a run uses, from a profile of one step."""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity
from torch.utils.hooks import RemovableHandle

from meshwright.parallel.compile.stats import compiled_graphs
from meshwright.parallel.errors import one_line
from meshwright.parallel.plan.schema import Plan
from meshwright.train.config import ProfileConfig
from meshwright.train.distributed.exit import print_error
from meshwright.train.distributed.ranks import read_rank_info
from meshwright.train.files import replacing, write_atomically
from meshwright.train.hooks import Hook, StepDone

if TYPE_CHECKING:
    from meshwright.train.run import Run

CHECKED_STEP = 2  # counted from this process's start: the first step compiles
# Patterns of kernel names, on a GPU as the driver reports them, on a CPU the names of torch's operators.
NAMES = {
    "cudnn": r"cudnn.*(sdpa|attention|flash_fprop)",
    "flash": r"flash_(fwd|attention|fprop)",
    "efficient": r"fmha|efficient_attention",
    "flex": r"flex_attention",
    "cpu": r"cpu_causal_attention",
    "math": r"softmax",
}


class KernelCheck(Hook):
    """Profiles one step and reports which attention kernel ran in it. `kernel`: the planned one; `report`
    receives the line."""

    def __init__(self, kernel: str, device: torch.device, report: Callable[[str], None]) -> None:
        self._kernel, self._device, self._report = kernel, device, report
        self._steps_left = CHECKED_STEP
        self._profile: torch.profiler.profile | None = None

    def before_step(self, step: int) -> None:
        """Start the profiler if this is the checked step."""
        self._steps_left -= 1
        if self._steps_left == 0:
            kind = ProfilerActivity.CUDA if self._device.type == "cuda" else ProfilerActivity.CPU
            self._profile = torch.profiler.profile(activities=[kind], acc_events=True)
            self._profile.start()

    def close(self) -> None:
        """Stop the profiler after a failed step."""
        if self._profile is not None:
            self._profile.stop()
            self._profile = None

    def after_step(self, done: StepDone) -> None:
        """Report the kernel if this was the checked step."""
        profile, self._profile = self._profile, None
        if profile is None:
            return
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        profile.stop()
        self._report(describe_attention(self._kernel, {event.name for event in profile.events() or ()}))


def profilers(run: "Run") -> list[Hook]:
    """Return the profiler of a run's window of steps; on a GPU, where torch chooses among kernels of one
    name, without a window also the check of the kernel, on rank 0."""
    plan, device, print_ = run.planned.plan, run.planned.device, run.console.print
    subject = ProfiledRun(run.training.sharded.model, plan, device, run.steps)
    profiler = StepProfiler(run.config.profile, run.folder / "profile", subject, print_)
    if device.type == "cuda" and not run.config.profile.start and run.ranks.is_main:
        return [KernelCheck(plan.attention, device, print_), profiler]
    return [profiler]


def describe_attention(kernel: str, names: Iterable[str]) -> str:
    """Return one line: the attention kernels among all kernel names of a step, and whether the planned
    `kernel` is one of them."""
    first = {
        kind: min(matches)
        for kind, pattern in NAMES.items()
        if kind != "math" and (matches := [name for name in names if re.search(pattern, name, re.IGNORECASE)])
    }
    if first.keys() & {"cudnn", "cpu"}:
        # cuDNN's kernel names contain flash, and our CPU attention uses torch's flash forward
        first.pop("flash", None)
    ran = ", ".join(f"{kind} ({name[:100]})" for kind, name in first.items()) or "math (no fused kernel)"
    if kernel in first or (kernel == "math" and not first):
        return f"attention: {ran} ran, as planned"
    return f"warning: attention={kernel} was planned, but a profile of a step shows {ran}"


@dataclass(frozen=True)
class ProfiledRun:
    """The run that is profiled."""

    model: nn.Module
    plan: Plan
    device: torch.device
    remaining_steps: range  # the steps from here to the end of the run


ERROR_SHOWN = 300  # characters of an error that a message quotes
HISTORY_ENTRIES = 1_000_000  # newest allocations that a memory snapshot contains


class StepProfiler(Hook):
    """Profiles a window of steps on rank 0 or on all ranks; with start 0 it does nothing and costs nothing.

    The profiler warms up during the step before the window. An error of the profiler or of writing its files
    ends the profile, not the run: `print_` gets one line, as when a trace has been written.
    """

    def __init__(
        self, config: ProfileConfig, folder: Path, subject: ProfiledRun, print_: Callable[[str], None]
    ) -> None:
        self._config, self._subject, self._print = config, subject, print_
        self._folder = folder / f"step-{config.start:08d}"
        self._rank = dist.get_rank()
        enabled = config.start > 0 and (config.all_ranks or self._rank == 0)
        self._first, self._last = (config.start, config.start + config.steps - 1) if enabled else (0, 0)
        if enabled and config.start not in subject.remaining_steps:
            steps = f"{subject.remaining_steps.start} to {subject.remaining_steps.stop - 1}"
            print_(
                f"warning: no profile: profile.start={config.start} is outside the steps of this run, {steps}"
            )
            self._last = 0
        self._profile: torch.profiler.profile | None = None
        self._step: torch.profiler.record_function | None = None
        self._annotations: list[RemovableHandle] = []
        self._recording = False

    def before_step(self, step: int) -> None:
        """Start or continue the window."""
        if step <= self._last:
            with self._errors_as_warning():
                self._before(step)

    def after_step(self, done: StepDone) -> None:
        """End the window after its last step, and say where its trace is."""
        if self._step is not None:
            self._step.__exit__(None, None, None)
            self._step = None
        if done.step == self._last and (folder := self._end_window()):
            self._print(f"profile: {folder}; python -m tools.trace {folder.parents[1]}")

    def close(self) -> None:
        """End an open window and write its trace."""
        self._end_window()

    def _end_window(self) -> Path | None:
        """End an open window and write its trace; return the folder, or None if there is no window or it
        could not be written."""
        profile, self._profile = self._profile, None  # first, so that an error cannot end it twice
        if profile is None:
            return None
        written = None
        with self._errors_as_warning():
            # the run ends while the profiler warms up: it must be started and stopped, not dropped
            if not self._recording:
                profile.start_trace()
                profile.stop_trace()
                return None
            self._wait_for_device()
            profile.stop_trace()
            self._folder.mkdir(parents=True, exist_ok=True)
            with replacing(self._path("json.gz"), ".gz") as partial:
                profile.export_chrome_trace(str(partial))
            if self._records_memory:
                with replacing(self._path("memory.pickle")) as partial:
                    torch.cuda.memory._dump_snapshot(str(partial))
            graphs = [asdict(graph) | {"total_s": graph.total_s} for graph in compiled_graphs()]
            write_atomically(self._path("compile.json"), json.dumps(graphs, indent=1).encode())
            written = self._folder
        self._end()
        return written

    def _before(self, step: int) -> None:
        if self._profile is None and step in (self._first - 1, self._first):
            self._profile = torch.profiler.profile(
                record_shapes=True,
                with_stack=self._config.stacks,
                profile_memory=self._config.memory,
                acc_events=True,  # there is one cycle only; without it torch 2.11 warns
            )
            self._profile.prepare_trace()
        if self._profile is not None and step == self._first:
            from meshwright.parallel.profiler_annotations import name_units

            for old in self._folder.glob("rank-*") if self._rank == 0 else ():  # of an earlier run
                old.unlink(missing_ok=True)
            self._wait_for_device()  # kernels that still run were launched before the window
            if self._records_memory:
                torch.cuda.memory._record_memory_history(max_entries=HISTORY_ENTRIES)
            self._annotations = name_units(self._subject.model, self._subject.plan)
            self._profile.start_trace()
            self._profile.add_metadata_json("meshwright", json.dumps(self._facts()))
            self._recording = True
        if self._recording:
            # other tools look for this name
            self._step = torch.profiler.record_function(f"ProfilerStep#{step}")
            self._step.__enter__()

    def _facts(self) -> Mapping[str, Any]:
        """The facts of the run that a trace contains."""
        device = self._subject.device
        return {
            "rank": self._rank,
            "world_size": dist.get_world_size(),
            "first_step": self._first,
            "local_world_size": read_rank_info().local_world_size,
            "steps": self._config.steps,
            "device_type": device.type,
            "torch": torch.__version__,
            "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        }

    @property
    def _records_memory(self) -> bool:
        return self._config.memory and self._subject.device.type == "cuda"

    def _path(self, ending: str) -> Path:
        return self._folder / f"rank-{self._rank}.{ending}"

    def _wait_for_device(self) -> None:
        if self._subject.device.type == "cuda":
            torch.cuda.synchronize(self._subject.device)

    def _end(self) -> None:
        """Remove the annotations, stop recording, and reset the state."""
        for handle in self._annotations:
            handle.remove()
        if self._recording and self._records_memory:
            torch.cuda.memory._record_memory_history(None)
        self._profile, self._step, self._annotations, self._recording, self._last = None, None, [], False, 0

    @contextmanager
    def _errors_as_warning(self) -> Iterator[None]:
        """Context that turns an error into a warning and ends the profile."""
        try:
            yield
        except (OSError, RuntimeError) as error:
            reason = one_line(f"{type(error).__name__}: {error}", ERROR_SHOWN)
            message = (
                f"warning: no profile from step {self._first} in {self._folder}: {reason}; the run continues"
            )
            self._print(message) if self._rank == 0 else print_error(f"rank {self._rank}: {message}")
            self._end()
