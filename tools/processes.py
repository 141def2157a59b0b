"""Run commands in their own sessions and terminate them with all their descendants."""

import contextlib
import itertools
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.parallel.errors import one_line
from meshwright.train.errors import ConfigError

if TYPE_CHECKING:
    import psutil

POLL_S = 0.02  # poll interval of a running command: the resolution of start-up times
GRACE_S = 10.0  # between SIGTERM and SIGKILL; torchrun needs some of it to end its workers
REASON_LINES = 6  # maximum lines quoted from the output of a failed command
_LAUNCHER_VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"),
    *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"),
)
# An error's name at the start of a line, as rank 0 prints it. torchrun's own report comes later and does not
# match.
_ERROR = re.compile(
    r"^(?:\[\w+\]:\s*)?(?:rank \d+: )?((?:\w+\.)*[A-Z]\w*(?:Error|Exception|Unsupported|Interrupt): .*)$"
)
_DEVICE = re.compile(r"^device: (.+), \d+ process", re.MULTILINE)
_IN_ERROR = re.compile(r"  \s*(?!File |rank)\S")  # indented lines below an error, except a traceback's


class BenchError(ConfigError):
    """The measurement failed. The message names the command, the error and what to do."""


def python_command(module: str, processes: int, folder: Path | None = None) -> list[str]:
    """Return `python -m module`, through torchrun for more than one process.

    `folder`: torchrun's log directory, if given.
    """
    if processes == 1:
        return [sys.executable, "-m", module]
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    return [sys.executable, *launcher, *([f"--log-dir={folder}"] if folder else []), "-m", module]


def make_environment(threads: int, variables: Mapping[str, str]) -> dict[str, str]:
    """Return this process's environment without a launcher's variables, with OMP_NUM_THREADS and these."""
    return {**own_environment(), "OMP_NUM_THREADS": str(threads), **variables}


def own_environment() -> dict[str, str]:
    """Return this process's environment without the variables that a launcher sets."""
    return {name: value for name, value in os.environ.items() if name not in _LAUNCHER_VARIABLES}


def run_to_end(
    command: Sequence[str] | str, environment: dict[str, str], log: Path, while_running: Callable[[], None]
) -> None:
    """Run a command (a string: in a shell), write its output to `log`, call `while_running` every POLL_S.

    An exception or interrupt also terminates the command and its descendants. Raises BenchError if the
    command fails.
    """
    with started(command, environment, log) as process:
        while process.poll() is None:
            while_running()
            time.sleep(POLL_S)
    if process.returncode:
        line = command if isinstance(command, str) else " ".join(command)
        raise BenchError(f"exit code {process.returncode} from this command: {line}\n{_reason(log)}")


@contextlib.contextmanager
def started(
    command: Sequence[str] | str, environment: Mapping[str, str] | None, log: Path, mode: str = "wb"
) -> Iterator["subprocess.Popen[bytes]"]:
    """Start a command (a string: in a shell) in its own session, with its output in `log`. If it still runs
    at the end of the block, it and its descendants are terminated.

    The output is a file, not a pipe, which a compiler that outlives its process would keep open.
    """
    with log.open(mode) as output:
        process = subprocess.Popen(
            command,
            shell=isinstance(command, str),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            end(process)


def _reason(log: Path) -> str:
    """Return the first error in a log with the lines indented below it, or else the last lines."""
    reason = _find_error(log.read_text(encoding="utf-8", errors="replace"), REASON_LINES)
    return "\n".join(f"  {line}" for line in reason) or "  The command printed nothing."


def _find_error(output: str, last: int) -> list[str]:
    """Return the first error in an output with the lines indented below it, or else the `last` lines."""
    lines = [line for line in output.splitlines() if line.strip()]
    for i, line in enumerate(lines):
        if match := _ERROR.match(line):
            more = itertools.takewhile(_IN_ERROR.match, lines[i + 1 : i + REASON_LINES])
            return [match[1], *more]
    return lines[-last:]


def named_device(output: str) -> str:
    """Return the device that a run printed (`device: ...`); "" if it printed none."""
    match = _DEVICE.search(output)
    return match[1] if match else ""


def find_reason(output: str, letters: int) -> str:
    """Return the first error in an output with the lines indented below it, else the last line, else "".

    The result is one line of at most `letters` characters.
    """
    return one_line(" ".join(map(str.strip, _find_error(output, 1))), letters)


def end(process: subprocess.Popen[bytes]) -> None:
    """Send SIGTERM to a command and its descendants, and SIGKILL to those left after GRACE_S.

    A signal to the process group would not reach torchrun's workers, which have their own sessions.
    """
    family = _with_descendants(find_running([process.pid]))
    try:
        send(signal.SIGTERM, family)
        deadline = time.monotonic() + GRACE_S
        while time.monotonic() < deadline and (process.poll() is None or alive(family)):
            time.sleep(POLL_S)
    finally:
        send(signal.SIGKILL, _with_descendants(family))
        process.wait()


def send(number: signal.Signals, processes: Iterable["psutil.Process"]) -> None:
    """Send a signal to those of the processes that have not ended."""
    import psutil

    for process in alive(processes):
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
            process.send_signal(number)


def find_running(pids: Iterable[int]) -> list["psutil.Process"]:
    """Return those of the processes that have not ended.

    psutil.Process also compares start times, so a process that reuses an id later is not mistaken for one.
    """
    import psutil

    processes = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            processes.append(psutil.Process(pid))
    return alive(processes)


def alive(processes: Iterable["psutil.Process"]) -> list["psutil.Process"]:
    """Return those of the processes that have not ended; a zombie has ended."""
    import psutil

    running = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                running.append(process)
    return running


def _with_descendants(roots: Iterable["psutil.Process"]) -> list["psutil.Process"]:
    """Return those of the processes that have not ended, and all their descendants."""
    import psutil

    processes = list["psutil.Process"]()
    for root in alive(roots):
        with contextlib.suppress(psutil.NoSuchProcess):
            processes += [root, *root.children(recursive=True)]
    return list(dict.fromkeys(processes))


def children(pid: int) -> list[int]:
    """Return the ids of the processes that any thread of a process has started; [] if it has ended."""
    pids = list[int]()
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            pids += map(int, path.read_text().split())
    return pids
