"""Make the rows of metrics.jsonl: loss, rates, memory, and the gradient norm of each unit. A row waits until
the device has finished the step, which training otherwise avoids."""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.parallel.compile.stats import count_training_graphs
from meshwright.parallel.grad_norm import unit_gradient_norms, unit_parameters
from meshwright.parallel.memory_breakdown import GIB
from meshwright.parallel.plan.schema import Plan
from meshwright.train.config import TrainingJob
from meshwright.train.evaluation import Score, mean_loss
from meshwright.train.memory import peak_resident_bytes
from meshwright.train.metrics.loss_spikes import Spike, SpikeDetector
from meshwright.train.model.build import training_flops
from meshwright.train.step import StepResult

PREDICTED = "predicted_"  # prefix of a planner prediction in metrics.jsonl
UNIT_NORMS = "unit_grad_norms"


class GradientNorms:
    """Computes the gradient norm of each unit directly before the next optimizer step if `requested`, which
    all ranks set alike. Only then are the gradients accumulated, reduced over the ranks and not yet clipped:
    the optimizer may change them in place, and they are freed after it."""

    def __init__(self, model: nn.Module, plan: Plan, optimizer: torch.optim.Optimizer) -> None:
        self._units = unit_parameters(model, plan)
        self.requested = False
        self._norms: Tensor | None = None
        optimizer.register_step_pre_hook(self._before_optimizer)

    def take(self) -> dict[str, float]:
        """Return and clear the norms of the last requested step, by unit; waits for the device."""
        if self._norms is None:
            return {}
        norms, self._norms = self._norms.tolist(), None
        return dict(zip(self._units, norms, strict=True))

    def _before_optimizer(self, *_: Any) -> None:
        if self.requested:
            self._norms, self.requested = unit_gradient_norms(list(self._units.values())), False


# from the seconds of a step to the rates in a row
Rates = Callable[[float], dict[str, float]]


def make_rates(job: TrainingJob, plan: Plan, device_name: str) -> Rates:
    """Return the function for a plan: tokens per second, with those of padding, and the MFU if the peak of
    the devices, named `device_name`, is known."""
    from meshwright.parallel.planner.hardware import find_hardware  # late: needed once, by a run that starts

    hardware, dtype = find_hardware(device_name), plan.units[0].param_dtype
    full, causal = training_flops(job)  # per token

    def rates(step_time_s: float) -> dict[str, float]:
        tokens_per_s = plan.global_batch_size * job.seq_len / step_time_s
        per_gpu = tokens_per_s / plan.mesh.world_size
        row = {"tokens_per_s": tokens_per_s, "tokens_per_s_per_gpu": per_gpu}
        if hardware:
            peak_flops = hardware.peak_tflops[dtype] * 1e12
            row |= {"mfu": per_gpu * full / peak_flops, "mfu_causal": per_gpu * causal / peak_flops}
        return row

    return rates


class Metrics:
    """Makes the rows of metrics.jsonl from the steps since the last row; every rank makes them.

    `predicted`: predictions of the planner, by their names in a row; `norms`: None if not requested.
    """

    def __init__(
        self,
        rates: Rates,
        device: torch.device,
        predicted: Mapping[str, float],
        norms: GradientNorms | None,
    ) -> None:
        self._rates, self._device, self._norms = rates, device, norms
        self._spikes = SpikeDetector()
        self._steps, self._wait_s, self._busy_s, self._since = 0, 0.0, 0.0, time.perf_counter()
        self._trained = torch.zeros((), dtype=torch.float64, device=device)  # tokens
        self._graphs: int | None = None
        self._predicted = dict(predicted)
        at_rates = rates(predicted["step_time_s"]) if "step_time_s" in predicted else {}
        self._predicted_row = {f"{PREDICTED}{name}": v for name, v in {**predicted, **at_rates}.items()}
        self._reported: list[dict[str, float]] = []  # the measured values of the predicted names, per report

    def before_step(self, reported: bool) -> None:
        """Prepare the next step; `reported`: whether it will be reported, the same on all ranks."""
        if self._norms is not None:
            self._norms.requested = reported

    def step_done(self, data_wait_s: float, result: StepResult) -> None:
        """Count a step and the tokens that it trained; graphs that are compiled after this process's first
        step count as recompiles."""
        self._steps += 1
        self._wait_s += data_wait_s
        self._trained += result.tokens * (1 - result.skipped)
        if self._graphs is None:
            self._graphs = count_training_graphs()

    def pause(self) -> None:
        """Wait for the device and stop the clock: an evaluation or a checkpoint is not step time."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._busy_s += time.perf_counter() - self._since

    def resume(self) -> None:
        """Start the clock again."""
        self._since = time.perf_counter()

    def make_row(
        self, step: int, result: StepResult, lr: float, used: Mapping[str, Any], scores: Mapping[str, Score]
    ) -> tuple[dict[str, Any], dict[str, str]]:
        """Return one row, with rates over the steps since the last row, and texts for TensorBoard; every rank
        calls it while the clock is stopped.

        `used`: the data position, added to the row. A row whose loss is a spike contains loss_spike, in
        deviations (train/metrics/loss_spikes.py).
        """
        loss, grad_norm = result.loss.item(), result.grad_norm.item()
        steps = max(1, self._steps)
        recompiles = count_training_graphs() - (self._graphs or 0)
        local = [self._busy_s / steps, self._wait_s / steps, recompiles, *_peak_memory_gib(self._device)]
        worst = torch.tensor(local, dtype=torch.float64)
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)  # on the host: maximum time and memory over the ranks
        step_time_s, wait_s, most_recompiles, memory_gib, reserved_gib = worst.tolist()
        row: dict[str, Any] = {"step": step, "loss": loss, **scores_row(scores)}
        row |= {"grad_norm": grad_norm, "lr": lr, **self._rates(step_time_s), "step_time_s": step_time_s}
        row["trained_tokens_per_s"] = self._trained.item() / steps / step_time_s
        row |= {"peak_memory_gib": memory_gib, "reserved_memory_gib": reserved_gib}
        row |= {"data_wait_s": wait_s, "recompiles": int(most_recompiles), **used, **self._predicted_row}
        if self._norms is not None:
            row[UNIT_NORMS] = self._norms.take()
        texts = {}
        if (spike := self._spikes.add(loss)) is not None:
            row["loss_spike"] = spike.deviations
            texts["loss_spikes"] = _describe_spike(spike, row, used)
        if self._predicted:
            self._reported.append({name: row[name] for name in self._predicted})
        self._steps, self._wait_s, self._busy_s = 0, 0.0, 0.0
        self._trained.zero_()
        return row, texts

    def compare_with_predicted(self) -> str:
        """Return one line that compares predictions with measurements, or "" without predictions. Measured is
        the median over all reports except the first, which includes compiling."""
        later = self._reported[1:]
        if not self._predicted:
            return ""
        if not later:
            return (
                "predicted against measured: nothing to compare, because the first report, which includes "
                "compiling, does not count"
            )
        measured = {name: statistics.median(row[name] for row in later) for name in self._predicted}
        comparisons = (
            f"{name} {value:.3g} against {measured[name]:.3g} ({value / measured[name] - 1:+.1%})"
            for name, value in self._predicted.items()
        )
        return f"predicted against measured: {', '.join(comparisons)}"


def _describe_spike(spike: Spike, row: Mapping[str, Any], used: Mapping[str, Any]) -> str:
    """Describe a spike in Markdown, with the data position."""
    position = ", ".join(f"{name} {value}" for name, value in used.items())
    return (
        f"step {row['step']}: loss {row['loss']:.4f}, usual loss {spike.usual:.4f} ({spike.deviations:.1f} "
        f"deviations above)\n\ngrad_norm {row['grad_norm']:.4g}, lr {row['lr']:.4g}; {position}"
    )


def scores_row(scores: Mapping[str, Score]) -> dict[str, float]:
    """Return eval_loss (the mean of all tokens), and eval/NAME/loss, perplexity, bits_per_byte of sets."""
    if not scores:
        return {}
    row = {"eval_loss": mean_loss(scores)}
    for name, score in scores.items():
        row |= {
            f"eval/{name}/{figure}": getattr(score, figure)
            for figure in ("loss", "perplexity", "bits_per_byte")
        }
    return row


def _peak_memory_gib(device: torch.device) -> tuple[float, float]:
    """Return peak allocated and peak reserved memory on a GPU; on a CPU the peak resident memory, twice."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / GIB, torch.cuda.max_memory_reserved(device) / GIB
    resident = peak_resident_bytes() / GIB
    return resident, resident
