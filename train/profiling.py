"""A window of steps through torch's profiler: a Chrome trace of each profiled rank, which `tools.trace`
explains. And which attention kernel a run really uses, read from a profile of one step."""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity
from torch.utils.hooks import RemovableHandle

from meshwright.parallel.compile.stats import compiled_graphs
from meshwright.parallel.errors import one_line
from meshwright.parallel.plan.schema import Plan
from meshwright.train.config import ProfileConfig
from meshwright.train.distributed.exit import say_error
from meshwright.train.distributed.ranks import read_rank_info
from meshwright.train.files import replacing, write_whole

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
        self._profile: torch.profiler.profile | None = None

    def before_step(self) -> None:
        """Called before every step."""
        self._steps_left -= 1
        if self._steps_left == 0:
            kind = ProfilerActivity.CUDA if self._device.type == "cuda" else ProfilerActivity.CPU
            self._profile = torch.profiler.profile(activities=[kind], acc_events=True)
            self._profile.start()

    def close(self) -> None:
        """Stop looking: the step has failed."""
        if self._profile is not None:
            self._profile.stop()
            self._profile = None

    def after_step(self) -> None:
        """Called after every step."""
        profile, self._profile = self._profile, None
        if profile is None:
            return
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        profile.stop()
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


@dataclass(frozen=True)
class ProfiledRun:
    """What is profiled, and on what."""

    model: nn.Module
    plan: Plan
    device: torch.device
    to_come: range  # the steps that the run will do


ERROR_SHOWN = 300  # characters of what the profiler or the disk said
HISTORY_ENTRIES = 1_000_000  # allocations that a snapshot remembers, the last ones


class StepProfiler:
    """Profiles a window of steps on rank 0 or on all; with start 0 it does nothing and costs nothing.

    The profiler is warmed up during the step before the window. An error of the profiler, or a folder that
    cannot be written, ends the profile and not the run: `warn` hears one line.
    """

    def __init__(
        self, config: ProfileConfig, folder: Path, subject: ProfiledRun, warn: Callable[[str], None]
    ) -> None:
        self._config, self._subject, self._warn = config, subject, warn
        self._folder = folder / f"step-{config.start:08d}"
        self._rank = dist.get_rank()
        enabled = config.start > 0 and (config.all_ranks or self._rank == 0)
        self._first, self._last = (config.start, config.start + config.steps - 1) if enabled else (0, 0)
        if enabled and config.start not in subject.to_come:
            steps = f"{subject.to_come.start} to {subject.to_come.stop - 1}"
            warn(
                f"warning: no profile: profile.start={config.start} is none of the steps that this run does, "
                f"{steps}"
            )
            self._last = 0
        self._profile: torch.profiler.profile | None = None
        self._step: torch.profiler.record_function | None = None
        self._names: list[RemovableHandle] = []
        self._recording = False

    def before_step(self, step: int) -> None:
        """Called before every optimizer step, counted from 1, and before its data."""
        if step <= self._last:
            with self._giving_up():
                self._before(step)

    def after_step(self, step: int) -> Path | None:
        """Called after every step; returns the folder of the traces when this rank's has just been written,
        else None."""
        if self._step is not None:
            self._step.__exit__(None, None, None)
            self._step = None
        return self.close() if step == self._last else None

    def close(self) -> Path | None:
        """End a window that is still open, writing what it has; None where nothing could be written, or there
        is none."""
        profile, self._profile = self._profile, None  # first: whatever goes wrong, it is over
        if profile is None:
            return None
        written = None
        with self._giving_up():
            # the run ends while the profiler warms up: it does not like to be dropped
            if not self._recording:
                profile.start_trace()
                profile.stop_trace()
                return None
            self._wait_for_device()
            profile.stop_trace()
            self._folder.mkdir(parents=True, exist_ok=True)
            with replacing(self._path("json.gz"), ".gz") as partial:
                profile.export_chrome_trace(str(partial))
            self._write_memory()
            write_whole(self._path("compile.json"), _compile_report().encode())
            written = self._folder
        self._end()
        return written

    def _before(self, step: int) -> None:
        if self._profile is None and step in (self._first - 1, self._first):
            self._profile = torch.profiler.profile(
                record_shapes=True, with_stack=self._config.stacks, profile_memory=self._config.memory
            )
            self._profile.prepare_trace()
        if self._profile is not None and step == self._first:
            from meshwright.parallel.profiler_annotations import name_units

            self._clear_folder()
            self._wait_for_device()  # what still runs was launched before the window
            if self._remembers:
                torch.cuda.memory._record_memory_history(max_entries=HISTORY_ENTRIES)
            self._names = name_units(self._subject.model, self._subject.plan)
            self._profile.start_trace()
            self._profile.add_metadata_json("meshwright", json.dumps(self._facts()))
            self._recording = True
        if self._recording:
            # the name that other tools look for
            self._step = torch.profiler.record_function(f"ProfilerStep#{step}")
            self._step.__enter__()

    def _clear_folder(self) -> None:
        """Take away what an earlier run of these steps has left, of as many ranks as it had."""
        for old in self._folder.glob("rank-*") if self._rank == 0 else ():
            old.unlink(missing_ok=True)

    def _facts(self) -> Mapping[str, Any]:
        """What a trace says of the run that it is of."""
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
    def _remembers(self) -> bool:
        return self._config.memory and self._subject.device.type == "cuda"

    def _write_memory(self) -> None:
        if self._remembers:
            with replacing(self._path("memory.pickle")) as partial:
                torch.cuda.memory._dump_snapshot(str(partial))

    def _path(self, ending: str) -> Path:
        return self._folder / f"rank-{self._rank}.{ending}"

    def _wait_for_device(self) -> None:
        if self._subject.device.type == "cuda":
            torch.cuda.synchronize(self._subject.device)

    def _end(self) -> None:
        """Leave nothing behind."""
        for handle in self._names:
            handle.remove()
        if self._recording and self._remembers:
            torch.cuda.memory._record_memory_history(None)
        self._profile, self._step, self._names, self._recording, self._last = None, None, [], False, 0

    @contextmanager
    def _giving_up(self) -> Iterator[None]:
        try:
            yield
        except (OSError, RuntimeError) as error:
            said = one_line(f"{type(error).__name__}: {error}", ERROR_SHOWN)
            words = f"warning: no profile from step {self._first} in {self._folder}, the run goes on ({said})"
            self._warn(words) if self._rank == 0 else say_error(f"rank {self._rank}: {words}")
            self._end()


def _compile_report() -> str:
    return json.dumps([asdict(graph) | {"total_s": graph.total_s} for graph in compiled_graphs()], indent=1)
