"""Stuck jobs: real processes that stop, sleep or wait in vain, and the message made out of what they say."""

import dataclasses
import math
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import pytest
import torch.distributed as dist

from tests.support.launch import ROOT, command, environment
from train.bounds import bounded, check_bounds
from train.watchdog import KEYS, Section, TimeoutConfig, Watchdog

TIMEOUT_S, MESSAGE_WITHIN_S = 3, 5
WORKER = "tests.train.watchdog_worker"
AT = r"tests/train/watchdog_worker.py:\d+"


@dataclass(frozen=True)
class Outcome:
    """How a job of several ranks ended: by rank, exit code (None: it had to be killed) and what it printed."""

    folder: Path
    codes: list[int | None]
    errors: list[str]
    output: list[str]
    stuck_at: float

    @property
    def message(self) -> str:
        """The diagnosis, which only one rank may have printed."""
        (message,) = [error for error in self.errors if "STUCK" in error]
        return message

    def seconds_to_message(self, rank: int) -> float:
        """From the moment something went wrong to after the message was printed."""
        return (self.folder / f"on_stuck_{rank}.txt").stat().st_mtime - self.stuck_at


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def run_ranks(folder: Path, way: str, world_size: int, stuck_rank: int = -1, started: int | None = None) -> Outcome:
    """Ranks as a launcher would start them, without torchrun: it takes 30 s to end a stopped one."""
    folder.mkdir()
    (folder / "a_file").touch()
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(world_size)}
    arguments = [sys.executable, "-m", WORKER, way, str(folder), str(stuck_rank)]
    ranks = [subprocess.Popen(arguments, cwd=ROOT, env=environment(**env, RANK=str(rank)), text=True, stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE) for rank in range(started or world_size)]  # fmt: skip
    try:
        survivors = [process for rank, process in enumerate(ranks) if not (way == "stop" and rank == stuck_rank)]
        for process in survivors:
            process.wait(timeout=120)
    finally:
        codes = [process.poll() for process in ranks]
        for process in ranks:
            process.kill()
        printed = [process.communicate() for process in ranks]
    times = [float(time_s) for out, _ in printed for time_s in re.findall(r"stuck at ([\d.]+)", out)]
    return Outcome(folder, codes, [err for _, err in printed], [out for out, _ in printed], max(times, default=math.nan))


def run_under_torchrun(folder: Path, way: str, stuck_rank: int) -> Outcome:
    folder.mkdir()
    result = subprocess.run(command(2, way, str(folder), str(stuck_rank), module=WORKER), cwd=ROOT, env=environment(),
                            capture_output=True, text=True, timeout=120, check=False)  # fmt: skip
    stuck_at = max(float(time_s) for time_s in re.findall(r"stuck at ([\d.]+)", result.stdout))
    return Outcome(folder, [result.returncode], [result.stderr], [result.stdout], stuck_at)


def suspend(folder: Path) -> Outcome:
    """One process that is stopped for longer than its time-out of 4 s, as Ctrl-Z or a batch system does, and goes on."""
    folder.mkdir()
    process = subprocess.Popen([sys.executable, "-m", WORKER, "slow", str(folder)], cwd=ROOT, env=environment(),
                               text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)  # fmt: skip
    try:
        assert process.stdout
        assert "stuck at" in process.stdout.readline()
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(6.5)
        os.kill(process.pid, signal.SIGCONT)
        output, errors = process.communicate(timeout=120)
    finally:
        process.kill()
    return Outcome(folder, [process.returncode], [errors], [output], math.nan)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Outcome]]:
    """All jobs, three at a time: they mostly sleep."""
    folder = tmp_path_factory.mktemp("watchdog")
    with ThreadPoolExecutor(3) as pool:
        jobs = {
            "suspended": pool.submit(suspend, folder / "suspended"),
            "stopped": pool.submit(run_ranks, folder / "stopped", "stop", 3, 2),
            "store stopped": pool.submit(run_ranks, folder / "store_stopped", "stop", 2, 0),
            "asleep": pool.submit(run_ranks, folder / "asleep", "asleep", 2, 1),
            "torchrun": pool.submit(run_under_torchrun, folder / "torchrun", "desync", 1),
            "behind": pool.submit(run_ranks, folder / "behind", "behind", 2, 0),
            "ended": pool.submit(run_ranks, folder / "ended", "ended", 2, 1),
            "slow": pool.submit(run_ranks, folder / "slow", "slow", 2),
            "alone": pool.submit(run_ranks, folder / "alone", "alone", 2, started=1),
        }
        yield {name: job.result() for name, job in jobs.items()}


# Real processes


def test_a_stopped_rank_is_named_in_time(outcomes: dict[str, Outcome]) -> None:
    outcome = outcomes["stopped"]
    first = outcome.message.splitlines()[0]
    assert re.match(r"STUCK: rank 2 gives no answer, and no heartbeat for about \d+ s: process stopped or killed", first), first
    assert re.search(rf"ranks 0-1: step 3 for \d s, in all_reduce called from {AT} reduce", outcome.message)
    assert f"run.timeouts.step_s={TIMEOUT_S}" in outcome.message
    assert outcome.codes == [1, 1, None]
    (noted,) = outcome.folder.glob("on_stuck_*.txt")
    assert noted.read_text().strip() == outcome.message.strip()
    assert outcome.seconds_to_message(int(noted.stem[-1])) < TIMEOUT_S + MESSAGE_WITHIN_S
    assert sorted(path.name for path in (outcome.folder / "stuck").iterdir()) == ["rank-00000.txt", "rank-00001.txt"]


def test_the_rank_that_keeps_the_store_is_named_when_it_stops(outcomes: dict[str, Outcome]) -> None:
    outcome = outcomes["store stopped"]
    assert "rank 1 of 2 can only speak for itself: rank 0, which keeps the ranks' store at 127.0.0.1:" in outcome.message
    assert "it does not answer" in outcome.message
    assert re.search(r"rank 1: step 3 for \d s, in all_reduce called from", outcome.message)
    assert outcome.codes == [None, 1]
    assert outcome.seconds_to_message(1) < TIMEOUT_S + MESSAGE_WITHIN_S


def test_a_rank_asleep_in_a_function_of_ours_is_named_with_it(outcomes: dict[str, Outcome]) -> None:
    outcome = outcomes["asleep"]
    assert re.match(rf"STUCK: rank 1 is at {AT} fall_asleep, while rank 0 waits in all_reduce \({AT} reduce\)\n",
                    outcome.message)  # fmt: skip
    assert "collectives begun in default_pg of ranks 0-1: 2 by rank 1; 3 by rank 0" in outcome.message
    assert "how rank 1 came there: tests/train/watchdog_worker.py:" in outcome.message
    assert outcome.codes == [1, 1]
    for rank, function in enumerate(("in all_reduce", "in fall_asleep")):
        stacks = (outcome.folder / "stuck" / f"rank-{rank:05d}.txt").read_text()
        assert function in stacks.split("thread MainThread")[1].split("\nthread ")[0]
        assert stacks.startswith(f"rank {rank} of 2, process ")
        assert "thread watchdog " in stacks


def test_nothing_but_the_message_is_printed(outcomes: dict[str, Outcome]) -> None:
    others = [error for name in ("asleep", "stopped") for error in outcomes[name].errors if "STUCK" not in error]
    assert others == ["", "", ""]  # no traceback of a rank whose peers end sooner


def test_ranks_in_different_collectives_are_named_under_torchrun(outcomes: dict[str, Outcome]) -> None:
    outcome = outcomes["torchrun"]
    assert re.search(rf"STUCK: a desynchronised collective: all_reduce called from {AT} reduce by rank 0, "
                     rf"all_gather_object called from {AT} gather_objects by rank 1\n", outcome.message)  # fmt: skip
    assert outcome.message.count("STUCK") == 1
    assert outcome.codes == [1]


def test_a_rank_in_an_earlier_section_is_named_even_where_no_folder_can_be_made(outcomes: dict[str, Outcome]) -> None:
    outcome = outcomes["behind"]
    assert re.match(rf"STUCK: rank 0 is behind, in evaluation at step 2, at {AT} fall_asleep, while rank 1 waits in all_reduce",
                    outcome.message)  # fmt: skip
    assert re.search(r"step 3 has taken 3 s on rank 1 of 2, more than run.timeouts.step_s=3", outcome.message)
    assert re.search(r"stacks could not be written to .*/a_file/stuck \(NotADirectoryError: Not a directory\)", outcome.message)
    assert outcome.codes == [1, 1]  # rank 0's own time-out was far away


def test_a_rank_that_ended_too_early_is_named(outcomes: dict[str, Outcome]) -> None:
    outcome = outcomes["ended"]
    assert "STUCK: rank 1 has ended, while the others go on" in outcome.message
    assert outcome.codes[0] == 1


def test_a_slow_loop_is_left_alone_and_no_thread_is_left(outcomes: dict[str, Outcome]) -> None:
    outcome = outcomes["slow"]
    assert outcome.codes == [0, 0], outcome.errors
    assert not any("STUCK" in error for error in outcome.errors)
    assert all("threads left: []\nfinished" in output for output in outcome.output)


def test_a_rank_that_waits_for_others_to_join_says_so(outcomes: dict[str, Outcome]) -> None:
    outcome = outcomes["alone"]
    assert "rank 0 of 2 can only speak for itself: it has not yet joined the other processes" in outcome.message
    assert re.search(rf"set-up for \d s, in init_process_group called from {AT} main", outcome.message)
    assert "it waits for all 2 processes to join" in outcome.message
    assert outcome.seconds_to_message(0) < TIMEOUT_S + MESSAGE_WITHIN_S
    assert outcome.codes == [1]


def test_close_leaves_no_thread_and_a_time_out_of_0_is_never() -> None:
    before = set(threading.enumerate())
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        watchdog = Watchdog(TimeoutConfig(setup_s=1.5, step_s=0), 0, 1, lambda message: None)
        watchdog.connect()
        watchdog.enter("step", 1)
        time.sleep(2.5)
        watchdog.close()
    finally:
        dist.destroy_process_group()
    assert not [thread for thread in set(threading.enumerate()) - before if "watchdog" in thread.name]


def test_a_process_that_was_stopped_and_goes_on_is_not_stuck(outcomes: dict[str, Outcome]) -> None:
    assert (outcomes["suspended"].codes, outcomes["suspended"].errors) == ([0], [""])


GOES_ON = """
import time
from train.watchdog import TimeoutConfig, Watchdog

class Late(Watchdog):
    def _report(self):  # the main thread's next step begins while the watchdog looks at its stack
        if self._at.step == 1:
            self.enter("step", 2)
        return super()._report()

watchdog = Late(TimeoutConfig(step_s=1.5), 0, 1, print)
watchdog.enter("step", 1)
time.sleep(2.5)
watchdog.close()
print("went on", flush=True)
"""


def test_a_main_thread_that_goes_on_meanwhile_is_not_stuck() -> None:
    done = subprocess.run([sys.executable, "-c", GOES_ON], cwd=ROOT, env=environment(), capture_output=True, text=True,
                          timeout=60, check=False)  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "went on\n", "")


def test_preparing_data_has_a_time_out_of_its_own() -> None:
    said: list[str] = []
    watchdog = Watchdog(TimeoutConfig(setup_s=0.5), 0, 1, said.append)
    watchdog.enter("data")
    time.sleep(1.0)
    watchdog.close()  # by default never: this process is still here
    assert said == []
    assert tuple(KEYS) == get_args(Section)
    assert [*KEYS.values()] == [field.name for field in dataclasses.fields(TimeoutConfig)]
    with pytest.raises(ValueError, match=r"^timeouts\.data_s=-1 must lie between 0 and"):
        check_bounds("timeouts", TimeoutConfig(data_s=-1))


# Bounds


def test_bounds_hold_in_nested_sections() -> None:
    @dataclass(frozen=True)
    class Outer:
        timeouts: TimeoutConfig
        grace_s: float = bounded(1.0, low=0)

    check_bounds("run", Outer(TimeoutConfig(step_s=0)))
    with pytest.raises(ValueError, match=r"^run\.timeouts\.step_s=-1 must lie between 0 and"):
        check_bounds("run", Outer(TimeoutConfig(step_s=-1)))
    with pytest.raises(ValueError, match=r"^run\.timeouts\.setup_s=nan"):
        check_bounds("run", Outer(TimeoutConfig(setup_s=math.nan)))
