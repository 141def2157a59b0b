"""Decides when a run is evaluated, and abandons an evaluation when the run stops."""

from meshwright.train.checkpoint.hook import Checkpoints
from meshwright.train.checkpoint.manifest import TrainPosition
from meshwright.train.evaluation import score_sets
from meshwright.train.fault_tolerance.supervision import Supervision
from meshwright.train.hooks import Hook, Hooks, StepDone, is_due
from meshwright.train.metrics.collector import StepClock
from meshwright.train.run import Run


class Evaluation(Hook):
    """Evaluates a run every so many steps, the first time before training, and reports the scores to all
    `hooks`. A stop ends an evaluation, without scores."""

    def __init__(
        self,
        run: Run,
        hooks: Hooks,
        checkpoints: Checkpoints,
        supervision: Supervision,
        clock: StepClock,
    ) -> None:
        self._config, self._training, self._data = run.config.train, run.training, run.data
        self._stop, self._watchdog = supervision.stop, supervision.watchdog
        self._hooks, self._checkpoints, self._clock = hooks, checkpoints, clock

    def start(self, position: TrainPosition) -> None:
        if self._config.eval_every and position.step == 0:
            self._evaluate(0)

    def after_step(self, done: StepDone) -> None:
        if is_due(self._config.eval_every, done.step, done.last) and not self._stop.agreed:
            with self._clock.paused():
                # an evaluation must not cost what has been trained
                self._checkpoints.save_if_due(done.position, done.last)
                self._evaluate(done.step)

    def _evaluate(self, step: int) -> None:
        self._watchdog.enter("evaluation", step)
        data, training = self._data, self._training
        scores = score_sets(
            training.sharded.model,
            data.evaluation_sets,
            data.sequences,
            data.batch,
            limit=self._config.eval_sequences,
            device=data.device,
            data_parallel=data.group,
            loss_of=training.score_of,
            should_stop=self._stop.should_stop,
        )
        if scores:
            self._hooks.on_evaluation(step, scores)
