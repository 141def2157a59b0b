"""The training loop: batch, step, report, evaluate, save, stop."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from meshwright.parallel.compile.async_tp import describe_async_tp
from meshwright.parallel.compile.stats import RecompileGuard, describe_compiling
from meshwright.parallel.plan.schema import Plan
from meshwright.train.checkpoint.manifest import TrainPosition
from meshwright.train.checkpoint.save import CheckpointSaver
from meshwright.train.config import Config
from meshwright.train.console import Console
from meshwright.train.data.corpus import Corpus
from meshwright.train.data.loader import BatchShape, StepData, TrainLoader
from meshwright.train.data.sample_order import SampleOrder, data_progress
from meshwright.train.data.sequences import SequenceShape
from meshwright.train.errors import PeerLostError, SaveError
from meshwright.train.evaluation import Score, score_sets
from meshwright.train.fault_tolerance.nonfinite import NonFiniteGuard
from meshwright.train.fault_tolerance.shutdown import INTACT, GracefulShutdown
from meshwright.train.fault_tolerance.watchdog import Watchdog
from meshwright.train.memory import GarbageCollector, return_free_memory
from meshwright.train.metrics.collector import Metrics
from meshwright.train.optim.optimizer import learning_rate, set_learning_rate
from meshwright.train.profiling import KernelCheck, ProfiledRun, StepProfiler
from meshwright.train.step import StepResult, train_step


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
    order: SampleOrder
    shape: BatchShape
    data_parallel: dist.ProcessGroup
    metrics: Metrics
    saver: CheckpointSaver
    console: Console
    shutdown: GracefulShutdown
    watchdog: Watchdog
    recompiles: RecompileGuard
    finite: NonFiniteGuard
    total_steps: int
    plan: Plan


def train_loop(run: Run, start: TrainPosition, on_progress: Callable[[int], None]) -> TrainPosition:
    """Train from `start` to the last step, or until a stop is agreed; returns how far it got.

    `on_progress` hears of the step after every report and every committed checkpoint. Raises SaveError if a
    checkpoint could not be saved, NonFiniteError, and PeerLostError.
    """
    config, position, stopping = run.config, start, False
    loader = TrainLoader(run.order, run.sequences, run.shape, start.samples, run.device, config.data.prefetch)
    profiled = ProfiledRun(run.model, run.plan, run.device, range(start.step + 1, run.total_steps + 1))
    profiler = StepProfiler(config.profile, run.folder / "profile", profiled, run.console.print)
    garbage, watching = GarbageCollector(config.train.gc_every_steps), _watch_kernels(run)
    run.shutdown.begin()
    if config.train.eval_every and start.step == 0:
        run.console.report(run.metrics.log_eval(0, _evaluate(run, 0)))
    run.metrics.resume()
    try:
        while position.step < run.total_steps and not stopping:
            now = _next_position(run, position)
            ended = (step := now.step) == run.total_steps
            evaluating = _due(step, config.train.eval_every, ended)
            run.metrics.before_step(reporting := _due(step, config.metrics.every, ended) or evaluating)
            run.watchdog.enter("first step" if position is start else "step", step)
            set_learning_rate(run.optimizer, lr := learning_rate(config.optim, step, run.total_steps))
            profiler.before_step(step)
            data = loader.next()
            with watching():
                result = _step(run, data)
            run.metrics.step_done(data.wait_s)
            garbage.step_done(step)
            if position is start:
                _after_first_step(run)
            run.console.print_lines(f"warning: step {step} {news}" for news in run.recompiles.news())
            run.console.print_lines(run.finite.step_done(step, position.samples, data, result))
            position = now
            run.console.step_done(step)
            if (trace := profiler.after_step(step)) is not None:
                run.console.print(f"profile: {trace}; python -m tools.trace {run.folder}")

            _hear_saver(run, step, on_progress)
            stopping = _stop_agreed(run)
            saving = _due(step, config.checkpoint.every, ended or stopping)
            if reporting or saving:
                run.metrics.pause()
                if reporting:
                    scores = _evaluate(run, step) if evaluating else None
                    run.console.report(run.metrics.log(step, result, lr, _used(run, position, data), scores))
                    run.metrics.later(partial(on_progress, step))
                if saving:
                    _save(run, position, on_progress)
                run.metrics.resume()
        run.console.print_lines(run.finite.finish())
    finally:
        garbage.close()
        _end_saving(run, position.step, on_progress)
        profiler.close()
        loader.close()
    if run.saver.failed and config.checkpoint.on_error == "stop":
        raise SaveError(run.saver.failed)
    return position


def _step(run: Run, data: StepData) -> StepResult:
    clip = run.config.train.grad_clip
    return train_step(run.model, run.optimizer, data.micro_batches, clip, run.data_parallel)


def _save(run: Run, position: TrainPosition, on_progress: Callable[[int], None]) -> None:
    """Start to save, when the steps before are known to be finite, and all their rows are on disk."""
    run.watchdog.enter("checkpoint", position.step)
    run.console.print_lines(run.finite.finish())
    run.metrics.flush()
    run.saver.save(position)
    _hear_saver(run, position.step, on_progress)


def _watch_kernels(run: Run) -> Callable[[], AbstractContextManager[None]]:
    """What stands around every step: on rank 0 of GPUs, which choose among kernels behind a name, a look at
    what they ran."""
    if run.device.type != "cuda" or dist.get_rank() or run.config.profile.start:
        return nullcontext
    return KernelCheck(run.plan.attention, run.device, run.console.print).watching


def _stop_agreed(run: Run) -> bool:
    """Whether all ranks stop after this step. Raises SaveError where it is because a checkpoint could not be
    saved."""
    stopping = run.shutdown.should_stop()
    if stopping and run.shutdown.failed:
        raise SaveError(run.shutdown.reason or "")
    return stopping


def _end_saving(run: Run, step: int, on_progress: Callable[[int], None]) -> None:
    """Wait for a save under way, whatever ends the run: what has been copied is not lost."""
    run.watchdog.enter("checkpoint", step)
    run.saver.wait()
    _hear_saver(run, step, on_progress)


def _after_first_step(run: Run) -> None:
    """Everything is compiled now: say where from, give back what it took, and listen for what should not
    come."""
    if told := describe_compiling():
        run.console.print(told)
    if run.plan.async_tp:
        run.console.print(describe_async_tp(run.plan))
    return_free_memory()
    run.recompiles.arm()


def _due(step: int, every: int, last: bool) -> bool:
    return every > 0 and (last or step % every == 0)


def _next_position(run: Run, position: TrainPosition) -> TrainPosition:
    samples = position.samples + run.shape.global_batch_size
    seed, seq_len = run.config.run.seed, run.sequences.seq_len
    return TrainPosition(
        position.step + 1, samples, seed, seq_len, dist.get_world_size(), run.corpus.fingerprint
    )


def _evaluate(run: Run, step: int) -> dict[str, Score]:
    run.watchdog.enter("evaluation", step)
    sets = {**run.corpus.held_out, **run.corpus.validation}
    return score_sets(
        run.model,
        sets,
        run.sequences,
        run.shape,
        run.config.train.eval_sequences,
        run.device,
        run.data_parallel,
    )


def _used(run: Run, position: TrainPosition, data: StepData) -> dict[str, Any]:
    """What a row says of the data, and of the steps that were skipped."""
    skipped = {"skipped_steps": run.finite.skipped} if run.finite.skipped else {}
    return {
        **data_progress(run.order, position.samples),
        "data_hash": _hash_of_all(data.data_hash, run),
        **skipped,
    }


def _hash_of_all(data_hash: int, run: Run) -> str:
    """The hash of a step's sequences and their positions, over all ranks: the same on every mesh."""
    total = torch.tensor(data_hash, device=run.device)
    dist.all_reduce(total, group=run.data_parallel)
    return f"{total.item():016x}"


def _hear_saver(run: Run, step: int, on_progress: Callable[[int], None]) -> None:
    """Say what has become of saves; one that failed asks for the end of the run, unless `checkpoint.on_error`
    is warn.

    Raises PeerLostError where one was cut off: this rank must end for the others to notice, which may wait
    for it.
    """
    news = run.saver.poll()
    if run.saver.cut_off:
        raise PeerLostError(f"{run.saver.cut_off}; {INTACT}, and the same command goes on from there")
    for saved in news:
        if not saved.error:
            run.console.print(
                f"saved {saved.path} (stood still {saved.stall_s:.2f} s, committed after "
                f"{saved.total_s:.2f} s)"
            )
            run.metrics.later(partial(on_progress, step))
        elif run.config.checkpoint.on_error == "warn":
            run.console.print(f"warning: not saved: {saved.error}")
        else:
            run.shutdown.request(saved.error, failed=True)
