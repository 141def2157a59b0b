"""One run of a sweep from its start to its end: its command, what is noted of it beside what the run itself
leaves, and the sweep's folder, which one sweep at a time takes for one spec. A run is asked to save and stop
when the sweep is."""

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

import msgspec

from meshwright.parallel.errors import one_line
from meshwright.tools.cli import to_json
from meshwright.tools.plan.export import write_whole
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
from meshwright.train.files import read_json

if TYPE_CHECKING:
    import psutil

NAME, OUTPUT = "attempt.json", "output.txt"
LIMIT_BYTES = 1 << 20
TAIL_BYTES = 1 << 18  # of an output, searched for a reason
REASON_LETTERS = 600
Ended = Literal["waiting", "running", "finished", "stopped", "failed", "refused"]


@dataclass(frozen=True)
class Attempt:
    """The last start of a run.

    Args:
        state: waiting where there was none; running also where sweep and run were killed together
        reason: why it failed, was stopped or is refused
        began_s: when, in seconds of Unix time
        predicted: step_time_s and peak_memory_gib, where they were predicted for this machine
    """

    state: Ended = "waiting"
    processes: int = 0
    nodes: int = 0
    arguments: tuple[str, ...] = ()
    reason: str = ""
    exit_code: int | None = None
    began_s: float = 0.0
    predicted: Mapping[str, float] = field(default_factory=dict)


def read_attempt(folder: Path) -> Attempt:
    """Of a run's folder; waiting where there is none, or nothing that can be understood."""
    try:
        return msgspec.convert(read_json(folder / NAME, LIMIT_BYTES), Attempt)
    except (OSError, ValueError):
        return Attempt()


def write_attempt(folder: Path, attempt: Attempt) -> float:
    """By one rename. Returns when, by the clock of the folder's disk, which may be another machine's. Raises
    ConfigError where the folder cannot be written."""
    write_whole(folder / NAME, (to_json(attempt) + "\n").encode())
    return (folder / NAME).stat().st_mtime


def launched_with(folder: Path) -> dict[str, int]:
    """Processes and nodes of the run that was started in a folder; {} if none was."""
    attempt = read_attempt(folder)
    known = attempt.state not in ("waiting", "refused") and (folder / "config.yaml").is_file()
    return {"processes": attempt.processes, "nodes": attempt.nodes} if known else {}


def state_of(folder: Path) -> tuple[Ended, str]:
    """How a run stands and why: by the sweep's note, and where others started it (Slurm) by its own status.
    Whether its plan is refused is found anew each time: one that was refused before, and no longer is,
    waits."""
    attempt, status = read_attempt(folder), read_status(folder)
    if attempt.state in ("waiting", "running", "refused") and status is not None:
        return status.state, status.reason
    return ("waiting", "") if attempt.state == "refused" else (attempt.state, attempt.reason)


def judge(folder: Path, exit_code: int, began_s: float, output: str) -> tuple[Ended, str]:
    """What has become of a run that was started at `began_s` and has ended: its own word, where it has left
    one, else what it printed."""
    said = last_word(folder, began_s)
    if said and (said.state == "stopped" or (said.state == "finished" and exit_code == 0)):
        return said.state, said.reason
    if said and said.state == "failed" and said.reason:
        return "failed", one_line(said.reason, REASON_LETTERS)
    reason = find_reason(output, REASON_LETTERS) or "it printed nothing"
    return "failed", reason if exit_code else f"it ended without a last word in status.json: {reason}"


def last_word(folder: Path, began_s: float) -> Status | None:
    """How a run has ended by what it said itself since `began_s`, as `write_attempt` says it; None where it
    has not."""
    status = read_status(folder)
    if status is None or status.state == "running":
        return None
    written_s = (folder / "status.json").stat().st_mtime
    return status if written_s >= began_s - 1.0 else None  # file systems that count in whole seconds


def output_since(folder: Path, offset: int) -> str:
    """What a run has printed after so many bytes, of much its end."""
    return read_tail(folder / OUTPUT, TAIL_BYTES, offset).decode("utf-8", errors="replace")


def device_of(folder: Path) -> str:
    """The device that a run has named in its output; "" where there is none."""
    return named_device(output_since(folder, 0))


SLURM_SCRIPT = "configs/launch/slurm.sh"


def run_command(planned: PlannedRun) -> list[str]:
    """The run on this machine: through torchrun, unless it is one process."""
    return [*python_command("meshwright.train.main", planned.cell.processes), *planned.arguments]


def run_environment(planned: PlannedRun) -> dict[str, str]:
    """This process's, without what a launcher of its own has put there. torchrun (from torch 2.13 on) leaves
    the workers as long to save in as they allow themselves, instead of 30 s."""
    return {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(round(planned.config.run.grace_s)), **own_environment()}


def slurm_command(planned: PlannedRun) -> list[str]:
    """The run as a Slurm job of its own."""
    cell, (config, *arguments) = planned.cell, planned.arguments
    place = [
        f"--job-name={cell.name}",
        f"--nodes={cell.nodes}",
        "--ntasks-per-node=1",
        f"--gpus-per-node={cell.processes}",
    ]
    return ["sbatch", *place, SLURM_SCRIPT, config.removeprefix("--config="), *arguments]


def refuse_nodes(planned: Sequence[PlannedRun]) -> None:
    """ConfigError for runs on several nodes, which nobody can start from one."""
    if names := [one.cell.name for one in planned if one.cell.nodes > 1]:
        raise ConfigError(
            f"nodes is more than 1 for {', '.join(names[:3])}: a sweep starts processes on this machine "
            "only. Use --slurm, which prints a job for each run"
        )


NOTE = "sweep.json"
NOTE_LIMIT_BYTES = 4096


@contextmanager
def own_folder(folder: Path, name: str) -> Iterator[None]:
    """The folder of the spec of this name, made, noted and taken. Raises LockError and ConfigError."""
    make_folder(folder)
    lock = lock_folder(folder)
    try:
        refuse_other_owner(folder, name)
        note_owner(folder, name)
        yield
    finally:
        lock.release()


def make_folder(folder: Path) -> None:
    """And those above it. Raises ConfigError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be made ({error.strerror}): take another --folder") from None


def note_owner(folder: Path, name: str) -> None:
    """Write down the spec's name. Raises ConfigError."""
    write_whole(folder / NOTE, (json.dumps({"spec": name}) + "\n").encode())


def refuse_other_owner(folder: Path, name: str) -> None:
    """ConfigError where the folder belongs to the spec of another name; nothing where no spec has been
    noted."""
    try:
        owner = read_json(folder / NOTE, NOTE_LIMIT_BYTES).get("spec", name)
    except (OSError, ValueError):
        return
    if owner != name:
        raise ConfigError(
            f"{folder} has the runs of the sweep {one_line(owner, 80)}, not of {name}: take another --folder"
        )


POLL_S = 0.2
LAST_S = 10.0  # that workers may take to end when their launcher has; then they are killed
# a run's own, in train/fault_tolerance/run_lock.py: a sweep's runs have their folders
TAKEN_ADVICE = ": end that run, or use another run.dir"
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def hear_interrupts() -> Iterator[list[int]]:
    """The signals that have asked this process to end: the first asks the run to save and stop, the second
    ends it at once. They are heard and not obeyed, until the block ends; what nohup has set to be ignored
    stays so. In the main thread only."""
    heard = list[int]()
    wanted = [
        number for number in SIGNALS if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN
    ]
    before = {number: signal.signal(number, lambda one, _: heard.append(one)) for number in wanted}
    try:
        yield heard
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_once(planned: PlannedRun, interrupts: Sequence[int], watch: Callable[[], None]) -> Attempt:
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
    state, reason = judge(folder, process.returncode, began_s, output_since(folder, offset))
    if interrupts and not last_word(folder, began_s):
        state, reason = "stopped", "interrupted before it could save"
    attempt = replace(attempt, state=state, reason=reason, exit_code=process.returncode)
    write_attempt(folder, attempt)
    return attempt


def _refuse_taken(planned: PlannedRun) -> None:
    """LockError, with the process to end, where the run still trains."""
    try:
        lock_folder(planned.folder).release()
    except LockError as error:
        taken = str(error).removesuffix(TAKEN_ADVICE)
        raise LockError(
            f"{planned.cell.name} still trains, as after a sweep that was killed: {taken}. Wait for its end, "
            "or kill that process (SIGTERM: it saves, and all of the run stops); then the same command goes "
            "on"
        ) from None


def _wait(process: "subprocess.Popen[bytes]", interrupts: Sequence[int], watch: Callable[[], None]) -> None:
    """Until the run has ended. Whatever ends this early, or the launcher alone, leaves nothing of it
    behind."""
    told = 0
    # not their numbers: hours later one may be another program's
    launcher, workers = find_running([process.pid]), set["psutil.Process"]()
    try:
        while process.poll() is None:
            workers.update(find_running(children(process.pid)))
            if len(interrupts) > told:
                _ask_to_end(process, first=told == 0)
                told = len(interrupts)
            watch()
            time.sleep(POLL_S)
        deadline_s = time.monotonic() + LAST_S
        while alive(workers) and time.monotonic() < deadline_s:
            time.sleep(POLL_S)
    finally:
        send(signal.SIGKILL, [*workers, *launcher])
        process.wait()


def _ask_to_end(process: "subprocess.Popen[bytes]", first: bool) -> None:
    """torchrun passes the first signal on; the second goes to the workers themselves, for torchrun would
    leave them behind."""
    pids = [process.pid] if first else children(process.pid) or [process.pid]
    send(signal.SIGTERM, find_running(pids))
