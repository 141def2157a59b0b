"""Supervision of a run: the watchdog, the agreed stop and status.json; during training also garbage
collection, recompiles and values that are not finite."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from meshwright.parallel.compile.async_tp import describe_async_tp
from meshwright.parallel.compile.stats import RecompileGuard, describe_compiling
from meshwright.parallel.errors import one_line
from meshwright.parallel.plan.schema import Plan
from meshwright.parallel.sharded_model import ShardedModel
from meshwright.train.checkpoint.load import Start
from meshwright.train.checkpoint.ownership import Admission
from meshwright.train.config import RunConfig, TrainConfig
from meshwright.train.console import Console
from meshwright.train.data.loader import StepData
from meshwright.train.data.training_data import TrainingData
from meshwright.train.distributed.ranks import RankInfo, broadcast_from_rank0
from meshwright.train.errors import PeerLostError, SaveError
from meshwright.train.fault_tolerance.crash_loop import check_crash_loop
from meshwright.train.fault_tolerance.nonfinite import NonFiniteGuard
from meshwright.train.fault_tolerance.peers import as_peer_lost_error, explain_loss
from meshwright.train.fault_tolerance.run_lock import take_folder
from meshwright.train.fault_tolerance.run_status import FailedStarts, RunStatus, read_status
from meshwright.train.fault_tolerance.shutdown import GracefulShutdown
from meshwright.train.fault_tolerance.watchdog import Section, Watchdog
from meshwright.train.memory import GarbageCollector, return_free_memory
from meshwright.train.model.trained_model import LossOf
from meshwright.train.step import StepResult

NAMED_S = 1.0  # from a failed collective until the connections report which rank has ended
UNNAMED = "a collective has failed, because a process of this run has died or is not reached"
REASON_SHOWN = 1000  # characters of an error that is reported to the other ranks


class Supervision:
    """Supervises this rank of a run from the start, before other ranks or a folder exist."""

    # set by `training`, in which steps are done
    _plan: Plan
    _garbage: GarbageCollector
    _recompiles: RecompileGuard
    _nonfinite: NonFiniteGuard
    _warm = False

    def __init__(self, config: RunConfig, ranks: RankInfo, console: Console) -> None:
        self._console = console
        self._status = status = RunStatus(ranks, console)
        self._watchdog = Watchdog(
            config.timeouts,
            ranks,
            lambda why: status.write("failed", why, for_all=True),
        )
        self._forget_lock: Callable[[], None] = lambda: None
        self._shutdown = GracefulShutdown(config, self._end_at_once, status.record_loss)

    @property
    def skipped_steps(self) -> dict[str, int]:
        """The number of skipped steps, for a row of metrics; empty while there are none."""
        return {"skipped_steps": self._nonfinite.skipped} if self._nonfinite.skipped else {}

    @property
    def stop_reason(self) -> str:
        """Why the run was stopped; "" otherwise."""
        return self._shutdown.reason or ""

    def connect(self) -> None:
        """Connect the watchdog and the agreed stop to the other ranks, once the process group exists."""
        self._watchdog.connect()
        self._shutdown.connect()

    @contextmanager
    def in_folder(self, folder: Path, ranks: RankInfo) -> Iterator[None]:
        """Within this context no other run uses the folder, and after `begin` status.json records how this
        one ends. Raises LockError."""
        with take_folder(folder, ranks, self._console) as self._forget_lock, self._status.recording():
            self._watchdog.report_to(folder)
            with self._naming_lost_peer():
                yield

    def check_crash_loop(
        self, folder: Path, ranks: RankInfo, admission: Admission, start: Start
    ) -> FailedStarts:
        """Return the failed starts before this one. Raises CrashLoopError after several from `start`."""

        def check() -> FailedStarts:
            return check_crash_loop(read_status(folder), admission.restarted, ranks.requeued, start.step)

        return broadcast_from_rank0(ranks, check)

    def begin(self, folder: Path, start: Start, failed: FailedStarts) -> None:
        """From now on the folder is written. Record that the run resumes from `start`, or begins."""
        self._status.start(folder, start.step if start.checkpoint else None, failed)

    @contextmanager
    def training(
        self, config: TrainConfig, sharded: ShardedModel, data: TrainingData, loss_of: LossOf
    ) -> Iterator[None]:
        """Steps are done within this context: from now on there is something to save, and a first signal
        requests an agreed stop."""
        self._plan, self._garbage = sharded.plan, GarbageCollector(config.gc_every_steps)
        self._recompiles = RecompileGuard(sharded.plan.compile)
        self._nonfinite = NonFiniteGuard(config.max_skipped_steps, sharded, data.order, data.batch, loss_of)
        self._shutdown.begin()
        try:
            yield
        finally:
            self._garbage.close()

    def save_before_failing(self, save: Callable[[int], None]) -> None:
        """Have `save` called with the last step that was not skipped before skipped ones end the run."""
        self._nonfinite.save_good = save

    def enter(self, section: Section, step: int = 0) -> None:
        """Enter a section, which has its own timeout of the watchdog."""
        self._watchdog.enter(section, step)

    def before_step(self, step: int) -> None:
        """Call before every step, and before its data."""
        self.enter("step" if self._warm else "first step", step)

    def after_step(self, step: int, first_sample: int, data: StepData, result: StepResult) -> None:
        """Call after every step, which began at position `first_sample` of the data. Raises NonFiniteError
        and RecompileError."""
        self._garbage.step_done(step)
        if not self._warm:
            self._end_warm_up()
        self._console.print_lines(
            f"warning: step {step} {message}" for message in self._recompiles.new_messages()
        )
        self._console.print_lines(self._nonfinite.step_done(step, first_sample, data, result))

    def progress(self, step: int) -> None:
        """Record the number of steps that are done and whose rows are all written."""
        self._status.record("running", step)

    def finish_steps(self) -> None:
        """Check the steps that have not been checked: before a checkpoint, and at the end. Raises
        NonFiniteError."""
        self._console.print_lines(self._nonfinite.finish())

    def request_stop(self, reason: str) -> None:
        """Request a stop because of an error, after which nothing is saved."""
        self._shutdown.request(reason, failed=True)

    def should_stop(self) -> bool:
        """Return whether all ranks stop; every rank calls it after each step, and before each batch of an
        evaluation. Raises SaveError if the stop is because a checkpoint could not be saved, and
        PeerLostError."""
        stopping = self._shutdown.should_stop()
        if stopping and self._shutdown.failed:
            raise SaveError(self.stop_reason)
        return stopping

    def finish(self, step: int, stopped: bool) -> None:
        """Record in status.json that the run ended normally; `stopped`: before its last step."""
        self._status.record("stopped" if stopped else "finished", step, self.stop_reason if stopped else "")

    def report_failure(self, error: BaseException) -> None:
        """Report to the other ranks that this one exits with an error, unless that is the end of a rank that
        has been reported. Without a report this rank would count as killed."""
        if not as_peer_lost_error(error):
            self._shutdown.report_failure(one_line(f"{type(error).__name__}: {error}", REASON_SHOWN))
        elif not self._shutdown.lost_peer(0):
            self._shutdown.report_failure(UNNAMED)

    def close(self) -> None:
        """Stop the watchdog, after the end of the run for any reason."""
        self._watchdog.close()

    def leave(self) -> None:
        """End the agreed stop and destroy the process group, after a run without an error."""
        self._shutdown.close()
        dist.destroy_process_group()

    def _end_at_once(self, why: str) -> None:
        self._status.write("stopped", why)
        self._forget_lock()

    @contextmanager
    def _naming_lost_peer(self) -> Iterator[None]:
        """Within this context the error of a collective after another rank has ended becomes a PeerLostError
        that names the rank, and status.json records it."""
        try:
            yield
        except RuntimeError as error:
            if not as_peer_lost_error(error) or not (lost := self._shutdown.lost_peer(NAMED_S)):
                raise
            self._status.record_loss(lost)
            raise PeerLostError(explain_loss(lost.text)) from error

    def _end_warm_up(self) -> None:
        """Everything is compiled now: print the compile time and the cache hits, return the memory that
        compiling took, and watch for recompiles."""
        if message := describe_compiling():
            self._console.print(message)
        if self._plan.async_tp:
            self._console.print(describe_async_tp())
        return_free_memory()
        self._recompiles.arm()
        self._warm = True


@contextmanager
def supervised(config: RunConfig, ranks: RankInfo, console: Console) -> Iterator[Supervision]:
    """Supervise a run within this context."""
    supervision = Supervision(config, ranks, console)
    try:
        yield supervision
    except BaseException as error:
        supervision.report_failure(error)
        raise
    finally:
        supervision.close()
    supervision.leave()
