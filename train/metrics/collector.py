"""The rows of metrics.jsonl: rates, memory, and the norm of each unit's gradient. The only place that waits
for the device."""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.models.cost import flops_per_token
from meshwright.parallel.compile.stats import count_compiled_graphs
from meshwright.parallel.grad_norm import unit_gradient_norms, unit_parameters
from meshwright.parallel.memory_breakdown import GIB
from meshwright.parallel.plan.schema import Plan
from meshwright.parallel.planner.hardware import find_hardware
from meshwright.train.config import MetricsConfig, TrainingJob
from meshwright.train.evaluation import Score, mean_loss
from meshwright.train.memory import peak_resident_bytes
from meshwright.train.metrics.loss_spikes import Spike, SpikeDetector
from meshwright.train.metrics.tensorboard import PREDICTED, UNIT_NORMS, RunSummary
from meshwright.train.metrics.writer import MetricsWriter
from meshwright.train.step import StepResult


class GradientNorms:
    """Takes the norms just before the optimizer's step, at the steps that are asked for: gradients are whole
    then, not yet clipped, and of all ranks; the optimizer may change them in place, and they are freed after
    it."""

    def __init__(self, model: nn.Module, plan: Plan, optimizer: torch.optim.Optimizer) -> None:
        self._units = unit_parameters(model, plan)
        self._wanted = False
        self._norms: Tensor | None = None
        optimizer.register_step_pre_hook(self._before_optimizer)

    def want(self, wanted: bool) -> None:
        """Whether the next step is one whose norms are asked for; every rank says the same."""
        self._wanted = wanted

    def take(self) -> dict[str, float]:
        """By unit, the norms of the last step that was asked for, which are then forgotten; waits for the
        device."""
        if self._norms is None:
            return {}
        norms, self._norms = self._norms.tolist(), None
        return dict(zip(self._units, norms, strict=True))

    def _before_optimizer(self, *_: Any) -> None:
        if self._wanted:
            self._norms, self._wanted = unit_gradient_norms(list(self._units.values())), False


@dataclass(frozen=True)
class Throughput:
    """What turns a step's time into rates: tokens and operations of an optimizer step, and the devices' peak.

    `peak_flops`: of one device, or None where it is unknown: then there is no MFU.
    """

    tokens_per_step: int
    flops_per_token: float
    flops_per_token_causal: float
    world_size: int
    peak_flops: float | None


class Metrics:
    """Collects and writes the rows of metrics.jsonl; every rank calls `log`, rank 0 writes. `predicted`:
    figures that the planner has predicted, by the names they have in a row. `shown`: what TensorBoard shows
    of the run, from the first row on. Files that cannot be written do not end the run: `warn` hears of it,
    once."""

    def __init__(
        self,
        config: MetricsConfig,
        throughput: Throughput,
        folder: Path,
        device: torch.device,
        is_main: bool,
        predicted: Mapping[str, float],
        shown: RunSummary,
        warn: Callable[[str], None],
    ) -> None:
        self._config, self._throughput, self._device = config, throughput, device
        self._spikes = SpikeDetector()
        self._rows = MetricsWriter(folder, config.tensorboard, shown, warn) if is_main else None
        self._steps, self._wait_s, self._busy_s, self._since = 0, 0.0, 0.0, time.perf_counter()
        self._graphs: int | None = None
        self._predicted = dict(predicted)  # by the name of the figure
        rates = self._rates(predicted["step_time_s"]) if "step_time_s" in predicted else {}
        self._predicted_row = {f"{PREDICTED}{name}": value for name, value in {**predicted, **rates}.items()}
        self._norms: GradientNorms | None = None
        self._reported: list[dict[str, float]] = []  # the same figures, of each report

    def watch_gradients(self, model: nn.Module, plan: Plan, optimizer: torch.optim.Optimizer) -> None:
        """Have every report say the norm of each unit's gradient, if the config asks for it."""
        if self._config.gradient_norms:
            self._norms = GradientNorms(model, plan, optimizer)

    def before_step(self, reported: bool) -> None:
        """Say whether the next step will be reported; every rank says the same."""
        if self._norms is not None:
            self._norms.want(reported)

    def step_done(self, data_wait_s: float) -> None:
        """Count a step; after the first of this process the compiled graphs are all there should ever be."""
        self._steps += 1
        self._wait_s += data_wait_s
        if self._graphs is None:
            self._graphs = count_compiled_graphs()

    def pause(self) -> None:
        """Stop the clock once the device is done: what follows (an evaluation, a checkpoint) is not step
        time."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._busy_s += time.perf_counter() - self._since

    def resume(self) -> None:
        """Start the clock again."""
        self._since = time.perf_counter()

    def log(
        self,
        step: int,
        result: StepResult,
        lr: float,
        used: Mapping[str, Any],
        scores: Mapping[str, Score] | None,
    ) -> dict[str, Any]:
        """Have one row written, with rates over the steps since the last, and what data was `used`; every
        rank calls it, with the clock paused. A row whose loss is a spike has loss_spike, in deviations (see
        train/metrics/loss_spikes.py)."""
        loss, grad_norm = result.loss.item(), result.grad_norm.item()
        steps = max(1, self._steps)
        recompiles = count_compiled_graphs() - (self._graphs or 0)
        mine = [self._busy_s / steps, self._wait_s / steps, recompiles, *_peak_memory_gib(self._device)]
        worst = torch.tensor(mine, dtype=torch.float64)
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)  # on the host: the slowest and the fullest rank counts
        step_time_s, wait_s, most_recompiles, memory_gib, reserved_gib = worst.tolist()
        row: dict[str, Any] = {"step": step, "loss": loss}
        row |= _scores_row(scores or {})
        row |= {"grad_norm": grad_norm, "lr": lr, **self._rates(step_time_s), "step_time_s": step_time_s}
        row |= {"peak_memory_gib": memory_gib, "reserved_memory_gib": reserved_gib}
        row |= {"data_wait_s": wait_s, "recompiles": int(most_recompiles)}
        row |= used
        row |= self._predicted_row
        if self._norms is not None:
            row[UNIT_NORMS] = self._norms.take()
        texts = {}
        if (spike := self._spikes.add(loss)) is not None:
            row["loss_spike"] = spike.deviations
            texts["loss_spikes"] = _describe_spike(spike, row, used)
        if self._predicted:
            self._reported.append({name: row[name] for name in self._predicted})
        self._write(row, texts)
        self._steps, self._wait_s, self._busy_s = 0, 0.0, 0.0
        return row

    def log_eval(self, step: int, scores: Mapping[str, Score]) -> dict[str, Any]:
        """Write a row for an evaluation outside a reported step, such as the one before training."""
        row = {"step": step, **_scores_row(scores)}
        self._write(row, {})
        return row

    def compare_with_predicted(self) -> str:
        """One line: what was predicted against what was measured, the median of all reports but the first,
        whose steps include compiling; "" where nothing was predicted."""
        later = self._reported[1:]
        if not self._predicted:
            return ""
        if not later:
            return (
                "predicted against measured: nothing to compare with, one report only, whose steps "
                "include compiling"
            )
        measured = {name: statistics.median(row[name] for row in later) for name in self._predicted}
        told = (
            f"{name} {value:.3g} against {measured[name]:.3g} ({value / measured[name] - 1:+.1%})"
            for name, value in self._predicted.items()
        )
        return f"predicted against measured: {', '.join(told)}"

    def later(self, job: Callable[[], None]) -> None:
        """Have something done once all rows so far are written: by the thread that writes them, or here on
        ranks without one."""
        self._rows.later(job) if self._rows is not None else job()

    def flush(self) -> None:
        """Wait until all rows so far are written, unless the disk hangs."""
        if self._rows is not None:
            self._rows.flush()

    def close(self) -> None:
        """Write what has not been written yet."""
        if self._rows is not None:
            self._rows.close()

    def _rates(self, step_time_s: float) -> dict[str, float]:
        t = self._throughput
        tokens_per_s = t.tokens_per_step / step_time_s
        per_gpu = tokens_per_s / t.world_size
        rates = {"tokens_per_s": tokens_per_s, "tokens_per_s_per_gpu": per_gpu}
        if t.peak_flops is not None:
            rates["mfu"] = per_gpu * t.flops_per_token / t.peak_flops
            rates["mfu_causal"] = per_gpu * t.flops_per_token_causal / t.peak_flops
        return rates

    def _write(self, row: Mapping[str, Any], texts: Mapping[str, str]) -> None:
        if self._rows is not None:
            self._rows.write(row, texts)


def _describe_spike(spike: Spike, row: Mapping[str, Any], used: Mapping[str, Any]) -> str:
    """A spike in Markdown: what happened, and how far in the data."""
    place = ", ".join(f"{name} {value}" for name, value in used.items())
    return (
        f"step {row['step']}: loss {row['loss']:.4f}, usually {spike.usual:.4f} ({spike.deviations:.1f} "
        f"deviations above)\n\ngrad_norm {row['grad_norm']:.4g}, lr {row['lr']:.4g}; {place}"
    )


def _scores_row(scores: Mapping[str, Score]) -> dict[str, float]:
    """eval_loss, the mean over the tokens of all sets; and of each set eval/NAME/loss, perplexity and
    bits_per_byte."""
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
    """Peak of allocated and of reserved memory on a GPU; of the process's resident memory, twice, on a
    CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / GIB, torch.cuda.max_memory_reserved(device) / GIB
    resident = peak_resident_bytes() / GIB
    return resident, resident


def make_throughput(job: TrainingJob, plan: Plan, device_name: str) -> Throughput:
    """Tokens and operations of a step of the run on devices of that name."""
    seq_len, hardware, dtype = job.seq_len, find_hardware(device_name), plan.units[0].param_dtype
    return Throughput(
        tokens_per_step=plan.global_batch_size * seq_len,
        flops_per_token=flops_per_token(job.model, seq_len, "full"),
        flops_per_token_causal=flops_per_token(job.model, seq_len, "causal"),
        world_size=plan.mesh.world_size,
        peak_flops=hardware.peak_tflops[dtype] * 1e12 if hardware else None,
    )
