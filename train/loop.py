"""The training loop: batch, step, report, evaluate, save, stop."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from parallel.compile_check import describe_cache
from parallel.recompile import RecompileGuard
from train.checkpoint import Position, save_checkpoint
from train.config import Config, config_to_yaml
from train.console import Screen
from train.data.held_out import held_out_batches
from train.data.loader import BatchShape, TrainLoader
from train.data.tokens import TokenFiles
from train.host_memory import return_free_memory
from train.metrics import Metrics
from train.optim import learning_rate, set_learning_rate
from train.profiling import StepProfiler
from train.step import evaluate, train_step
from train.stop import Stop


@dataclass(frozen=True)
class Run:
    """Everything the loop works with."""

    config: Config
    folder: Path
    device: torch.device
    model: nn.Module
    optimizer: torch.optim.Optimizer
    tokens: TokenFiles
    shape: BatchShape
    data_parallel: dist.ProcessGroup
    metrics: Metrics
    screen: Screen
    stop: Stop
    recompiles: RecompileGuard
    total_steps: int


def train_loop(run: Run, start: Position, on_progress: Callable[[Position], None]) -> Position:
    """Train from `start` to the last step, or until a stop is agreed; returns how far it got.

    `on_progress` hears of the position after every report and every checkpoint.
    """
    config, position = run.config, start
    loader = TrainLoader(run.tokens.train, run.shape, config.run.seed, start.samples, run.device, config.data.prefetch)
    profiler = StepProfiler(config.profile, run.folder / "profile", dist.get_rank() == 0)
    if config.train.eval_every and start.step == 0:
        eval_loss = _evaluate(run)
        run.metrics.log_eval(0, eval_loss)
        run.screen.report({"step": 0, "eval_loss": eval_loss})
    run.metrics.resume()
    try:
        while position.step < run.total_steps:
            position = _next_position(run, position)
            step = position.step
            lr = learning_rate(config.optim, step, run.total_steps)
            set_learning_rate(run.optimizer, lr)
            micro_batches, wait_s = loader.next()
            profiler.before_step(step)
            result = train_step(run.model, run.optimizer, micro_batches, config.train.grad_clip, run.data_parallel)
            run.metrics.step_done(wait_s)
            if step == start.step + 1:
                _after_first_step(run)
            for news in run.recompiles.news():
                run.screen.line(f"warning: step {step} {news}")
            run.screen.step_done(step)
            if (trace := profiler.after_step(step)) is not None:
                run.screen.line(f"profile: {trace}")

            stopping = run.stop.agreed()
            ended = step == run.total_steps
            evaluating = _due(step, config.train.eval_every, ended)
            reporting = _due(step, config.metrics.every, ended) or evaluating
            saving = _due(step, config.checkpoint.every, ended or stopping)
            if reporting or saving:
                run.metrics.pause()
                if reporting:
                    held_out_loss = _evaluate(run) if evaluating else None
                    run.screen.report(run.metrics.log(step, result, lr, held_out_loss))
                    on_progress(position)
                if saving:
                    _save(run, position)
                    on_progress(position)
                run.metrics.resume()
            if stopping:
                break
    finally:
        profiler.close()
        loader.close()
    return position


def _after_first_step(run: Run) -> None:
    """Everything is compiled now: say where from, give back what it took, and listen for what should not come."""
    if told := describe_cache():
        run.screen.line(told)
    return_free_memory()
    run.recompiles.arm()


def _due(step: int, every: int, last: bool) -> bool:
    return every > 0 and (last or step % every == 0)


def _next_position(run: Run, position: Position) -> Position:
    samples = position.samples + run.shape.global_batch_size
    return Position(position.step + 1, samples, run.config.run.seed, run.shape.seq_len, dist.get_world_size())


def _evaluate(run: Run) -> float:
    batches = held_out_batches(run.tokens.held_out, run.shape, run.config.train.eval_sequences, run.device)
    return evaluate(run.model, batches, run.data_parallel).item()


def _save(run: Run, position: Position) -> None:
    path = save_checkpoint(run.folder / "checkpoints", run.model, run.optimizer, position,
                           config_to_yaml(run.config), run.config.checkpoint.keep)  # fmt: skip
    run.screen.line(f"saved {path}")
