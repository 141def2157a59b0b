"""Make the rows of metrics.jsonl: loss and its spikes, rates, memory, and the gradient norm of each unit. A
row waits until the device has finished the step, which training otherwise avoids."""

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.parallel.compile.stats import count_training_graphs
from meshwright.parallel.errors import PlanError
from meshwright.parallel.grad_norm import unit_gradient_norms, unit_parameters
from meshwright.parallel.machine_memory import peak_resident_bytes
from meshwright.parallel.memory_breakdown import GIB
from meshwright.parallel.plan.schema import Plan
from meshwright.parallel.sharded_model import ShardedModel
from meshwright.train.checkpoint.manifest import TrainPosition
from meshwright.train.config import TrainingJob
from meshwright.train.hooks import Hook, Hooks, Score, StepDone, mean_loss
from meshwright.train.run import Run
from meshwright.train.training import training_flops

CORRECTING_STEPS = 10
PREDICTED = "predicted_"  # prefix of a planner prediction in metrics.jsonl
UNIT_NORMS = "unit_grad_norms"


class StepClock:
    """Measures the time of steps: evaluations, reports and saves are not step time."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._busy_s = device, 0.0
        self._since: float | None = None  # while the clock runs

    def start(self) -> None:
        """Start the clock: time before this call is not step time."""
        self._since = time.perf_counter()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Context that begins when the device is idle, and whose time is not step time; also within another
        one."""
        if self._since is None:
            yield
            return
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._busy_s, self._since = self._busy_s + time.perf_counter() - self._since, None
        yield
        self.start()

    def take_s(self) -> float:
        """Return the seconds of step time since the last call; the clock is paused."""
        busy_s, self._busy_s = self._busy_s, 0.0
        return busy_s


class GradientNorms(Hook):
    """Computes the gradient norm of each unit before the optimizer changes the gradients, in the steps that
    are `reported`."""

    def __init__(self, sharded: ShardedModel, reported: Callable[[int], bool]) -> None:
        self._units, self._reported = unit_parameters(sharded.model, sharded.plan), reported
        self._norms: Tensor | None = None

    def before_optimizer(self, step: int) -> None:
        if self._reported(step):
            self._norms = unit_gradient_norms(list(self._units.values()))

    def take(self) -> dict[str, float]:
        """Return and clear the norms of the last reported step, by unit; waits for the device."""
        if self._norms is None:
            return {}
        norms, self._norms = self._norms.tolist(), None
        return dict(zip(self._units, norms, strict=True))


# from the seconds of a step to the rates in a row
Rates = Callable[[float], dict[str, float]]


def make_rates(job: TrainingJob, plan: Plan, device_name: str, print_: Callable[[str], object]) -> Rates:
    """Return the function for a plan: tokens per second, with those of padding, and the MFU if the peak of
    the devices, named `device_name`, and the model's operations are known."""
    from meshwright.parallel.planner.hardware import find_hardware  # late: needed once, by a run that starts

    hardware, dtype = find_hardware(device_name), plan.units[0].param_dtype
    try:
        full, causal = training_flops(job) if hardware else (0.0, 0.0)  # per token
    except PlanError as error:
        print_(f"no MFU: the operations of the model cannot be counted: {error}")
        hardware = None

    def rates(step_time_s: float) -> dict[str, float]:
        tokens_per_s = plan.global_batch_size * job.seq_len / step_time_s
        per_gpu = tokens_per_s / plan.mesh.world_size
        row = {"tokens_per_s": tokens_per_s, "tokens_per_s_per_gpu": per_gpu}
        if hardware:
            peak_flops = hardware.peak_tflops[dtype] * 1e12
            row |= {"mfu": per_gpu * full / peak_flops, "mfu_causal": per_gpu * causal / peak_flops}
        return row

    return rates


class Metrics(Hook):
    """Makes the rows of metrics.jsonl from the steps since the last row, and reports them to all `hooks`;
    every rank makes them.

    `norms`: None if not requested; `columns`: returns further ones for a row.
    """

    def __init__(
        self,
        run: Run,
        hooks: Hooks,
        clock: StepClock,
        rates: Rates,
        norms: GradientNorms | None = None,
        columns: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        self._run, self._hooks, self._clock, self._rates = run, hooks, clock, rates
        self._norms, self._columns = norms, columns
        device, predicted = run.planned.device, run.planned.predicted
        self._spikes = SpikeDetector()
        self._steps, self._wait_s = 0, 0.0
        self._trained = torch.zeros((), dtype=torch.float64, device=device)  # tokens
        self._graphs: int | None = None
        self._scores: Mapping[str, Score] = {}
        self._predicted = dict(predicted)
        at_rates = rates(predicted["step_time_s"]) if "step_time_s" in predicted else {}
        self._predicted_row = {f"{PREDICTED}{name}": v for name, v in {**predicted, **at_rates}.items()}
        self._reported: list[dict[str, float]] = []  # the measured values of the predicted names, per report

    def start(self, position: TrainPosition) -> None:
        self._clock.start()

    def on_evaluation(self, step: int, scores: Mapping[str, Score]) -> None:
        """Add the scores to the row of the step; before the first step they are a row of their own."""
        if step:
            self._scores = scores
        else:
            self._hooks.on_report({"step": step, **scores_row(scores)})

    def after_step(self, done: StepDone) -> None:
        """Count a step and the tokens that it trained; graphs that are compiled after this process's first
        step count as recompiles."""
        self._steps += 1
        self._wait_s += done.data.wait_s
        self._trained += done.result.tokens * (1 - done.result.skipped)
        if self._graphs is None:
            self._graphs = count_training_graphs()
        if self._run.is_reported(done.step):
            with self._clock.paused():
                self._hooks.on_report(self._make_row(done))

    def _make_row(self, done: StepDone) -> dict[str, Any]:
        """Return one row, with rates over the steps since the last row."""
        loss, grad_norm = done.result.loss.item(), done.result.grad_norm.item()
        steps, data = self._steps, self._run.data.describe_step(done.position, done.data)
        recompiles = count_training_graphs() - (self._graphs or 0)
        local = [self._clock.take_s() / steps, self._wait_s / steps, recompiles]
        worst = torch.tensor([*local, *_peak_memory_gib(self._run.planned.device)], dtype=torch.float64)
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)  # on the host: maximum time and memory over the ranks
        step_time_s, wait_s, most_recompiles, memory_gib, reserved_gib = worst.tolist()
        row: dict[str, Any] = {"step": done.step, "loss": loss, **scores_row(self._scores)}
        row |= {"grad_norm": grad_norm, "lr": done.lr, **self._rates(step_time_s), "step_time_s": step_time_s}
        row["trained_tokens_per_s"] = self._trained.item() / steps / step_time_s
        row |= {"peak_memory_gib": memory_gib, "reserved_memory_gib": reserved_gib}
        row |= {"data_wait_s": wait_s, "recompiles": int(most_recompiles), **data, **self._columns()}
        row |= self._predicted_row
        if self._norms is not None:
            row[UNIT_NORMS] = self._norms.take()
        row |= self._spikes.add(loss)
        if self._predicted:
            self._reported.append({name: row[name] for name in self._predicted})
        self._steps, self._wait_s, self._scores = 0, 0.0, {}
        self._trained.zero_()
        return row

    def compare_with_predicted(self) -> list[str]:
        """Return one line that compares predictions with measurements, none without predictions. Measured is
        the median over all reports except the first, which includes compiling. After CORRECTING_STEPS more
        steps rank 0 corrects later predictions on this machine."""
        later = self._reported[1:]
        if not self._predicted:
            return []
        if not later:
            return [
                "predicted against measured: nothing to compare, because the first report, which includes "
                "compiling, does not count"
            ]
        measured = {name: statistics.median(row[name] for row in later) for name in self._predicted}
        comparisons = (
            f"{name} {value:.3g} against {measured[name]:.3g} ({value / measured[name] - 1:+.1%})"
            for name, value in self._predicted.items()
        )
        lines = [f"predicted against measured: {', '.join(comparisons)}"]
        prediction, steps = self._run.planned.prediction, len(later) * self._run.config.metrics.every
        correction = prediction and prediction.correction
        if correction and steps >= CORRECTING_STEPS and self._run.ranks.is_main:
            faster = self._predicted["step_time_s"] / measured["step_time_s"]  # than predicted
            lines.append(f"planner: {correction.with_run(correction.factor * faster).describe()}")
        return lines


def scores_row(scores: Mapping[str, Score]) -> dict[str, float]:
    """Return eval_loss (the mean of all tokens), and eval/NAME/loss, perplexity, bits_per_byte of sets."""
    if not scores:
        return {}
    row = {"eval_loss": mean_loss(scores)}
    for name, score in scores.items():
        for figure in ("loss", "perplexity", "bits_per_byte"):
            row[f"eval/{name}/{figure}"] = getattr(score, figure)
    return row


def _peak_memory_gib(device: torch.device) -> tuple[float, float]:
    """Return peak allocated and peak reserved memory on a GPU; on a CPU the peak resident memory, twice."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / GIB, torch.cuda.max_memory_reserved(device) / GIB
    resident = peak_resident_bytes() / GIB
    return resident, resident


WINDOW = 100  # reports that define the usual loss
MIN_REPORTS = 20  # with fewer reports the deviation is too uncertain
# in deviations: the threshold of OLMo 2 (arXiv 2501.00656), which uses the mean over 1,000 steps
THRESHOLD = 7.0
MAD_TO_STD = 1.4826  # standard deviation per median absolute deviation of a normal distribution
MIN_DEVIATION = 1e-3  # fraction of the usual loss: changes in the last digits of a flat loss are no spikes


class SpikeDetector:
    """Stores the last reported losses and compares each new one with them by median and median absolute
    deviation, which a few outliers do not change (Iglewicz and Hoaglin, How to Detect and Handle Outliers,
    1993)."""

    def __init__(self, before: Iterable[float] = ()) -> None:
        self._losses = deque(before, maxlen=WINDOW)

    def add(self, loss: float) -> dict[str, float]:
        """Add a loss. Return the columns of a spike: loss_spike, in robust standard deviations above
        usual_loss, the median of earlier reports; none for a usual loss, or one below. Spikes are stored too,
        so that a new level becomes usual; a loss that is not finite is neither stored nor a spike."""
        if not math.isfinite(loss):
            return {}
        before = list(self._losses)
        self._losses.append(loss)
        if len(before) < MIN_REPORTS:
            return {}
        usual = statistics.median(before)
        deviation = MAD_TO_STD * statistics.median(abs(value - usual) for value in before)
        deviations = (loss - usual) / max(deviation, MIN_DEVIATION * abs(usual), math.ulp(0.0))
        return {"loss_spike": deviations, "usual_loss": usual} if deviations > THRESHOLD else {}


# the columns of a row that say what was read
ABOUT_DATA = ("epoch", "sequences/", "data_hash", "skipped_steps")


def describe_spike(row: Mapping[str, Any]) -> str:
    """Describe the spike of a row of metrics.jsonl in Markdown, with the position in the data."""
    position = ", ".join(f"{name} {value}" for name, value in row.items() if name.startswith(ABOUT_DATA))
    return (
        f"step {row['step']}: loss {row['loss']:.4f}, usual loss {row['usual_loss']:.4f} "
        f"({row['loss_spike']:.1f} deviations above)\n\ngrad_norm {row['grad_norm']:.4g}, "
        f"lr {row['lr']:.4g}; {position}"
    )
