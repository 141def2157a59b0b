"""One run of a sweep from its start to its end, watched, and asked to save and stop when the sweep is."""

import contextlib
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType

from meshwright.parallel.errors import PlanError
from meshwright.tools.bench.processes import alive, children, start_times
from meshwright.tools.sweep.attempt import (
    OUTPUT,
    Attempt,
    has_last_word,
    judge,
    now_s,
    output_since,
    write_attempt,
)
from meshwright.tools.sweep.commands import run_command, run_environment
from meshwright.tools.sweep.planned import Planned, predict_here
from meshwright.train.errors import ConfigError, LockError
from meshwright.train.fault_tolerance.run_lock import lock_folder

POLL_S = 0.2
LAST_S = 10.0  # that workers may take to end when their launcher has; then they are killed
# a run's own, in train/fault_tolerance/run_lock.py: a sweep's runs have their folders
TAKEN_ADVICE = ": end that run, or use another run.dir"
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """How often this process was asked to end. The first asks the run to save and stop, the second ends it at
    once."""

    def __init__(self) -> None:
        self.count = 0

    def hear(self, number: int, frame: FrameType | None) -> None:
        """A signal handler."""
        self.count += 1


@contextmanager
def hear_interrupts() -> Iterator[Interrupts]:
    """Signals are counted and not obeyed, until the block ends; what nohup has set to be ignored stays so. In
    the main thread only."""
    interrupts = Interrupts()
    wanted = [
        number for number in SIGNALS if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN
    ]
    before = {number: signal.signal(number, interrupts.hear) for number in wanted}
    try:
        yield interrupts
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_once(planned: Planned, interrupts: Interrupts, watch: Callable[[], None]) -> Attempt:
    """Start the run, or go on with it, and wait for its end; how that was stands in its folder too. `watch`
    is called again and again.

    Raises LockError where the run is still going, as after a sweep that was killed; ConfigError for a folder
    that cannot be used.
    """
    folder = planned.folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        output = (folder / OUTPUT).open("ab")
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be used ({error.strerror}): take another --folder") from None
    with output:
        _refuse_taken(planned)
        cell = planned.cell
        attempt = Attempt(
            "running",
            cell.processes,
            cell.nodes,
            planned.arguments,
            began_s=now_s(),
            predicted=_predict(planned),
        )
        began_s = write_attempt(folder, attempt)
        command = run_command(planned)
        output.write(f"+ {shlex.join(command)}\n".encode())
        output.flush()
        offset = output.tell()
        process = subprocess.Popen(
            command,
            env=run_environment(planned),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        _wait(process, interrupts, watch)
    state, reason = judge(folder, process.returncode, began_s, output_since(folder, offset))
    if interrupts.count and not has_last_word(folder, began_s):
        state, reason = "stopped", "interrupted before it could save"
    attempt = replace(attempt, state=state, reason=reason, exit_code=process.returncode)
    write_attempt(folder, attempt)
    return attempt


def _refuse_taken(planned: Planned) -> None:
    """LockError, with the process to end, where the run still trains."""
    try:
        lock_folder(planned.folder).release()
    except LockError as error:
        taken = str(error).removesuffix(TAKEN_ADVICE)
        raise LockError(
            f"{planned.cell.name} still trains, as after a sweep that was killed: {taken}. Wait for its end, "
            f"or kill that "
            "process (SIGTERM: it saves, and all of the run stops); then the same command goes on"
        ) from None


def _predict(planned: Planned) -> dict[str, float]:
    """{} also where the planner cannot say: then the run will, or will do without."""
    try:
        return predict_here(planned)
    except (PlanError, ConfigError):
        return {}


def _wait(process: "subprocess.Popen[bytes]", interrupts: Interrupts, watch: Callable[[], None]) -> None:
    """Until the run has ended. Whatever ends this early, or the launcher alone, leaves nothing of it
    behind."""
    # with their start times: hours later a number may be another program's
    told, workers = 0, dict[int, int]()
    try:
        while process.poll() is None:
            workers |= start_times(children(process.pid))
            if interrupts.count > told:
                _ask_to_end(process, first=told == 0)
                told = interrupts.count
            watch()
            time.sleep(POLL_S)
        deadline_s = time.monotonic() + LAST_S
        while alive(workers) and time.monotonic() < deadline_s:
            time.sleep(POLL_S)
    finally:
        _kill([*alive(workers), *([] if process.poll() is not None else [process.pid])])
        process.wait()


def _ask_to_end(process: "subprocess.Popen[bytes]", first: bool) -> None:
    """torchrun passes the first signal on; the second goes to the workers themselves, for torchrun would
    leave them behind."""
    pids = [process.pid] if first else children(process.pid) or [process.pid]
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)


def _kill(pids: Iterable[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
