"""The training loop: batch, step, report, evaluate, save, stop."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

from torch import nn

from meshwright.train.checkpoint.manifest import TrainPosition
from meshwright.train.checkpoint.save import CheckpointSaver
from meshwright.train.config import CheckpointConfig, Config
from meshwright.train.data.training_data import TrainingData
from meshwright.train.errors import COMMITS_INTACT, PeerLostError, SaveError
from meshwright.train.evaluation import Score, score_sets
from meshwright.train.fault_tolerance.supervision import Supervision
from meshwright.train.metrics.reporting import Reporting
from meshwright.train.model.trained_model import LossOf
from meshwright.train.optim.optimizer import learning_rate, set_learning_rate
from meshwright.train.state import TrainState
from meshwright.train.step import train_step


def train_loop(
    config: Config,
    loss_of: LossOf,
    state: TrainState,
    data: TrainingData,
    saver: CheckpointSaver,
    supervision: Supervision,
    reporting: Reporting,
) -> tuple[TrainPosition, Path | None]:
    """Train from `state.position` to the last step, or until the ranks agree to stop; return the position and
    the last checkpoint that was committed, if any.

    Raises SaveError if a checkpoint could not be saved, NonFiniteError, PeerLostError, RecompileError, and
    DataError.
    """

    optimizer, position, stopping = state.optimizer, state.position, False
    saves = Saves(saver, config.checkpoint, supervision, reporting, data)
    evaluate = partial(
        _evaluate, config.train.eval_sequences, state.sharded.model, loss_of, data, supervision
    )
    with closing(data.load_from(position, config.data.prefetch)) as loader, saves.finished_at_exit():
        if config.train.eval_every and position.step == 0:
            stopping = not (scores := evaluate(0))
            reporting.report_evaluation(0, scores)
        reporting.start_clock()
        while position.step < data.total_steps and not stopping:
            step, last = position.step + 1, position.step + 1 == data.total_steps
            evaluating = _due(config.train.eval_every, step, last)
            reported = _due(config.metrics.every, step, last) or evaluating

            supervision.before_step(step)
            reporting.before_step(step, reported)
            batch, lr = loader.next(), learning_rate(config.optim, step, *data.schedule)
            set_learning_rate(optimizer, lr)
            grad_clip = config.train.grad_clip
            result = train_step(state.sharded, optimizer, batch.micro_batches, grad_clip, loss_of)
            supervision.after_step(step, position.samples, batch, result)
            reporting.after_step(step, batch, result)
            position = data.advance(position)

            saves.poll(step)
            stopping, scores = supervision.should_stop(), {}
            with reporting.paused(reported or saves.due(step, last or stopping)):
                if evaluating and not stopping:
                    saves.save_if_due(position, last)  # an evaluation must not cost what has been trained
                    scores = evaluate(step)
                    stopping = not scores
                if reported:
                    about = data.describe_step(position, batch) | supervision.skipped_steps
                    reporting.report(step, result, lr, about, scores)
                saves.save_if_due(position, last or stopping)
        supervision.finish_steps()
    return position, saves.last_checkpoint()


def _evaluate(
    limit: int, model: nn.Module, loss_of: LossOf, data: TrainingData, supervision: Supervision, step: int
) -> dict[str, Score]:
    """Return the scores, none if the ranks agree to stop before the end. `limit`: as in `score_sets`."""
    supervision.enter("evaluation", step)
    sets, ranks = (data.evaluated, data.sequences, data.batch), (data.device, data.group)
    return score_sets(model, *sets, limit, *ranks, loss_of, supervision.should_stop)


def _due(every: int, step: int, last: bool) -> bool:
    return every > 0 and (last or step % every == 0)


class Saves:
    """Starts the saves of a run and reports their results; a failed save may end the run."""

    def __init__(
        self,
        saver: CheckpointSaver,
        config: CheckpointConfig,
        supervision: Supervision,
        reporting: Reporting,
        data: TrainingData,
    ) -> None:
        self._saver, self._config, self._data = saver, config, data
        self._supervision, self._reporting = supervision, reporting
        self._step = self._saved_step = data.start.step
        self._committed: Path | None = None  # the last checkpoint
        supervision.save_before_failing(self._save_good)

    def due(self, step: int, last: bool) -> bool:
        """Whether to save after this step, which may be the last one of this process."""
        every = self._config.every
        return step > self._saved_step and every != 0 and (last or (every > 0 and step % every == 0))

    def save_if_due(self, position: TrainPosition, last: bool) -> None:
        """Start a save if that is due after the position's step, after checking that all steps so far were
        finite and flushing their rows to disk."""
        if not self.due(position.step, last):
            return
        self._supervision.enter("checkpoint", position.step)
        self._supervision.finish_steps()
        self._saved_step = position.step
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
                self._committed = save.path
                self._reporting.print(
                    f"saved {save.path} (training waited {save.stall_s:.2f} s, committed after "
                    f"{save.total_s:.2f} s)"
                )
                self._reporting.progress(step)
                continue
            self._reporting.print(f"warning: not saved: {save.error}")
            if self._config.on_error == "stop":
                self._supervision.request_stop(save.error)

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

    def last_checkpoint(self) -> Path | None:
        """Return the last checkpoint, if any. Raises SaveError if the last save failed: whatever
        `checkpoint.on_error`, such a run is neither finished nor stopped as requested."""
        if self._saver.failed:
            raise SaveError(self._saver.failed)
        return self._committed

    def _save_good(self, step: int) -> None:
        """Save the state after `step`, the last one that was not skipped."""
        self.save_if_due(self._data.advance(self._data.start, step - self._data.start.step), last=True)
