"""Start one run of a sweep, wait for its end and record both in attempt.json; lock the sweep's folder, which
belongs to one spec and to one process at a time. Interrupting the sweep makes the current run save and
stop."""

import json
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from meshwright.parallel.errors import one_line
from meshwright.tools.cli import to_json
from meshwright.tools.plan.export import write_atomically
from meshwright.tools.processes import (
    alive,
    children,
    find_reason,
    find_running,
    named_device,
    own_environment,
    python_command,
    send,
)
from meshwright.tools.run_reader import read_tail
from meshwright.tools.sweep.preflight import PlannedRun, predict_here
from meshwright.train.errors import ConfigError, LockError
from meshwright.train.fault_tolerance.run_lock import lock_folder
from meshwright.train.fault_tolerance.run_status import Status, read_status
from meshwright.train.files import read_json, read_note

if TYPE_CHECKING:
    import psutil

NAME, OUTPUT = "attempt.json", "output.txt"
LIMIT_BYTES = 1 << 20
TAIL_BYTES = 1 << 18  # of the output, searched for the reason of a failure
REASON_LETTERS = 600
RunState = Literal["waiting", "running", "finished", "stopped", "failed", "refused"]


@dataclass(frozen=True)
class Attempt:
    """The last start of a run.

    Args:
        state: waiting if it was never started; still running if sweep and run were killed together
        reason: why it failed, was stopped or was refused
        began_s: start, in seconds of Unix time
        predicted: step_time_s and peak_memory_gib, if they were predicted for this machine
    """

    state: RunState = "waiting"
    processes: int = 0
    nodes: int = 0
    arguments: tuple[str, ...] = ()
    reason: str = ""
    exit_code: int | None = None
    began_s: float = 0.0
    predicted: Mapping[str, float] = field(default_factory=dict)


def read_attempt(folder: Path) -> Attempt:
    """Read attempt.json of a run's folder; a waiting attempt if the file is missing or invalid."""
    return read_note(Attempt, folder / NAME, LIMIT_BYTES) or Attempt()


def write_attempt(folder: Path, attempt: Attempt) -> float:
    """Write attempt.json with an atomic rename. Returns its modification time, by the clock of the file
    system, which may be another machine's. Raises ConfigError if the folder cannot be written."""
    write_atomically(folder / NAME, (to_json(attempt) + "\n").encode())
    return (folder / NAME).stat().st_mtime


def launched_with(folder: Path) -> dict[str, int]:
    """Return processes and nodes of the run that was started in a folder; {} if none was."""
    attempt = read_attempt(folder)
    known = attempt.state not in ("waiting", "refused") and (folder / "config.yaml").is_file()
    return {"processes": attempt.processes, "nodes": attempt.nodes} if known else {}


def state_of(folder: Path) -> tuple[RunState, str]:
    """Return the state of a run and the reason: from attempt.json, or from status.json if attempt.json has no
    final state, e.g. because Slurm started the run. Plans are checked again each time, so a run that was
    refused earlier waits again."""
    attempt, status = read_attempt(folder), read_status(folder)
    if attempt.state in ("waiting", "running", "refused") and status is not None:
        return status.state, status.reason
    return ("waiting", "") if attempt.state == "refused" else (attempt.state, attempt.reason)


def outcome_of(folder: Path, exit_code: int, began_s: float, output: str) -> tuple[RunState, str]:
    """Return state and reason of a run that was started at `began_s` and has exited: from its status.json
    if it wrote a final one, otherwise from its output."""
    status = final_status(folder, began_s)
    if status and (status.state == "stopped" or (status.state == "finished" and exit_code == 0)):
        return status.state, status.reason
    if status and status.state == "failed" and status.reason:
        return "failed", one_line(status.reason, REASON_LETTERS)
    reason = find_reason(output, REASON_LETTERS) or "no output"
    return "failed", reason if exit_code else f"exited without a final state in status.json: {reason}"


def final_status(folder: Path, began_s: float) -> Status | None:
    """Return the final status that a run wrote since `began_s` (a time returned by `write_attempt`); None
    if it wrote none."""
    status = read_status(folder)
    if status is None or status.state == "running":
        return None
    written_s = (folder / "status.json").stat().st_mtime
    return status if written_s >= began_s - 1.0 else None  # some file systems store whole seconds


def output_since(folder: Path, offset: int) -> str:
    """Return the output of a run after byte `offset`; if it is long, only its end."""
    return read_tail(folder / OUTPUT, TAIL_BYTES, offset).decode("utf-8", errors="replace")


def device_of(folder: Path) -> str:
    """Return the device named in a run's output; "" if there is none."""
    return named_device(output_since(folder, 0))


SLURM_SCRIPT = "configs/launch/slurm.sh"


def run_command(planned: PlannedRun) -> list[str]:
    """Return the command of a run on this machine: through torchrun, unless it has one process."""
    return [*python_command("meshwright.train.main", planned.cell.processes), *planned.arguments]


def run_environment(planned: PlannedRun) -> dict[str, str]:
    """Return the environment of a run: this process's, without variables set by a launcher. torchrun
    (torch 2.13 or later) then gives the workers their grace period to save, instead of 30 s."""
    return {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(round(planned.config.run.grace_s)), **own_environment()}


def slurm_command(planned: PlannedRun) -> list[str]:
    """Return the sbatch command of a run."""
    cell, (config, *arguments) = planned.cell, planned.arguments
    options = [
        f"--job-name={cell.name}",
        f"--nodes={cell.nodes}",
        "--ntasks-per-node=1",
        f"--gpus-per-node={cell.processes}",
    ]
    return ["sbatch", *options, SLURM_SCRIPT, config.removeprefix("--config="), *arguments]


def refuse_nodes(planned: Sequence[PlannedRun]) -> None:
    """Raise ConfigError for runs on several nodes, which cannot be started from one."""
    if names := [run.cell.name for run in planned if run.cell.nodes > 1]:
        raise ConfigError(
            f"nodes is more than 1 for {', '.join(names[:3])}: a sweep starts processes on this machine "
            "only: use --slurm, which prints a job for each run"
        )


NOTE = "sweep.json"
NOTE_LIMIT_BYTES = 4096


@contextmanager
def locked_folder(folder: Path, name: str) -> Iterator[None]:
    """Create the folder of the spec `name`, lock it, record its owner. Raises LockError and ConfigError."""
    make_folder(folder)
    lock = lock_folder(folder)
    try:
        refuse_other_owner(folder, name)
        record_owner(folder, name)
        yield
    finally:
        lock.release()


def make_folder(folder: Path) -> None:
    """Create a folder and its parents. Raises ConfigError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be created ({error.strerror}): use another --folder") from None


def record_owner(folder: Path, name: str) -> None:
    """Record the spec's name in the folder. Raises ConfigError."""
    write_atomically(folder / NOTE, (json.dumps({"spec": name}) + "\n").encode())


def refuse_other_owner(folder: Path, name: str) -> None:
    """Raise ConfigError if the folder's record names another spec."""
    try:
        owner = read_json(folder / NOTE, NOTE_LIMIT_BYTES).get("spec", name)
    except (OSError, ValueError):
        return
    if owner != name:
        raise ConfigError(
            f"{folder} contains the runs of the sweep {one_line(owner, 80)}, not of {name}: use another "
            "--folder"
        )


POLL_S = 0.2
LAST_S = 10.0  # for workers to exit after their launcher; then they are killed
# the advice of train/fault_tolerance/run_lock.py, which does not apply: a sweep sets run.dir
TAKEN_ADVICE = ": end that run, or use another run.dir"
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def catch_interrupts() -> Iterator[list[int]]:
    """Collect the signals that request the end of this process instead of ending it, until the block ends:
    the first makes the run save and stop, the second kills it. A SIGHUP that nohup set to be ignored stays
    ignored. Main thread only."""
    received = list[int]()
    caught = [
        number for number in SIGNALS if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN
    ]
    previous = {number: signal.signal(number, lambda number, _: received.append(number)) for number in caught}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def run_once(planned: PlannedRun, interrupts: Sequence[int], watch: Callable[[], None]) -> Attempt:
    """Start or resume the run, wait for its end, and return the result, also of a failed run; it is also
    written to the run's folder. `interrupts`: signals received so far, filled by `catch_interrupts`; the
    first one makes the run save and stop, the second ends it. Calls `watch` repeatedly.

    Raises LockError if the run is still training, such as after a sweep was killed; ConfigError if the folder
    cannot be used.
    """
    folder = planned.folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        output = (folder / OUTPUT).open("ab")
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be used ({error.strerror}): use another --folder") from None
    with output:
        _refuse_running(planned)
        cell = planned.cell
        attempt = Attempt(
            "running",
            cell.processes,
            cell.nodes,
            planned.arguments,
            began_s=time.time(),
            predicted=predict_here(planned),
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
    state, reason = outcome_of(folder, process.returncode, began_s, output_since(folder, offset))
    if interrupts and not final_status(folder, began_s):
        state, reason = "stopped", "interrupted before it saved"
    attempt = replace(attempt, state=state, reason=reason, exit_code=process.returncode)
    write_attempt(folder, attempt)
    return attempt


def _refuse_running(planned: PlannedRun) -> None:
    """Raise LockError, with the process to end, if the run is still training."""
    try:
        lock_folder(planned.folder).release()
    except LockError as error:
        taken = str(error).removesuffix(TAKEN_ADVICE)
        raise LockError(
            f"{planned.cell.name} is still training, such as after a killed sweep: {taken}: wait for its end "
            "or kill that process (SIGTERM: it saves, and the entire run stops), then repeat the command"
        ) from None


def _wait(process: "subprocess.Popen[bytes]", interrupts: Sequence[int], watch: Callable[[], None]) -> None:
    """Wait until the run has ended. Leaves no process of it, even if this or the launcher ends early."""
    forwarded = 0
    # processes, not their ids: an id may be reused by another program
    launcher, workers = find_running([process.pid]), set["psutil.Process"]()
    try:
        while process.poll() is None:
            workers.update(find_running(children(process.pid)))
            if len(interrupts) > forwarded:
                _request_end(process, first=forwarded == 0)
                forwarded = len(interrupts)
            watch()
            time.sleep(POLL_S)
        deadline_s = time.monotonic() + LAST_S
        while alive(workers) and time.monotonic() < deadline_s:
            time.sleep(POLL_S)
    finally:
        send(signal.SIGKILL, [*workers, *launcher])
        process.wait()


def _request_end(process: "subprocess.Popen[bytes]", first: bool) -> None:
    """Send SIGTERM. torchrun forwards the first one; the second goes to the workers directly, because
    torchrun would leave them behind."""
    pids = [process.pid] if first else children(process.pid) or [process.pid]
    send(signal.SIGTERM, find_running(pids))
