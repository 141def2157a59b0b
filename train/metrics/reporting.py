"""The reports of a run during training: rows of metrics, console, profile, and progress."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from meshwright.train.config import Config
from meshwright.train.console import Console
from meshwright.train.data.loader import StepData
from meshwright.train.data.training_data import TrainingData
from meshwright.train.evaluation import Score
from meshwright.train.metrics.collector import Metrics, make_throughput
from meshwright.train.metrics.run_summary import describe_run
from meshwright.train.planning.run_plan import RunPlan
from meshwright.train.profiling import KernelCheck, ProfiledRun, StepProfiler
from meshwright.train.state import TrainState
from meshwright.train.step import StepResult


class Reporting:
    """The reports of a rank; only rank 0 writes. As a context manager it shows the progress bar, and writes
    an open profile and the remaining rows at its end."""

    def __init__(
        self,
        console: Console,
        metrics: Metrics,
        profiler: StepProfiler,
        kernels: KernelCheck | None,
        on_progress: Callable[[int], None],
        steps: range,
    ) -> None:
        """`on_progress` is called with a step after all its rows are written. `steps`: remaining steps."""
        self._console, self._metrics, self._profiler, self._kernels = console, metrics, profiler, kernels
        self._on_progress, self._steps = on_progress, steps

    def __enter__(self) -> "Reporting":
        self._console.start_progress(self._steps.start - 1, self._steps.stop - 1)
        return self

    def __exit__(self, *error: object) -> None:
        self._profiler.close()
        self._console.close()
        if self._kernels:
            self._kernels.close()
        self._metrics.close()

    def start_clock(self) -> None:
        """Start the clock: time before this call is not step time."""
        self._metrics.resume()

    def before_step(self, step: int, reported: bool) -> None:
        """Prepare metrics, profiler and kernel check; called before the data of every step. `reported`: a row
        will be written for this step."""
        self._metrics.before_step(reported)
        self._profiler.before_step(step)
        if self._kernels:
            self._kernels.before_step()

    def after_step(self, step: int, data: StepData, result: StepResult) -> None:
        """Update metrics, profiler and kernel check; called after every step."""
        if self._kernels:
            self._kernels.after_step()
        self._metrics.step_done(data.wait_s, result)
        self._console.step_done(step)
        if (trace := self._profiler.after_step(step)) is not None:
            self._console.print(f"profile: {trace}; python -m tools.trace {trace.parents[1]}")

    @contextmanager
    def paused(self, pausing: bool) -> Iterator[None]:
        """Context whose time is not step time; without `pausing` it does nothing."""
        if pausing:
            self._metrics.pause()
        yield
        if pausing:
            self._metrics.resume()

    def report(
        self,
        step: int,
        result: StepResult,
        lr: float,
        about: Mapping[str, Any],
        scores: Mapping[str, Score],
    ) -> None:
        """Write and show a row; every rank calls it while the clock is stopped. `about`: further entries."""
        self._console.report(self._metrics.log(step, result, lr, about, scores))
        self.progress(step)

    def report_evaluation(self, step: int, scores: Mapping[str, Score]) -> None:
        """Write and show an evaluation outside a reported step, if it was completed."""
        if scores:
            self._console.report(self._metrics.log_eval(step, scores))

    def progress(self, step: int) -> None:
        """Call `on_progress` with `step` after all rows so far are written."""
        self._metrics.later(partial(self._on_progress, step))

    def print(self, text: str) -> None:
        """Print a line."""
        self._console.print(text)

    def flush(self) -> None:
        """Wait until all rows so far are written, unless the disk hangs."""
        self._metrics.flush()

    def finish(self) -> None:
        """Print the comparison of predicted and measured values, if the planner predicted any; called when a
        run ends without an error."""
        if line := self._metrics.compare_with_predicted():
            self._console.print(line)


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
    plan, steps = planned.plan, range(state.position.step + 1, data.total_steps + 1)
    throughput = make_throughput(config.job, plan, planned.device_name)
    is_main = dist.get_rank() == 0
    shown = describe_run(config, planned, data.corpus.description, steps)
    metrics = Metrics(
        config.metrics, throughput, folder, planned.device, is_main, planned.predicted, shown, console.print
    )
    metrics.watch_gradients(state.sharded.model, plan, state.optimizer)
    profiled = ProfiledRun(state.sharded.model, plan, planned.device, steps)
    profiler = StepProfiler(config.profile, folder / "profile", profiled, console.print)
    # On a GPU torch chooses among kernels of one name; a configured profile shows the kernels anyway.
    checking = planned.device.type == "cuda" and is_main and not config.profile.start
    kernels = KernelCheck(plan.attention, planned.device, console.print) if checking else None
    return Reporting(console, metrics, profiler, kernels, on_progress, steps)
