"""The checkpoints of a run: when to save, and what a failed save means."""

from collections.abc import Callable, Mapping
from pathlib import Path

from torch import Tensor

from meshwright.parallel.machine_memory import free_host_bytes
from meshwright.train.checkpoint.manifest import TrainPosition
from meshwright.train.checkpoint.save import CheckpointSaver
from meshwright.train.distributed.process_group import group_timeout
from meshwright.train.errors import COMMITS_INTACT, PeerLostError, SaveError
from meshwright.train.fault_tolerance.nonfinite import NonFiniteGuard
from meshwright.train.fault_tolerance.supervision import Supervision
from meshwright.train.hooks import Hook, StepDone, is_due
from meshwright.train.metrics.collector import StepClock
from meshwright.train.metrics.writer import RowWriter
from meshwright.train.run import Run


def open_saver(
    run: Run, files: Mapping[str, str | bytes], state: Callable[[], Mapping[str, Tensor]]
) -> CheckpointSaver:
    """Return what saves a run, after trying whether it can. `files`: that each checkpoint contains; `state`:
    returns that of hooks."""
    training, timeout = run.training, group_timeout(run.config.run)
    parts = training.sharded.model, training.optimizer, training.sharded.mesh, files
    saver = CheckpointSaver(
        run.config.checkpoint,
        run.folder / "checkpoints",
        *parts,
        host_bytes=lambda: free_host_bytes() // run.ranks.local_world_size,
        group_timeout=timeout,
        hooks=state,
    )
    saver.make_room(run.data.start.step, run.console.print)
    return saver


class Checkpoints(Hook):
    """Starts the saves of a run and reports their results; a failed save may end the run."""

    def __init__(
        self,
        saver: CheckpointSaver,
        run: Run,
        supervision: Supervision,
        nonfinite: NonFiniteGuard,
        rows: RowWriter,
        clock: StepClock,
    ) -> None:
        self._saver, self._config, self._print = saver, run.config.checkpoint, run.console.print
        self._stop, self._watchdog, self._nonfinite = supervision.stop, supervision.watchdog, nonfinite
        self._rows, self._clock, self._data = rows, clock, run.data
        self._step = self._saved_step = run.data.start.step
        self._committed: Path | None = None

    @property
    def last(self) -> Path | None:
        """The last checkpoint, if any. Raises SaveError if the last save failed: whatever
        `checkpoint.on_error`, such a run is neither finished nor stopped as requested."""
        if self._saver.failed:
            raise SaveError(self._saver.failed)
        return self._committed

    def before_optimizer(self, step: int) -> None:
        self._poll(self._step)  # before the ranks agree on a stop: a save that has failed asks for one

    def after_step(self, done: StepDone) -> None:
        self._step = done.step
        if ends := done.last or self._stop.agreed:
            self._nonfinite.finish()
        self.save_if_due(done.position, ends)

    def save_if_due(self, position: TrainPosition, last: bool) -> None:
        """Start a save if that is due after the position's step, which may be the `last` of this process,
        after checking that all steps so far were finite and flushing their rows to disk."""
        every, step = self._config.every, position.step
        if step <= self._saved_step or not every or not (last or is_due(every, step, last=False)):
            return  # -1: only the last
        with self._clock.paused():
            self._watchdog.enter("checkpoint", step)
            self._nonfinite.finish()
            self._saved_step = step
            self._rows.flush()
            self._saver.save(self._data.complete(position))
            self._poll(step)

    def close(self) -> None:
        """Wait for a save in progress, also after an error: a state that has been copied is written."""
        self._watchdog.enter("checkpoint", self._step)
        self._saver.wait()
        self._poll(self._step)

    def _poll(self, step: int) -> None:
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
                self._print(
                    f"saved {save.path} (training waited {save.stall_s:.2f} s, committed after "
                    f"{save.total_s:.2f} s)"
                )
                self._rows.progress(step)
                continue
            self._print(f"warning: not saved: {save.error}")
            if self._config.on_error == "stop":
                self._stop.request(save.error, failed=True)
