"""Commands of a measurement: started in sessions of their own, and never left behind."""

import contextlib
import itertools
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from meshwright.train.errors import ConfigError

POLL_S = 0.02  # how often a command that runs is looked at: the resolution of start-up times
GRACE_S = 10.0  # between asking a command to end and killing it; torchrun wants some to end its workers
REASON_LINES = 6  # of the output of a command that failed, at most
CACHE_MODES = ("keep", "cold", "warm")
_LAUNCHER = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
)


class BenchError(ConfigError):
    """A measurement cannot be made: the message names the command, what went wrong and the way out."""


def python_command(module: str, processes: int, folder: Path) -> list[str]:
    """`python -m module`, through torchrun for more than one process; torchrun keeps its files in
    `folder`."""
    if processes == 1:
        return [sys.executable, "-m", module]
    launcher = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(processes),
        "--log-dir",
        str(folder),
    ]
    return [sys.executable, *launcher, "-m", module]


def make_environment(threads: int, cache: dict[str, str]) -> dict[str, str]:
    """This process's environment without a launcher's variables; the CPU threads and compile cache of a
    run."""
    kept = {name: value for name, value in os.environ.items() if name not in _LAUNCHER}
    return {**kept, "OMP_NUM_THREADS": str(threads), **cache}


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
    folder: Path | None = None,
) -> None:
    """Run a command (a string: in a shell), in `folder` if given, with its output in `log`, calling
    `while_running` every POLL_S.

    Whatever ends this function early ends the command and its descendants. Raises BenchError if the command
    fails.
    """
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            shell=isinstance(command, str),
            env=environment,
            stdin=subprocess.DEVNULL,
            cwd=folder,
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
    named = [
        i
        for i, line in enumerate(lines)
        if re.match(r"(\[\w+\]:\s*)?[\w.]+(Error|Exception|Unsupported): ", line)
    ]
    if named:
        more = itertools.takewhile(lambda line: line.startswith("  "), lines[named[0] + 1 :])
        lines = [lines[named[0]], *itertools.islice(more, REASON_LINES - 1)]
    return "\n".join(f"  {line}" for line in lines[-REASON_LINES:]) or "  It printed nothing."


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask a command and its descendants to end, then kill what is left. torchrun's workers have sessions of
    their own."""
    family = _family([process.pid])
    try:
        _send(signal.SIGTERM, family)
        if not family:  # no /proc here: its own process group is all that is known
            os.killpg(process.pid, signal.SIGTERM)
        deadline = time.monotonic() + GRACE_S
        while time.monotonic() < deadline and (process.poll() is None or alive(family)):
            time.sleep(POLL_S)
    finally:
        _send(signal.SIGKILL, _family(alive(family)))
        if process.poll() is None:
            process.kill()
        process.wait()


def _send(number: signal.Signals, family: dict[int, int]) -> None:
    for pid in alive(family):
        try:
            os.kill(pid, number)
        except ProcessLookupError:  # it has just ended
            continue


def alive(family: Mapping[int, int]) -> list[int]:
    """Those of processes, with their start times, that still run: the same number with another start time is
    a stranger."""
    return [pid for pid, start in family.items() if start_times([pid]).get(pid) == start]


def start_times(pids: Iterable[int]) -> dict[int, int]:
    """When those of the processes started that have not ended, in ticks since the machine did."""
    return {pid: found[1] for pid in pids if (found := _parent_and_start(pid))}


def _family(roots: Iterable[int]) -> dict[int, int]:
    """Processes and all their descendants, with their start times."""
    running = _running()
    found = {pid: running[pid][1] for pid in roots if pid in running}
    grown = True
    while grown:
        more = {
            pid: start for pid, (parent, start) in running.items() if parent in found and pid not in found
        }
        found |= more
        grown = bool(more)
    return found


def _running() -> dict[int, tuple[int, int]]:
    """Parent and start time of every process that has not ended."""
    pids = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
    return {pid: found for pid in pids if (found := _parent_and_start(pid))}


def _parent_and_start(pid: int) -> tuple[int, int] | None:
    """None if the process has ended (proc(5), fields 3, 4 and 22 of stat)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else (int(fields[1]), int(fields[19]))


def descendant_age_s(words: bytes, not_words: bytes) -> float | None:
    """Seconds since the first of this process's descendants started that has `words` in its command line and
    not `not_words`; None while there is none, and on a system without /proc."""
    ages = []
    for pid, ticks in _family([os.getpid()]).items():
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:  # it has just ended
            continue
        if words in command and not_words not in command and pid != os.getpid():
            ages.append(time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))
    return max(ages, default=None)


def children(pid: int) -> list[int]:
    """Process ids of a process's children, whichever of its threads has started them; [] if it has ended."""
    found = list[int]()
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += map(int, path.read_text().split())
    return found
