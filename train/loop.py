"""The training loop: batch, step, report, evaluate, save, stop."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Literal

from meshwright.parallel.plan.schema import Plan
from meshwright.train.checkpoint.manifest import TrainPosition
from meshwright.train.checkpoint.save import CheckpointSaver
from meshwright.train.config import Config
from meshwright.train.data.training_data import TrainingData
from meshwright.train.errors import COMMITS_INTACT, PeerLostError, SaveError
from meshwright.train.evaluation import Score, score_sets
from meshwright.train.fault_tolerance.supervision import Supervision
from meshwright.train.metrics.reporting import Reporting
from meshwright.train.model.source import LossOf
from meshwright.train.optim.optimizer import learning_rate, set_learning_rate
from meshwright.train.state import TrainState
from meshwright.train.step import train_step


def train_loop(
    config: Config,
    plan: Plan,
    loss_of: LossOf,
    state: TrainState,
    data: TrainingData,
    saver: CheckpointSaver,
    supervision: Supervision,
    reporting: Reporting,
) -> TrainPosition:
    """Train from `state.position` to the last step, or until the ranks agree to stop; return the position.

    Raises SaveError if a checkpoint could not be saved, NonFiniteError, PeerLostError, RecompileError, and
    DataError.
    """

    def evaluate(step: int) -> dict[str, Score]:
        supervision.enter("evaluation", step)
        sets = data.evaluated, data.sequences, data.batch
        return score_sets(model, *sets, config.train.eval_sequences, data.device, data.group, loss_of)

    model, optimizer, position, stopping = state.model, state.optimizer, state.position, False
    saves = Saves(saver, config.checkpoint.on_error, supervision, reporting, position.step)
    with (
        closing(data.load_from(position, config.data.prefetch)) as loader,
        reporting.profiling(),
        saves.finished_at_exit(),
    ):
        if config.train.eval_every and position.step == 0:
            reporting.report_evaluation(0, evaluate(0))
        reporting.start_clock()
        while position.step < data.total_steps and not stopping:
            step, last = position.step + 1, position.step + 1 == data.total_steps
            evaluating = _due(config.train.eval_every, step, last)
            reported = _due(config.metrics.every, step, last) or evaluating

            supervision.before_step(step)
            reporting.before_step(step, reported)
            batch, lr = loader.next(), learning_rate(config.optim, step, data.total_steps)
            set_learning_rate(optimizer, lr)
            result = train_step(
                model, plan.units, optimizer, batch.micro_batches, config.train.grad_clip, data.group, loss_of
            )
            supervision.after_step(step, position.samples, batch, result)
            reporting.after_step(step, batch)
            position = data.advance(position)

            saves.poll(step)
            stopping = supervision.should_stop()
            saving = _due(config.checkpoint.every, step, last or stopping)
            with reporting.paused(reported or saving):
                if reported:
                    scores = evaluate(step) if evaluating else {}
                    about = data.describe_step(position, batch) | supervision.skipped_steps
                    reporting.report(step, result, lr, about, scores)
                if saving:
                    saves.save(position)
        supervision.finish_steps()
    saves.raise_failure()
    return position


def _due(every: int, step: int, last: bool) -> bool:
    return every > 0 and (last or step % every == 0)


class Saves:
    """Starts the saves of a run and reports their results; a failed save may end the run."""

    def __init__(
        self,
        saver: CheckpointSaver,
        on_error: Literal["stop", "warn"],
        supervision: Supervision,
        reporting: Reporting,
        step: int,
    ) -> None:
        """`step`: the last finished step."""
        self._saver, self._stops = saver, on_error == "stop"
        self._supervision, self._reporting = supervision, reporting
        self._step = step

    def save(self, position: TrainPosition) -> None:
        """Start a save, after checking that all steps so far were finite and flushing their rows to disk."""
        self._supervision.enter("checkpoint", position.step)
        self._supervision.finish_steps()
        self._reporting.flush()
        self._saver.save(position)
        self.poll(position.step)

    def poll(self, step: int) -> None:
        """Report the saves that have finished. A failed save requests a stop of the run, unless
        `checkpoint.on_error` is warn.

        Raises PeerLostError if a save lost contact with the other ranks: they may be waiting for this rank,
        and only its exit ends their wait.
        """
        self._step, finished = step, self._saver.poll()
        if self._saver.cut_off:
            raise PeerLostError(
                f"{self._saver.cut_off}; {COMMITS_INTACT}, and the same command resumes from there"
            )
        for save in finished:
            if not save.error:
                self._reporting.print(
                    f"saved {save.path} (training waited {save.stall_s:.2f} s, committed after "
                    f"{save.total_s:.2f} s)"
                )
                self._reporting.progress(step)
            elif self._stops:
                self._supervision.request_stop(save.error)
            else:
                self._reporting.print(f"warning: not saved: {save.error}")

    @contextmanager
    def finished_at_exit(self) -> Iterator[None]:
        """Context that waits at its end for a save in progress, also after an error: a state that has been
        copied is written."""
        try:
            yield
        finally:
            self._supervision.enter("checkpoint", self._step)
            self._saver.wait()
            self.poll(self._step)

    def raise_failure(self) -> None:
        """Raise SaveError if the last save failed and `checkpoint.on_error` is stop."""
        if self._saver.failed and self._stops:
            raise SaveError(self._saver.failed)
