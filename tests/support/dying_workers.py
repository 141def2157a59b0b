"""Worker processes of a streamed corpus that are killed, in place of `tokenize_in_worker`. Imports no
torch."""

import os
import signal
from pathlib import Path

from meshwright.train.data.prepare.partition import Piece
from meshwright.train.data.prepare.worker import TokenizeJob, tokenize_in_worker


def killed_once(piece: Piece, job: TokenizeJob) -> int:
    """Kill this process in the first call of all processes; later calls tokenize."""
    mark = Path(job.folder, "killed")
    if not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return tokenize_in_worker(piece, job)


def always_killed(piece: Piece, job: TokenizeJob) -> int:
    """Kill this process."""
    os.kill(os.getpid(), signal.SIGKILL)
    return 0
