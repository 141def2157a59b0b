"""The reports of a run during training: rows of metrics, console, profile, and progress."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from meshwright.train.config import Config
from meshwright.train.console import Console
from meshwright.train.data.loader import StepData
from meshwright.train.data.training_data import TrainingData
from meshwright.train.evaluation import Score
from meshwright.train.metrics.collector import GradientNorms, Metrics, make_rates, scores_row
from meshwright.train.metrics.run_summary import describe_run
from meshwright.train.metrics.writer import MetricsWriter
from meshwright.train.planning.run_plan import RunPlan
from meshwright.train.profiling import KernelCheck, ProfiledRun, StepProfiler
from meshwright.train.state import TrainState
from meshwright.train.step import StepResult


@dataclass(frozen=True)
class Reporting:
    """The reports of a rank. As a context manager it shows the progress bar, and writes an open profile and
    the remaining rows at its end.

    Args:
        rows: the writer of rows; only rank 0 has one
        on_progress: called with a step after all its rows are written
        steps: the remaining steps
        compiling: whether the first step compiles
        memory: what the peak memory of a row is of
    """

    console: Console
    metrics: Metrics
    rows: MetricsWriter | None
    profiler: StepProfiler
    kernels: KernelCheck | None
    on_progress: Callable[[int], None]
    steps: range
    compiling: bool
    memory: str

    def __enter__(self) -> "Reporting":
        self.console.start_progress(self.steps.start - 1, self.steps.stop - 1, self.compiling, self.memory)
        return self

    def __exit__(self, *error: object) -> None:
        self.profiler.close()
        self.console.close()
        if self.kernels:
            self.kernels.close()
        if self.rows:
            self.rows.close()

    def start_clock(self) -> None:
        """Start the clock: time before this call is not step time."""
        self.metrics.resume()

    def before_step(self, step: int, reported: bool) -> None:
        """Prepare metrics, profiler and kernel check; called before the data of every step. `reported`: a row
        will be written for this step."""
        self.metrics.before_step(reported)
        self.profiler.before_step(step)
        if self.kernels:
            self.kernels.before_step()

    def after_step(self, step: int, data: StepData, result: StepResult) -> None:
        """Update metrics, profiler and kernel check; called after every step."""
        if self.kernels:
            self.kernels.after_step()
        self.metrics.step_done(data.wait_s, result)
        self.console.step_done(step)
        if (trace := self.profiler.after_step(step)) is not None:
            self.console.print(f"profile: {trace}; python -m tools.trace {trace.parents[1]}")

    @contextmanager
    def paused(self, pausing: bool) -> Iterator[None]:
        """Context whose time is not step time; without `pausing` it does nothing."""
        if pausing:
            self.metrics.pause()
        yield
        if pausing:
            self.metrics.resume()

    def report(
        self,
        step: int,
        result: StepResult,
        lr: float,
        about: Mapping[str, Any],
        scores: Mapping[str, Score],
    ) -> None:
        """Write and show a row; every rank calls it while the clock is stopped. `about`: further entries."""
        self._write(*self.metrics.make_row(step, result, lr, about, scores))
        self.progress(step)

    def report_evaluation(self, step: int, scores: Mapping[str, Score]) -> None:
        """Write and show an evaluation outside a reported step, if it was completed."""
        if scores:
            self._write({"step": step, **scores_row(scores)}, {})

    def _write(self, row: dict[str, Any], texts: dict[str, str]) -> None:
        if self.rows:
            self.rows.write(row, texts)
        self.console.report(row)

    def progress(self, step: int) -> None:
        """Call `on_progress` with `step` after all rows so far are written."""
        self.rows.later(partial(self.on_progress, step)) if self.rows else self.on_progress(step)

    def print(self, text: str) -> None:
        """Print a line."""
        self.console.print(text)

    def flush(self) -> None:
        """Wait until all rows so far are written, unless the disk hangs."""
        if self.rows:
            self.rows.flush()

    def finish(self) -> None:
        """Print the comparison of predicted and measured values, if the planner predicted any; called when a
        run ends without an error."""
        if line := self.metrics.compare_with_predicted():
            self.console.print(line)


def build_reporting(
    config: Config,
    planned: RunPlan,
    state: TrainState,
    data: TrainingData,
    folder: Path,
    console: Console,
    on_progress: Callable[[int], None],
) -> Reporting:
    """Return the Reporting of a run; TensorBoard shows the run summary from the first row on."""
    plan, model, steps = (
        planned.plan,
        state.sharded.model,
        range(state.position.step + 1, data.total_steps + 1),
    )
    norms = GradientNorms(model, plan, state.optimizer) if config.metrics.gradient_norms else None
    rates = make_rates(config.job, plan, planned.device_name)
    metrics = Metrics(rates, planned.device, planned.predicted, norms)
    rows = kernels = None
    if dist.get_rank() == 0:
        shown = describe_run(config, planned, data.corpus.description, steps)
        rows = MetricsWriter(folder, config.metrics.tensorboard, shown, console.print)
        # On a GPU torch chooses among kernels of one name; a configured profile shows the kernels anyway.
        if planned.device.type == "cuda" and not config.profile.start:
            kernels = KernelCheck(plan.attention, planned.device, console.print)
    profiled = ProfiledRun(model, plan, planned.device, steps)
    profiler = StepProfiler(config.profile, folder / "profile", profiled, console.print)
    compiling = plan.compile.backend != "eager" and any(unit.compiled for unit in plan.units)
    memory = "tensors" if planned.device.type == "cuda" else "process"
    return Reporting(
        console, metrics, rows, profiler, kernels, on_progress, steps, compiling=compiling, memory=memory
    )
