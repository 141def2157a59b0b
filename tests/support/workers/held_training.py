"""train.main on ranks whose main thread is held at a step: `WAY RANKS STEP ARGUMENTS of train.main`.

The ways, on the RANKS (such as 0,2): device (it never returns, as from a collective on a GPU whose peer is
dead; a rank that has lost another ends sooner than by default), stuck (it never returns, and its section is
made older than its timeout), and a number (of seconds that a compiler takes).
"""

import sys
import threading
import time
from typing import Any

import meshwright.train.training
from meshwright.train.distributed.ranks import read_rank_info
from meshwright.train.fault_tolerance import shutdown, supervision
from meshwright.train.main import main
from meshwright.train.step import StepResult, train_step
from tests.support.aged_watchdog import AgedWatchdog

WAY, RANKS, STEP = sys.argv[1], set(map(int, sys.argv[2].split(","))), int(sys.argv[3])
watchdogs = list[AgedWatchdog]()
steps = 0


def aged_watchdog(*arguments: Any) -> AgedWatchdog:
    """Make the run's watchdog one whose section can be made older."""
    watchdogs.append(AgedWatchdog(*arguments))
    return watchdogs[-1]


def held_step(*arguments: Any) -> StepResult:
    """Do the step, or what this rank does instead."""
    global steps
    steps += 1
    if steps == STEP:
        meant = read_rank_info().rank in RANKS
        if WAY == "stuck" and meant:
            watchdogs[0].age(1e6)
        if WAY == "device" or (WAY == "stuck" and meant):
            threading.Event().wait()
        elif meant and WAY != "stuck":
            time.sleep(float(WAY))
    return train_step(*arguments)


if __name__ == "__main__":
    meshwright.train.training.train_step = held_step  # type: ignore[attr-defined]
    if WAY == "device":
        shutdown.LOST_S = 0.5
    if WAY == "stuck":
        supervision.Watchdog = aged_watchdog  # type: ignore[assignment,misc]
    main(sys.argv[4:])
