"""Runs a function on N gloo ranks, each a process of its own, and gives back what each returned.

    def total(value):
        tensor = torch.tensor(float(value + dist.get_rank()))
        dist.all_reduce(tensor)
        return tensor.item()

    def test_a_sum():
        assert run_ranks(4, total, 1) == [10.0] * 4

Function and arguments are pickled, so the function stands at the top of its file. Every call has new
processes (tests/support/ forks.py: a fork and a process group together take a fraction of a second), so
nothing has to be reset between two tests, and one that crashes or hangs harms no other.
"""

import faulthandler
import os
import pickle
import signal
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

# of the ranks' store, and the variables that name it
Keeper = Callable[[int], AbstractContextManager[dict[str, str]]]
LIMIT_S = 180.0  # for the whole call: on a busy machine too no test comes near it
PATIENCE_S = 2.0  # that the other ranks have to end by themselves, once one has failed
FRAMES, LINES = 5, 16  # that are shown of a rank that waits, and of a traceback


class RanksError(AssertionError):
    """A rank failed, or did not end: its traceback, and where the others were."""


def run_ranks(
    ranks: int, function: Callable[..., Any], *arguments: Any, limit_s: float = LIMIT_S, **env: str
) -> list[Any]:
    """function(*arguments) on each of `ranks` ranks; what they returned, by rank. Raises RanksError if one of
    them fails.

    The function finds a gloo group that is up. `env`: environment variables, beside those that torchrun sets.
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
    """function(*arguments) as so many ranks, which find each other by what `keeper` says; at the end nothing
    of them is left.

    What a rank prints is in `folder`: RANK.out, and what it prints to stderr in RANK.`errors`.
    """
    forks: list[Fork] = []
    with (keeper or launcher_store)(ranks) as found:
        try:
            for rank in range(ranks):
                environ = environment(**{**found, "RANK": str(rank), "LOCAL_RANK": str(rank), **env})
                files = {"output": folder / f"{rank}.out", "errors": folder / f"{rank}.{errors}"}
                forks.append(fork(function, *arguments, **files, env=environ))
            yield forks
        finally:
            for process in forks:
                process.kill()
                process.wait()


@contextmanager
def launcher_store(ranks: int) -> Iterator[dict[str, str]]:
    """The store that torchrun keeps for its workers, and the variables by which they find it."""
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


def _wait(forks: Sequence[Fork], folder: Path, limit_s: float) -> bool:
    """Until all have ended or failed, or one has failed and the others have had their time; False if neither
    happens."""
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
    """Where each rank that has neither ended nor failed is, by rank: the innermost frames of its main
    thread."""
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
    return {rank: "\n".join(lines[:FRAMES]) or "  (it does not answer)" for rank, lines in frames.items()}


def _wait_until_written(paths: Sequence[Path]) -> None:
    """Until each file has something in it and grows no more: faulthandler writes piece by piece."""
    deadline_s, sizes, unchanged = time.monotonic() + PATIENCE_S, list[int](), 0
    while (unchanged < 2 or 0 in sizes) and time.monotonic() < deadline_s:
        before, sizes = sizes, [path.stat().st_size if path.exists() else 0 for path in paths]
        unchanged = unchanged + 1 if sizes == before else 0
        time.sleep(0.02)


def _report(forks: Sequence[Fork], folder: Path, stacks: dict[int, str], limit_s: float) -> str:
    """Who crashed or else failed first, whole; what the others said or did, in short. Under 40 lines."""
    ended = [
        rank for rank in range(len(forks)) if rank not in stacks and not (folder / f"{rank}.error").exists()
    ]
    crashed = {
        rank: f"ended with {forks[rank].returncode}:\n" + _last(folder / f"{rank}.out")
        for rank in ended
        if forks[rank].returncode or not (folder / f"{rank}.result").exists()
    }
    errors = sorted(folder.glob("*.error"), key=lambda path: path.stat().st_mtime_ns)
    failed = {int(path.stem): f"failed:\n{_last(path)}" for path in errors}
    first, *others = [*crashed.items(), *failed.items()] or [(-1, f"no rank failed, but after {limit_s:g} s")]
    lines = [f"rank {first[0]} {first[1]}" if first[0] >= 0 else first[1]]
    lines += _together(
        {rank: f"{told.splitlines()[0]} {told.splitlines()[-1][:200]}" for rank, told in others}
    )
    lines += _together({rank: f"was in\n{stack}" for rank, stack in stacks.items()})
    return "\n".join("\n".join(lines).splitlines()[:38])


def _together(words: dict[int, str]) -> list[str]:
    """A paragraph for each thing that is said, with the ranks that say it."""
    ranks: dict[str, list[str]] = {}
    for rank, told in words.items():
        ranks.setdefault(told, []).append(str(rank))
    return [f"rank {', '.join(who)} {told}" for told, who in ranks.items()]


def _last(path: Path) -> str:
    """The end of it; of stacks of faulthandler, whose innermost frame comes first, what is said above them,
    and the beginning of the one of the thread that failed: it is called the current one, or is the main
    thread, which comes last."""
    lines = path.read_text(errors="replace").strip("\n").splitlines()
    stacks = [number for number, line in enumerate(lines) if line.endswith("(most recent call first):")]
    if not stacks:
        return "\n".join(lines[-LINES:])
    failed = next((number for number in stacks if lines[number].startswith("Current thread")), stacks[-1])
    said = [line for line in lines[: stacks[0]] if line.strip()]
    return "\n".join([*said[-3:], *lines[failed + 1 : failed + 1 + FRAMES]])


def _run_rank(folder: Path, function: Callable[..., Any], arguments: Sequence[Any]) -> None:
    rank = int(os.environ["RANK"])
    stack = (folder / f"{rank}.stack").open("w")
    faulthandler.enable(all_threads=False)
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=False)
    try:
        dist.init_process_group("gloo")
        (folder / f"{rank}.result").write_bytes(pickle.dumps(function(*arguments)))
        dist.barrier()  # one that is through must not end while others still talk to it
    except BaseException:
        written = folder / f"{rank}.writing"
        written.write_text(traceback.format_exc())
        written.rename(folder / f"{rank}.error")
        signal.pause()  # to end now would make the others fail too, in a way that says nothing
    dist.destroy_process_group()
    os._exit(0)  # as train/distributed/exit.py does: no teardown of the interpreter beside gloo's threads
