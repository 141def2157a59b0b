"""Pieces of a source over several processes, which import no torch and share nothing but the folder they
write to."""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from meshwright.train.data.prepare.partition import Piece
from meshwright.train.data.prepare.worker import NoSpace, OnBatch, TokenizeJob
from meshwright.train.errors import DataError

# what holds the package meshwright
_ROOT = Path(__file__).parents[4]


def tokenise_pieces(pieces: Sequence[Piece], job: TokenizeJob, workers: int, on_batch: OnBatch) -> None:
    """Have every piece tokenised by `workers` processes. Raises DataError and NoSpace; no process is left
    behind."""
    left: queue.Queue[Piece] = queue.Queue()
    for piece in pieces:
        left.put(piece)
    messages: queue.Queue[dict[str, Any]] = queue.Queue()
    processes = [_start() for _ in range(min(workers, len(pieces)))]
    threads = [
        threading.Thread(target=_drive, args=(process, job, left, messages), daemon=True)
        for process in processes
    ]
    try:
        for thread in threads:
            thread.start()
        running = len(threads)
        while running:
            message = messages.get()
            if "batch" in message:
                on_batch(*message["batch"])
            elif "error" in message:
                raise DataError(message["error"])
            elif "no_space" in message:
                raise NoSpace(message["no_space"])
            running -= "over" in message
    finally:
        for process in processes:
            process.kill()
        for process, thread in zip(processes, threads, strict=True):
            process.wait()
            if thread.ident is not None:
                thread.join()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):  # what was still to be sent to a process that is dead
                        pipe.close()


def _start() -> subprocess.Popen[str]:
    """A worker. Each uses one thread: as many processes as cores are faster than threads of the tokenizers
    library.

    In a process group of its own, Ctrl-C does not reach it: this process ends it then.
    """
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(_ROOT)]))
    environment = os.environ | {"PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, "-m", "meshwright.train.data.prepare.worker"]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True, process_group=0
    )


def _drive(
    process: subprocess.Popen[str],
    job: TokenizeJob,
    left: queue.Queue[Piece],
    messages: queue.Queue[dict[str, Any]],
) -> None:
    """Give a process one piece after another, and pass on what it says, to the last message {"over":
    true}."""
    try:
        _send(process, asdict(job))
        while True:
            _send(process, asdict(left.get_nowait()))
            while "finished" not in (message := _receive(process)):
                messages.put(message)
    except queue.Empty:
        messages.put({"over": True})
    except (OSError, ValueError):  # its end of a pipe is closed
        messages.put({"error": _how_it_ended(process)})


def _send(process: subprocess.Popen[str], message: dict[str, Any]) -> None:
    assert process.stdin is not None
    process.stdin.write(json.dumps(message) + "\n")
    process.stdin.flush()


def _receive(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    message: dict[str, Any] = json.loads(process.stdout.readline())
    return message


def _how_it_ended(process: subprocess.Popen[str]) -> str:
    code = process.wait()
    if code < 0:
        how = f"was killed by {signal.Signals(-code).name}" + (
            ", as when memory runs out" if code == -signal.SIGKILL else ""
        )
    else:
        how = f"ended with exit code {code}"
    return (
        f"a worker process of the preparation (pid {process.pid}) {how}: start again, and finished shards "
        "are kept"
    )
