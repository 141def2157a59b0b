"""Start one run of a sweep and wait for its end. Interrupting the sweep makes the run save and stop."""

import contextlib
import shlex
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from meshwright.tools.plan.export import write_atomically
from meshwright.tools.processes import end, find_reason, own_environment, python_command, started
from meshwright.tools.sweep.spec import SweepRun
from meshwright.train.errors import ConfigError
from meshwright.train.fault_tolerance.run_folder import Status, lock_folder, read_status, write_status

OUTPUT = "output.txt"  # what the last start of a run printed
REASON_LETTERS = 600
SIGNALS = (signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Until the block ends, SIGTERM and SIGHUP raise KeyboardInterrupt, as Ctrl-C does. A signal that is
    ignored, as SIGHUP under nohup, stays so. Main thread only."""
    caught = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    previous = {number: signal.signal(number, signal.default_int_handler) for number in caught}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def make_folder(folder: Path) -> None:
    """Create a folder. Raises ConfigError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be used ({error.strerror}): use another --folder") from None


def run_command(run: SweepRun) -> list[str]:
    """Return the command of a run on this machine: through torchrun, unless it has one process."""
    return [*python_command("meshwright.train.main", run.processes), *run.arguments]


def run_once(run: SweepRun) -> None:
    """Start the run, which resumes from its checkpoint if it has one, and wait until its status.json tells
    how it ended. On an interrupt it saves and stops, on a second one it is killed; then the interrupt is
    raised.

    Raises LockError, with the process to end, if the run is still training, such as after a sweep was killed;
    ConfigError if the folder cannot be used.
    """
    make_folder(run.folder)
    lock_folder(run.folder).release()
    before, command = read_status(run.folder), run_command(run)
    write_atomically(run.folder / OUTPUT, f"+ {shlex.join(command)}\n".encode())
    # torchrun (torch 2.13 or later) gives the workers this long to save, instead of 30 s
    grace = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(round(run.config.run.grace_s))}
    with started(command, {**grace, **own_environment()}, run.folder / OUTPUT, "ab") as process:
        stopped = False
        try:
            process.wait()
        except KeyboardInterrupt:
            process.terminate()  # torchrun passes it on
            process.wait()
            stopped = True
            raise
        finally:
            if process.poll() is None:
                end(process)
            if not (stopped and read_status(run.folder) == before):  # before its first step: it waits again
                _record_failure(run.folder, before, process.returncode)


def _record_failure(folder: Path, before: Status | None, exit_code: int) -> None:
    """Record a run that has ended as failed if it has not recorded its end, because it was killed or failed
    before its first step. `before`: its status before it was started."""
    status = read_status(folder)
    possible = ("stopped", "failed") if exit_code else ("stopped", "finished")
    if status is not None and status.state in possible and (status != before or exit_code == 0):
        return
    printed = (folder / OUTPUT).read_text(encoding="utf-8", errors="replace").partition("\n")[2]
    reason = f"{find_reason(printed, REASON_LETTERS) or 'no output'} (exit code {exit_code})"
    write_status(folder, replace(status or Status("failed"), state="failed", reason=reason), saved=True)
