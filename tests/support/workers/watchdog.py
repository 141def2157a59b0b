"""One rank of a small loop under a watchdog, with a fault: `WAY FOLDER [STUCK_RANK]`.

The ways: stop (a rank stops itself with SIGSTOP), asleep (a rank sleeps in a separate function), desync (a
rank gathers objects while the others reduce), behind (a rank stays in its evaluation, and the folder cannot
be created), brief (all steps together take longer than the timeout, each one less), slow (each step seems to
take most of its timeout), ended (a rank ends early), alone (init_process_group waits).
"""

import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

from meshwright.train.config import TimeoutConfig
from meshwright.train.distributed.ranks import read_rank_info
from meshwright.train.fault_tolerance.watchdog import Watchdog
from tests.support.aged_watchdog import AgedWatchdog

WAY, FOLDER = sys.argv[1], Path(sys.argv[2])
STUCK_RANK = int(sys.argv[3]) if len(sys.argv) > 3 else -1
RANK, WORLD_SIZE = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
STUCK_STEP = 3
AGED = ("slow", "ended", "alone")  # ways whose sections are made older
LONG_S, OLDER_S = 3600.0, 3000.0  # their timeout, and most of it
STEP_S = {"brief": 5.5, "slow": LONG_S, "ended": LONG_S}


def reduce() -> None:
    dist.all_reduce(torch.ones(2))


def fall_asleep() -> None:
    time.sleep(60)


def gather_objects() -> None:
    dist.all_gather_object([None] * WORLD_SIZE, {"rank": RANK})


def stop_here() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def go_wrong(watchdog: Watchdog) -> None:
    """Run this rank's fault instead of a step."""
    if WAY == "behind":
        watchdog.enter("evaluation", STUCK_STEP - 1)
    {"stop": stop_here, "asleep": fall_asleep, "behind": fall_asleep, "desync": gather_objects}[WAY]()


def note(message: str) -> None:
    (FOLDER / f"on_stuck_{RANK}.txt").write_text(message)


def wait_for_file(name: str) -> None:
    """Wait until another rank has written a file of this name."""
    deadline_s = time.monotonic() + 120
    while not (FOLDER / name).exists() and time.monotonic() < deadline_s:
        time.sleep(0.05)


def age_when_joining(watchdog: AgedWatchdog) -> None:
    """Make the section older than its timeout when the main thread waits in init_process_group."""
    main_thread, names = threading.main_thread().ident, set[str]()
    while "init_process_group" not in names:
        time.sleep(0.05)
        frames = traceback.walk_stack(sys._current_frames()[main_thread or 0])
        names = {frame.f_code.co_name for frame, _ in frames}
    watchdog.age(2 * LONG_S)


def main() -> None:
    """Run the loop; at STUCK_STEP the stuck rank has its fault. Prints the time of that step, so that a test
    can measure the delay."""
    timeouts = TimeoutConfig(setup_s=3 if WAY == "alone" else 60, step_s=STEP_S.get(WAY, 3), evaluation_s=60)
    kind = AgedWatchdog if WAY in ("slow", "ended") else Watchdog
    watchdog = kind(timeouts, read_rank_info(), note)
    if WAY == "alone":
        print(f"stuck at {time.time()}", flush=True)
    if WORLD_SIZE > 1:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    watchdog.connect()
    watchdog.report_to(FOLDER / "a_file" if WAY == "behind" else FOLDER)
    for step in range(1, 13 if WAY == "brief" else 5):
        watchdog.enter("step", step)
        if step == STUCK_STEP:
            print(f"stuck at {time.time()}", flush=True)
            if RANK == STUCK_RANK and WAY == "ended":
                break
            if RANK == STUCK_RANK:
                go_wrong(watchdog)
            elif WAY == "ended":
                wait_for_file("ended")
                watchdog.age(2 * LONG_S)
        if WAY == "slow":
            watchdog.age(OLDER_S)
            watchdog.wait_for_check()
        if WAY == "brief":
            time.sleep(0.5)  # all steps together take longer than the timeout
        reduce()
    watchdog.close()
    if WAY == "ended":
        (FOLDER / "ended").touch()
        # keeps this rank's connections open while rank 0 waits for it
        wait_for_file("on_stuck_0.txt")
    threads = [thread.name for thread in threading.enumerate() if "watchdog" in thread.name]
    print(f"threads left: {threads}", flush=True)
    print("finished", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
