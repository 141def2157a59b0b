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
from train.data.loader import BatchShape, SampleOrder, TrainLoader
from train.data.sequences import SequenceShape
from train.data.tokens import Corpus
from train.evaluation import Score, score_sets
from train.host_memory import return_free_memory
from train.metrics import Metrics
from train.optim import learning_rate, set_learning_rate
from train.profiling import StepProfiler
from train.step import train_step
from train.stop import Stop


@dataclass(frozen=True)
class Run:
    """Everything the loop works with."""

    config: Config
    folder: Path
    device: torch.device
    model: nn.Module
    optimizer: torch.optim.Optimizer
    corpus: Corpus
    sequences: SequenceShape
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
    order = SampleOrder(run.corpus.sources, run.sequences, config.run.seed)
    loader = TrainLoader(order, run.sequences, run.shape, start.samples, run.device, config.data.prefetch)
    profiler = StepProfiler(config.profile, run.folder / "profile", dist.get_rank() == 0)
    if config.train.eval_every and start.step == 0:
        run.screen.report(run.metrics.log_eval(0, _evaluate(run)))
    run.metrics.resume()
    try:
        while position.step < run.total_steps:
            position = _next_position(run, position)
            step = position.step
            lr = learning_rate(config.optim, step, run.total_steps)
            set_learning_rate(run.optimizer, lr)
            data = loader.next()
            profiler.before_step(step)
            result = train_step(run.model, run.optimizer, data.micro_batches, config.train.grad_clip, run.data_parallel)
            run.metrics.step_done(data.wait_s)
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
                    used = {**order.progress(position.samples), "data_hash": _hash_of_all(data.data_hash, run)}
                    run.screen.report(run.metrics.log(step, result, lr, used, _evaluate(run) if evaluating else None))
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
    seed, seq_len = run.config.run.seed, run.sequences.seq_len
    return Position(position.step + 1, samples, seed, seq_len, dist.get_world_size(), run.corpus.fingerprint)


def _evaluate(run: Run) -> dict[str, Score]:
    sets = {**run.corpus.held_out, **run.corpus.validation}
    return score_sets(run.model, sets, run.sequences, run.shape, run.config.train.eval_sequences, run.device, run.data_parallel)


def _hash_of_all(data_hash: int, run: Run) -> str:
    """The hash of a step's sequences and their positions, over all ranks: the same on every mesh."""
    total = torch.tensor(data_hash, device=run.device)
    dist.all_reduce(total, group=run.data_parallel)
    return f"{total.item():016x}"


def _save(run: Run, position: Position) -> None:
    path = save_checkpoint(run.folder / "checkpoints", run.model, run.optimizer, position,
                           config_to_yaml(run.config), run.config.checkpoint.keep)  # fmt: skip
    run.screen.line(f"saved {path}")
