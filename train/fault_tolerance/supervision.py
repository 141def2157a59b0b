"""Supervision of a run from its start, before other ranks or a folder exist: the watchdog, the agreed stop,
and status.json."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from meshwright.parallel.errors import one_line
from meshwright.train.config import RunConfig
from meshwright.train.console import Console
from meshwright.train.distributed.ranks import RankInfo
from meshwright.train.errors import PeerLostError
from meshwright.train.fault_tolerance.peers import as_peer_lost_error, explain_loss
from meshwright.train.fault_tolerance.run_folder import RunStatus, take_folder
from meshwright.train.fault_tolerance.shutdown import GracefulShutdown
from meshwright.train.fault_tolerance.watchdog import Watchdog

NAMED_S = 1.0  # from a failed collective until the connections report which rank has ended
UNNAMED = "a collective has failed, because a process of this run has died or is not reached"
REASON_SHOWN = 1000  # characters of an error that is reported to the other ranks


@dataclass(frozen=True)
class Supervision:
    """What supervises this rank of a run."""

    watchdog: Watchdog
    stop: GracefulShutdown
    status: RunStatus
    ranks: RankInfo
    console: Console

    def connect(self) -> None:
        """Connect the watchdog and the agreed stop to the other ranks, once the process group exists."""
        self.watchdog.connect()
        self.stop.connect()

    @contextmanager
    def in_folder(self, folder: Path) -> Iterator[None]:
        """Within this context no other run uses the folder, and once status.json is this run's it records how
        the run ends. Raises LockError."""
        with take_folder(folder, self.ranks, self.console) as forget_lock, self.status.recording(forget_lock):
            self.watchdog.report_to(folder)
            with self._naming_lost_peer():
                yield

    def report_failure(self, error: BaseException) -> None:
        """Report to the other ranks that this one exits with an error, unless that is the end of a rank that
        has been reported. Without a report this rank would count as killed."""
        if not as_peer_lost_error(error):
            self.stop.report_failure(one_line(f"{type(error).__name__}: {error}", REASON_SHOWN))
        elif not self.stop.lost_peer(0):
            self.stop.report_failure(UNNAMED)

    @contextmanager
    def _naming_lost_peer(self) -> Iterator[None]:
        """Within this context the error of a collective after another rank has ended becomes a PeerLostError
        that names the rank, and status.json records it."""
        try:
            yield
        except RuntimeError as error:
            if not as_peer_lost_error(error) or not (lost := self.stop.lost_peer(NAMED_S)):
                raise
            self.status.record_loss(lost)
            raise PeerLostError(explain_loss(lost.text)) from error


@contextmanager
def supervised(config: RunConfig, ranks: RankInfo, console: Console) -> Iterator[Supervision]:
    """Supervise a run within this context, at whose end the process group is destroyed, unless there was an
    error."""
    status = RunStatus(ranks, console)
    watchdog = Watchdog(config.timeouts, ranks, lambda why: status.write("failed", why, for_all=True))
    stop = GracefulShutdown(config, status.end_at_once, status.record_loss)
    supervision = Supervision(watchdog, stop, status, ranks, console)
    try:
        yield supervision
    except BaseException as error:
        supervision.report_failure(error)
        raise
    finally:
        watchdog.end()
    stop.end()
    dist.destroy_process_group()
