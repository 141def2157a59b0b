"""One rank of a small loop under a watchdog, with a fault: `WAY FOLDER [STUCK_RANK]`.

The ways: stop (a rank stops itself with SIGSTOP), stop the store (it is the host of the store), asleep (a
rank sleeps in a separate function), desync (a rank gathers objects while the others reduce), behind (a rank
stays in its evaluation, and the folder cannot be created), slow (each step seems to take most of its
timeout), ended (a rank ends early), alone (init_process_group waits). No rank waits for a timeout: when all
are in the fault, the sections of those without one are made older than theirs.
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
from meshwright.train.fault_tolerance import watchdog as watchdog_module
from tests.support.aged_watchdog import AgedWatchdog

WAY, FOLDER = sys.argv[1], Path(sys.argv[2])
STUCK_RANK = int(sys.argv[3]) if len(sys.argv) > 3 else -1
RANK, WORLD_SIZE = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
STUCK_STEP = 3
TIMEOUT_S, OLDER_S = 3600, 3000  # of every section, and most of it
# where the main thread waits when its rank is in the fault
WAITS_IN = {"init_process_group"} if WAY == "alone" else {"all_reduce", "all_gather_object", "fall_asleep"}


def reduce() -> None:
    dist.all_reduce(torch.ones(2))


def fall_asleep() -> None:
    time.sleep(600)


def gather_objects() -> None:
    dist.all_gather_object([None] * WORLD_SIZE, {"rank": RANK})


def stop_here() -> None:
    (FOLDER / "stopped").write_text(str(os.getpid()))
    os.kill(os.getpid(), signal.SIGSTOP)


def go_wrong(watchdog: AgedWatchdog) -> None:
    """Run this rank's fault instead of a step."""
    if WAY == "behind":
        watchdog.enter("evaluation", STUCK_STEP - 1)
    faults = {"asleep": fall_asleep, "behind": fall_asleep, "desync": gather_objects}
    faults.get(WAY, stop_here)()


def note(message: str) -> None:
    (FOLDER / f"on_stuck_{RANK}.txt").write_text(message)


def wait_for_file(name: str) -> None:
    """Wait until a rank has written a file of this name."""
    while not (FOLDER / name).exists():
        time.sleep(0.01)


def age_when_all_wait(watchdog: AgedWatchdog) -> None:
    """Make the section older than its timeout when the main threads of all ranks wait, or have stopped or
    ended."""
    main_thread, names = threading.main_thread().ident, set[str]()
    while not names & WAITS_IN:
        time.sleep(0.01)
        frames = traceback.walk_stack(sys._current_frames()[main_thread or 0])
        names = {frame.f_code.co_name for frame, _ in frames}
    (FOLDER / f"waits-{RANK}").touch()
    if WAY.startswith("stop"):
        wait_for_file("stopped")
        stat = Path(f"/proc/{(FOLDER / 'stopped').read_text()}/stat")
        while stat.read_text().rpartition(")")[2].split()[0] != "T":
            time.sleep(0.01)
    for rank in range(1 if WAY == "alone" else WORLD_SIZE):
        if not (rank == STUCK_RANK and WAY.startswith("stop")):
            wait_for_file("ended" if rank == STUCK_RANK and WAY == "ended" else f"waits-{rank}")
    if RANK != STUCK_RANK:
        watchdog.age(2 * TIMEOUT_S)


def main() -> None:
    """Run the loop; at STUCK_STEP the stuck rank has its fault."""
    timeouts = TimeoutConfig(setup_s=TIMEOUT_S, step_s=TIMEOUT_S, evaluation_s=3 * TIMEOUT_S)
    watchdog = AgedWatchdog(timeouts, read_rank_info(), note)
    watchdog_module.LINGER_S = 2.0  # on a busy machine ranks exit further apart
    if WAY == "stop the store":
        watchdog_module.GATHER_S = 0.5  # the store does not answer, however long a rank waits
    ages = threading.Thread(target=age_when_all_wait, args=(watchdog,), daemon=True)
    if WAY == "alone":
        ages.start()
    dist.init_process_group("gloo")
    watchdog.connect()
    watchdog.report_to(FOLDER / "a_file" if WAY == "behind" else FOLDER)
    for step in range(1, 5):
        watchdog.enter("step", step)
        if step == STUCK_STEP and RANK == STUCK_RANK and WAY == "ended":
            break
        if step == STUCK_STEP and STUCK_RANK >= 0:
            ages.start()
        if step == STUCK_STEP and RANK == STUCK_RANK:
            go_wrong(watchdog)
        if WAY == "slow":
            watchdog.age(OLDER_S)
            watchdog.wait_for_check()
        reduce()
    watchdog.end()
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
