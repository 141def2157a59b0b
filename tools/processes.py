"""Commands of a measurement: started in sessions of their own, and never left behind."""

import contextlib
import itertools
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.parallel.errors import one_line
from meshwright.train.errors import ConfigError

if TYPE_CHECKING:
    import psutil

POLL_S = 0.02  # how often a command that runs is looked at: the resolution of start-up times
GRACE_S = 10.0  # between asking a command to end and killing it; torchrun wants some to end its workers
REASON_LINES = 6  # of the output of a command that failed, at most
CACHE_MODES = ("keep", "cold", "warm")
_LAUNCHER = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
)
# An error's name at the start of a line, as rank 0 prints it; torchrun's own report comes later, and has none
# so.
_ERROR = re.compile(
    r"^(?:\[\w+\]:\s*)?(?:rank \d+: )?((?:\w+\.)*[A-Z]\w*(?:Error|Exception|Unsupported|Interrupt): .*)$"
)
_DEVICE = re.compile(r"^device: (.+), \d+ process", re.MULTILINE)
_IN_ERROR = re.compile(r"  \s*(?!File |rank)\S")  # what is indented below it, but for a traceback


class BenchError(ConfigError):
    """A measurement cannot be made: the message names the command, what went wrong and the way out."""


def python_command(module: str, processes: int, folder: Path | None = None) -> list[str]:
    """`python -m module`, through torchrun for more than one process; torchrun keeps its files in
    `folder`, if given."""
    if processes == 1:
        return [sys.executable, "-m", module]
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    return [sys.executable, *launcher, *([f"--log-dir={folder}"] if folder else []), "-m", module]


def make_environment(threads: int, cache: dict[str, str]) -> dict[str, str]:
    """This process's environment without a launcher's variables; the CPU threads and compile cache of a
    run."""
    return {**own_environment(), "OMP_NUM_THREADS": str(threads), **cache}


def own_environment() -> dict[str, str]:
    """This process's, without what a launcher of its own has put there."""
    return {name: value for name, value in os.environ.items() if name not in _LAUNCHER}


def cache_environment(mode: str, folder: Path, name: str, turn: int) -> dict[str, str]:
    """Where a run keeps what it compiles.

    `keep`: wherever the user has it; `cold`: a folder of this turn alone; `warm`: one folder for all turns of
    `name`.
    """
    if mode == "keep":
        return {}
    own = folder / (f"{name}-{turn}" if mode == "cold" else name)
    return {"TORCHINDUCTOR_CACHE_DIR": str(own / "inductor"), "TRITON_CACHE_DIR": str(own / "triton")}


def run_to_end(
    command: Sequence[str] | str,
    environment: dict[str, str],
    log: Path,
    while_running: Callable[[], None],
) -> None:
    """Run a command (a string: in a shell) with its output in `log`, calling `while_running` every POLL_S.

    Whatever ends this function early ends the command and its descendants. Raises BenchError if the command
    fails.
    """
    with log.open("wb") as output:
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
            while process.poll() is None:
                while_running()
                time.sleep(POLL_S)
        finally:
            if process.poll() is None:
                _end(process)
    if process.returncode:
        words = command if isinstance(command, str) else " ".join(command)
        raise BenchError(f"this command ended with exit code {process.returncode}: {words}\n{_reason(log)}")


def _reason(log: Path) -> str:
    """The first error that a command named, with what is indented below it, or else its last lines."""
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    told = named_error(lines) or lines[-REASON_LINES:]
    return "\n".join(f"  {line}" for line in told) or "  It printed nothing."


def named_error(lines: Sequence[str]) -> list[str]:
    """Of an output the first error that is named, with what is indented below it; [] where none is."""
    for i, line in enumerate(lines):
        if match := _ERROR.match(line):
            more = itertools.takewhile(_IN_ERROR.match, lines[i + 1 : i + REASON_LINES])
            return [match[1], *more]
    return []


def named_device(output: str) -> str:
    """The device that a run has named in its output; "" where there is none."""
    match = _DEVICE.search(output)
    return match[1] if match else ""


def find_reason(output: str, letters: int) -> str:
    """The first error that is named in an output, with what is indented below it; else its last line; "" of
    nothing. In one line of so many letters at most."""
    lines = [line for line in output.splitlines() if line.strip()]
    told = named_error(lines) or lines[-1:]
    return one_line(" ".join(map(str.strip, told)), letters)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask a command and its descendants to end, then kill what is left. torchrun's workers have sessions of
    their own."""
    family = _family(find_running([process.pid]))
    try:
        send(signal.SIGTERM, family)
        deadline = time.monotonic() + GRACE_S
        while time.monotonic() < deadline and (process.poll() is None or alive(family)):
            time.sleep(POLL_S)
    finally:
        send(signal.SIGKILL, _family(family))
        process.wait()


def send(number: signal.Signals, processes: Iterable["psutil.Process"]) -> None:
    """To those that have not ended."""
    import psutil

    for process in alive(processes):
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
            process.send_signal(number)


def find_running(pids: Iterable[int]) -> list["psutil.Process"]:
    """Those of the processes that have not ended, so that nobody takes a stranger with the same number for
    one of them later."""
    import psutil

    found = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            found.append(psutil.Process(pid))
    return alive(found)


def alive(processes: Iterable["psutil.Process"]) -> list["psutil.Process"]:
    """Those that have not ended."""
    import psutil

    found = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def _family(roots: Iterable["psutil.Process"]) -> list["psutil.Process"]:
    """Those that have not ended, and all their descendants."""
    import psutil

    found = list["psutil.Process"]()
    for root in alive(roots):
        with contextlib.suppress(psutil.NoSuchProcess):
            found += [root, *root.children(recursive=True)]
    return list(dict.fromkeys(found))


def children(pid: int) -> list[int]:
    """Process ids of a process's children, whichever of its threads has started them; [] if it has ended."""
    found = list[int]()
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += map(int, path.read_text().split())
    return found
