"""train.main on ranks whose main thread is held at a step: `WAY RANKS STEP ARGUMENTS of train.main`.

The ways, on the RANKS (such as 0,2): device (it never returns, as from a collective on a GPU whose peer is
dead; the other ranks wait for a signal), error (it raises DataError; the other ranks are held), and a number
(of seconds that a compiler takes).
"""

import sys
import threading
import time
from typing import Any

import meshwright.train.loop
from meshwright.train.distributed.ranks import read_rank_info
from meshwright.train.errors import DataError
from meshwright.train.main import main
from meshwright.train.step import StepResult, train_step

WAY, RANKS, STEP = sys.argv[1], set(map(int, sys.argv[2].split(","))), int(sys.argv[3])
steps = 0


def held_step(*arguments: Any) -> StepResult:
    """Do the step, or what this rank does instead."""
    global steps
    steps += 1
    if steps == STEP:
        meant = read_rank_info().rank in RANKS
        if WAY == "error" and meant:
            raise DataError("a file of the data is gone")
        if WAY in ("error", "device"):
            threading.Event().wait()
        elif meant:
            time.sleep(float(WAY))
    return train_step(*arguments)


if __name__ == "__main__":
    meshwright.train.loop.train_step = held_step  # type: ignore[attr-defined]
    main(sys.argv[4:])
