"""What a run tells while it trains: rows of metrics, the console, a profile, and how far it is."""

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
    """Every rank has one; rank 0 writes. As a context it shows the training, and at its end writes what has
    not been written yet."""

    def __init__(
        self,
        console: Console,
        metrics: Metrics,
        profiler: StepProfiler,
        kernels: KernelCheck | None,
        on_progress: Callable[[int], None],
        steps: range,
    ) -> None:
        """`on_progress` hears of a step when all rows up to it are written. `steps`: those to come."""
        self._console, self._metrics, self._profiler, self._kernels = console, metrics, profiler, kernels
        self._on_progress, self._steps = on_progress, steps

    def __enter__(self) -> "Reporting":
        self._console.start_progress(self._steps.start - 1, self._steps.stop - 1)
        return self

    def __exit__(self, *error: object) -> None:
        self._console.close()
        if self._kernels:
            self._kernels.close()
        self._metrics.close()

    def start_clock(self) -> None:
        """Training begins: what was before is not step time."""
        self._metrics.resume()

    def before_step(self, step: int, reported: bool) -> None:
        """Called before every step, and before its data. `reported`: a row of it will be written."""
        self._metrics.before_step(reported)
        self._profiler.before_step(step)
        if self._kernels:
            self._kernels.before_step()

    def after_step(self, step: int, data: StepData) -> None:
        """Called after every step."""
        if self._kernels:
            self._kernels.after_step()
        self._metrics.step_done(data.wait_s)
        self._console.step_done(step)
        if (trace := self._profiler.after_step(step)) is not None:
            self._console.print(f"profile: {trace}; python -m tools.trace {trace.parents[1]}")

    @contextmanager
    def paused(self, pausing: bool) -> Iterator[None]:
        """The clock stands still, if it is to: what is done in here is not step time."""
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
        """Write and show a row; every rank calls it, with the clock paused. `about`: what else it says."""
        self._console.report(self._metrics.log(step, result, lr, about, scores))
        self.progress(step)

    def report_evaluation(self, step: int, scores: Mapping[str, Score]) -> None:
        """Write and show an evaluation outside a reported step."""
        self._console.report(self._metrics.log_eval(step, scores))

    def progress(self, step: int) -> None:
        """Note how far the run is, as soon as all rows so far are written."""
        self._metrics.later(partial(self._on_progress, step))

    def print(self, text: str) -> None:
        """Print a line."""
        self._console.print(text)

    def flush(self) -> None:
        """Wait until all rows so far are written, unless the disk hangs."""
        self._metrics.flush()

    @contextmanager
    def profiling(self) -> Iterator[None]:
        """Steps are done in here; a profile that is under way at their end is written."""
        try:
            yield
        finally:
            self._profiler.close()

    def finish(self) -> None:
        """The run has ended by itself: print what the planner predicted against what was measured, if it
        did."""
        if told := self._metrics.compare_with_predicted():
            self._console.print(told)


def build_reporting(
    config: Config,
    planned: RunPlan,
    state: TrainState,
    data: TrainingData,
    folder: Path,
    console: Console,
    on_progress: Callable[[int], None],
) -> Reporting:
    """The reporting of a run, whose facts TensorBoard shows from the first row on."""
    plan, steps = planned.plan, range(state.position.step + 1, data.total_steps + 1)
    throughput = make_throughput(config.job, plan, planned.device_name)
    is_main = dist.get_rank() == 0
    shown = describe_run(config, planned, data.corpus.description, data.total_steps)
    metrics = Metrics(
        config.metrics, throughput, folder, planned.device, is_main, planned.predicted, shown, console.print
    )
    metrics.watch_gradients(state.model, plan, state.optimizer)
    profiled = ProfiledRun(state.model, plan, planned.device, steps)
    profiler = StepProfiler(config.profile, folder / "profile", profiled, console.print)
    # GPUs choose among kernels behind a name; a profile that was asked for shows them itself
    looks = planned.device.type == "cuda" and is_main and not config.profile.start
    kernels = KernelCheck(plan.attention, planned.device, console.print) if looks else None
    return Reporting(console, metrics, profiler, kernels, on_progress, steps)
