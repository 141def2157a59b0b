"""Runs a function on N gloo ranks, each in a separate process, and returns the results.

    def total(value):
        tensor = torch.tensor(float(value + dist.get_rank()))
        dist.all_reduce(tensor)
        return tensor.item()

    def test_a_sum():
        assert run_ranks(4, total, 1) == [10.0] * 4

Function and arguments are pickled, so the function must be at module level. Every call uses new processes
(tests/support/forks.py: a fork and a process group together take a fraction of a second), so nothing has to
be reset between two tests, and a test that crashes or hangs does not affect others.
"""

import faulthandler
import os
import pickle
import signal
import socket
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.support.forks import Fork, environment, fork

# a context that keeps the store of N ranks and yields the variables that name it
Keeper = Callable[[int], AbstractContextManager[dict[str, str]]]
LIMIT_S = 180.0  # of a call: far more than a test needs on a busy machine
PATIENCE_S = 2.0  # after a failure, until the other ranks are no longer waited for
FRAMES, LINES = 5, 16  # shown of the stack of a waiting rank, and of a traceback


class RanksError(AssertionError):
    """A rank failed or hung: its traceback, and the stacks of the other ranks."""


def run_ranks(
    ranks: int, function: Callable[..., Any], *arguments: Any, limit_s: float = LIMIT_S, **env: str
) -> list[Any]:
    """Run function(*arguments) on each of `ranks` ranks, in an initialized gloo group, and return the results
    by rank. Raises RanksError if a rank fails.

    `env`: environment variables in addition to those that torchrun sets.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with forked(ranks, _run_rank, folder, function, arguments, folder=folder, **env) as forks:
            results = [folder / f"{rank}.result" for rank in range(ranks)]
            if (
                not _wait(forks, folder, limit_s)
                or any(f.poll() for f in forks)
                or not all(path.exists() for path in results)
            ):
                raise RanksError(_report(forks, folder, _stacks(forks, folder), limit_s))
        return [pickle.loads(path.read_bytes()) for path in results]


@contextmanager
def forked(
    ranks: int,
    function: Callable[..., Any],
    *arguments: Any,
    folder: Path,
    keeper: Keeper | None = None,
    errors: str = "out",
    **env: str,
) -> Iterator[list[Fork]]:
    """Run function(*arguments) on `ranks` ranks with the store of `keeper`; at the end all ranks are killed.

    `folder` has the stdout of a rank in RANK.out, and its stderr in RANK.`errors`.
    """
    forks: list[Fork] = []
    with (keeper or launcher_store)(ranks) as variables:
        try:
            for rank in range(ranks):
                environ = environment(**{**variables, "RANK": str(rank), "LOCAL_RANK": str(rank), **env})
                files = {"output": folder / f"{rank}.out", "errors": folder / f"{rank}.{errors}"}
                forks.append(fork(function, *arguments, **files, env=environ))
            yield forks
        finally:
            for process in forks:
                process.kill()
                process.wait()


@contextmanager
def launcher_store(ranks: int) -> Iterator[dict[str, str]]:
    """A store as torchrun keeps it for its workers; yields the variables that name it."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
    }
    del store


@contextmanager
def store_of_rank_0(ranks: int) -> Iterator[dict[str, str]]:
    """The variables by which N ranks meet if no launcher hosts the store: rank 0 does, and it ends with
    rank 0."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    yield {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}


def _wait(forks: Sequence[Fork], folder: Path, limit_s: float) -> bool:
    """Wait until all ranks have ended or failed, or one has failed and PATIENCE_S is over. False after
    `limit_s`."""
    deadline_s = time.monotonic() + limit_s
    failed = False
    while time.monotonic() < deadline_s:
        busy = [
            f for rank, f in enumerate(forks) if f.poll() is None and not (folder / f"{rank}.error").exists()
        ]
        if not busy:
            return True
        if not failed and any(f.poll() for f in forks) | any(folder.glob("*.error")):
            failed, deadline_s = True, min(deadline_s, time.monotonic() + PATIENCE_S)
        connection.wait([f.sentinel for f in busy], 0.05)
    return failed


def _stacks(forks: Sequence[Fork], folder: Path) -> dict[int, str]:
    """The innermost frames of the main thread of each rank that has neither ended nor failed, by rank."""
    busy = [
        rank for rank, f in enumerate(forks) if f.poll() is None and not (folder / f"{rank}.error").exists()
    ]
    for rank in busy:
        forks[rank].send_signal(signal.SIGUSR1)
    paths = {rank: folder / f"{rank}.stack" for rank in busy}
    _wait_until_written(list(paths.values()))
    frames = {
        rank: path.read_text().splitlines()[1:] if path.exists() else [] for rank, path in paths.items()
    }
    return {rank: "\n".join(lines[:FRAMES]) or "  (no answer to SIGUSR1)" for rank, lines in frames.items()}


def _wait_until_written(paths: Sequence[Path]) -> None:
    """Wait until each file has content and stops growing: faulthandler writes piece by piece."""
    deadline_s, sizes, unchanged = time.monotonic() + PATIENCE_S, list[int](), 0
    while (unchanged < 2 or 0 in sizes) and time.monotonic() < deadline_s:
        before, sizes = sizes, [path.stat().st_size if path.exists() else 0 for path in paths]
        unchanged = unchanged + 1 if sizes == before else 0
        time.sleep(0.02)


def _report(forks: Sequence[Fork], folder: Path, stacks: dict[int, str], limit_s: float) -> str:
    """A report of under 40 lines: the first rank that crashed or else failed in full, the others in short."""
    ended = [
        rank for rank in range(len(forks)) if rank not in stacks and not (folder / f"{rank}.error").exists()
    ]
    crashed = {
        rank: f"ended with {forks[rank].returncode}:\n" + _tail(folder / f"{rank}.out")
        for rank in ended
        if forks[rank].returncode or not (folder / f"{rank}.result").exists()
    }
    errors = sorted(folder.glob("*.error"), key=lambda path: path.stat().st_mtime_ns)
    failed = {int(path.stem): f"failed:\n{_tail(path)}" for path in errors}
    first, *others = [*crashed.items(), *failed.items()] or [(-1, f"no rank failed, but after {limit_s:g} s")]
    lines = [f"rank {first[0]} {first[1]}" if first[0] >= 0 else first[1]]
    lines += _merge_same(
        {rank: f"{text.splitlines()[0]} {text.splitlines()[-1][:200]}" for rank, text in others}
    )
    lines += _merge_same({rank: f"was in\n{stack}" for rank, stack in stacks.items()})
    return "\n".join("\n".join(lines).splitlines()[:38])


def _merge_same(texts: dict[int, str]) -> list[str]:
    """One paragraph for each different text, with its ranks."""
    ranks: dict[str, list[str]] = {}
    for rank, text in texts.items():
        ranks.setdefault(text, []).append(str(rank))
    return [f"rank {', '.join(same)} {text}" for text, same in ranks.items()]


def _tail(path: Path) -> str:
    """The last lines of a file.

    For stacks of faulthandler, whose innermost frame comes first: the lines above them, and the first frames
    of the thread that failed. That is the one called current, or the main thread, which comes last.
    """
    lines = path.read_text(errors="replace").strip("\n").splitlines()
    stacks = [number for number, line in enumerate(lines) if line.endswith("(most recent call first):")]
    if not stacks:
        return "\n".join(lines[-LINES:])
    failed = next((number for number in stacks if lines[number].startswith("Current thread")), stacks[-1])
    above = [line for line in lines[: stacks[0]] if line.strip()]
    return "\n".join([*above[-3:], *lines[failed + 1 : failed + 1 + FRAMES]])


def _run_rank(folder: Path, function: Callable[..., Any], arguments: Sequence[Any]) -> None:
    rank = int(os.environ["RANK"])
    stack = (folder / f"{rank}.stack").open("w")
    faulthandler.enable(all_threads=False)
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=False)
    try:
        dist.init_process_group("gloo")
        (folder / f"{rank}.result").write_bytes(pickle.dumps(function(*arguments)))
        dist.barrier()  # a rank must not exit while others still communicate with it
    except BaseException:
        written = folder / f"{rank}.writing"
        written.write_text(traceback.format_exc())
        written.rename(folder / f"{rank}.error")
        signal.pause()  # an exit would make the other ranks fail too, with errors that explain nothing
    dist.destroy_process_group()
    os._exit(0)  # like train/distributed/exit.py: no teardown of the interpreter while gloo's threads run
