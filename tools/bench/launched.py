"""A launch of the real command, of which single ranks are killed or stopped: who is which rank, and who still lives.

Linux only: it reads /proc.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tools.bench.processes import BenchError, make_environment, python_command

POLL_S = 0.001  # a save of a tiny model takes tens of milliseconds


class Launch:
    """train.main under torchrun, or alone: then it is its own only worker. `log`: where it prints to.

    After a kill of torchrun itself only those workers can be found that `workers` has seen.
    """

    def __init__(self, process: "subprocess.Popen[bytes]", under_torchrun: bool, log: Path) -> None:
        self.process, self.log = process, log
        self._under_torchrun = under_torchrun
        self._seen = {process.pid}

    def workers(self) -> dict[int, int]:
        """Process ids by rank, of the workers that there are at this moment."""
        if not self._under_torchrun:
            return {0: self.process.pid}
        found = {_rank_of(pid): pid for pid in children(self.process.pid) if any_lives([pid])}
        found.pop(-1, None)
        self._seen.update(found.values())
        return found

    def running(self) -> bool:
        """Whether the command itself has not ended yet."""
        return self.process.poll() is None

    def output(self) -> str:
        """All that it has printed so far."""
        return self.log.read_text(encoding="utf-8", errors="replace")

    def wait_for(self, happened: Callable[[], bool], limit_s: float) -> bool:
        """Look until something has happened: True; or the command has ended: False. Raises BenchError after `limit_s`."""
        deadline_s = time.monotonic() + limit_s
        while time.monotonic() < deadline_s:
            if happened():
                return True
            if not self.running():
                return happened()
            time.sleep(POLL_S)
        raise BenchError(f"this run did not do within {limit_s:g} s what was waited for, and printed:\n{self.output()[-2000:]}")

    def wait_until_ended(self, limit_s: float) -> float:
        """Seconds until the command and all workers seen have ended by themselves. Raises BenchError after `limit_s`."""
        start_s = time.monotonic()
        while self.running() or any_lives(self._seen):
            if time.monotonic() - start_s > limit_s:
                raise BenchError(f"this run was still there after {limit_s:g} s, and printed:\n{self.output()[-2000:]}")
            time.sleep(POLL_S)
        return time.monotonic() - start_s

    def end(self) -> None:
        """Kill whatever is left of it."""
        for pid in {*self._seen, *children(self.process.pid)}:
            if any_lives([pid]):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self.process.wait()


@contextmanager
def launched(processes: int, arguments: Sequence[str], folder: Path, torchrun: Sequence[str] = ()) -> Iterator[Launch]:
    """Start train.main in a session of its own, with its output in a new file of `folder`; at the end nothing of it is left.

    torchrun: its options, where they are to be others than those for so many processes on one node.
    """
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / f"log-{len(list(folder.glob('log-*')))}"
    launcher = [sys.executable, "-m", "torch.distributed.run", *torchrun, "-m", "train.main"]
    command = [*(launcher if torchrun else python_command("train.main", processes, folder / "torchrun")), *arguments]
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=make_environment(1, {}), stdin=subprocess.DEVNULL, stdout=output,
                                   stderr=subprocess.STDOUT, start_new_session=True)  # fmt: skip
    launch = Launch(process, bool(torchrun) or processes > 1, log)
    try:
        yield launch
    finally:
        launch.end()


def children(pid: int) -> list[int]:
    """Process ids of a process's children, whichever of its threads has started them; [] if it has ended."""
    found = list[int]()
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += map(int, path.read_text().split())
    return found


def any_lives(pids: Iterable[int]) -> bool:
    """Whether one of these processes has not ended (proc(5), field 3 of stat; Z and X have)."""
    return any(_state_of(pid) not in ("", "Z", "X") for pid in pids)


def _state_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def _rank_of(pid: int) -> int:
    """The rank that torchrun gave to a worker; -1 for another process, and for a worker that is only just being started."""
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return -1
    ranks = [int(one.partition(b"=")[2]) for one in variables if one.startswith(b"RANK=")]
    return ranks[0] if ranks else -1
