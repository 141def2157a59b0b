"""Hangs: real processes that stop, sleep or wait forever, and the message made from their reports."""

import dataclasses
import itertools
import re
import shutil
import threading
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import pytest

from meshwright.train.config import RunConfig, TimeoutConfig
from meshwright.train.distributed.ranks import RankInfo
from meshwright.train.fault_tolerance.hang_diagnosis import RankReport
from meshwright.train.fault_tolerance.shutdown import GracefulShutdown
from meshwright.train.fault_tolerance.watchdog import Section, timeout_key
from tests.support.aged_watchdog import AgedWatchdog
from tests.support.forks import run_module
from tests.support.launch import run
from tests.support.worlds import LIMIT_S, Keeper, forked, launcher_store, run_ranks, store_of_rank_0

WORKER = "tests.support.workers.watchdog"
AT = r"tests/support/workers/watchdog.py:\d+"


@dataclass(frozen=True)
class Outcome:
    """How a job of several ranks ended: by rank, exit code (None: it had to be killed), errors and output."""

    folder: Path
    codes: list[int | None]
    errors: list[str]
    output: list[str]

    @property
    def message(self) -> str:
        """The diagnosis, which only one rank may print."""
        (message,) = [error for error in self.errors if "STUCK" in error]
        return message


@dataclass
class Job:
    """Ranks that run in parallel, without a launcher that ends them. `keeper`: the host of their store, which
    outlives them all or is one of them; `started`: the number of ranks to start, 0 for all."""

    folder: Path
    way: str
    world_size: int
    stuck_rank: int = -1
    keeper: Keeper = store_of_rank_0
    started: int = 0

    def __post_init__(self) -> None:
        self.start()

    def start(self) -> None:
        self.folder.mkdir()
        (self.folder / "a_file").touch()
        arguments = [self.way, str(self.folder), str(self.stuck_rank)]
        self._ended = ExitStack()
        ranks = forked(
            self.started or self.world_size,
            run_module,
            WORKER,
            arguments,
            folder=self.folder,
            keeper=self.keeper,
            errors="err",
            WORLD_SIZE=str(self.world_size),
            TORCH_GLOO_LAZY_INIT="0",  # init_process_group waits for all ranks
        )
        self.ranks = self._ended.enter_context(ranks)

    def outcome(self) -> Outcome:
        """Return how the job ended. If another process has taken the port of rank 0 the job runs a second
        time."""
        outcome = self._outcome()
        if "EADDRINUSE" not in outcome.errors[0]:
            return outcome
        shutil.rmtree(self.folder)
        self.start()
        return self._outcome()

    def _outcome(self) -> Outcome:
        """Kill the rank that has stopped."""
        with self._ended:
            for rank, process in enumerate(self.ranks):
                if not self.way.startswith("stop") or rank != self.stuck_rank:
                    process.wait(LIMIT_S)
            codes = [process.poll() for process in self.ranks]
        errors, output = (
            [(self.folder / f"{rank}.{kind}").read_text() for rank in range(len(codes))]
            for kind in ("err", "out")
        )
        return Outcome(self.folder, codes, errors, output)


def run_as_under_torchrun(folder: Path, way: str, stuck_rank: int) -> Outcome:
    folder.mkdir()
    result = run(2, way, str(folder), str(stuck_rank), module=WORKER)
    return Outcome(folder, [result.returncode], [result.stderr], [result.stdout])


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """All jobs in parallel: they mostly wait."""
    folder = tmp_path_factory.mktemp("watchdog")
    jobs = {
        "stopped": Job(folder / "stopped", "stop", 3, 2),
        "store stopped": Job(folder / "store_stopped", "stop the store", 2, 0),
        "asleep": Job(folder / "asleep", "asleep", 2, 1),
        "behind": Job(folder / "behind", "behind", 2, 0),
        "ended": Job(folder / "ended", "ended", 2, 1),
        "slow": Job(folder / "slow", "slow", 2, keeper=launcher_store),
        "alone": Job(folder / "alone", "alone", 2, keeper=launcher_store, started=1),
    }
    torchrun = run_as_under_torchrun(folder / "torchrun", "desync", 1)
    return {"torchrun": torchrun, **{name: job.outcome() for name, job in jobs.items()}}


REDUCES, SLEEPS = rf"all_reduce called from {AT} reduce", rf"{AT} fall_asleep"
STUCK = {  # exit codes, the headline, and what the lines below it contain
    "stopped": (
        [1, 1, None],
        r"rank 2: no answer \(process stopped or killed",
        [
            r"rank 2: .*, last heartbeat about \d+ s ago",
            rf"ranks 0-1: step 3 for \d+ s, in {REDUCES}",
            r"run\.timeouts\.step_s=3600",
        ],
    ),
    "store stopped": (
        [None, 1],
        r"rank 1 of 2 .*: rank 0, .* store at 127\.0\.0\.1:.* it does not answer",
        [rf"rank 1: step 3 for \d+ s, in {REDUCES}"],
    ),
    "asleep": (
        [1, 1],
        "rank 1: in no collective, while the others wait$",
        [rf"rank 1: step 3 for \d+ s, at {SLEEPS}"],
    ),
    "behind": (  # that rank's own timeout is far away, and no folder can be made
        [1, 1],
        "rank 0: in no collective, while the others wait$",
        [
            rf"rank 0: evaluation at step 2 for \d+ s, at {SLEEPS}",
            r"step 3 has taken \d+ s on rank 1 of 2, more than run\.timeouts\.step_s=3600",
            r"stacks could not be written to .*/a_file/stuck \(NotADirectoryError: Not a directory\)",
        ],
    ),
    "ended": ([1], "rank 1: ended, but the others go on", []),
    "alone": (
        [1],
        "rank 0 of 2 .*: it has not joined the other processes",
        [
            rf"set-up for \d+ s, in init_process_group called from {AT} main",
            "it waits for all 2 processes to join",
        ],
    ),
    "torchrun": (
        [1],
        "desynchronized collectives$",
        [rf"rank 0: .*, in {REDUCES}", rf"rank 1: .*, in all_gather_object called from {AT} gather_objects"],
    ),
}


@pytest.mark.parametrize("way", STUCK)
def test_the_rank_that_is_stuck_is_named_with_its_place(way: str, outcomes: dict[str, Outcome]) -> None:
    codes, said, below = STUCK[way]
    headline, _, lines = outcomes[way].message.partition("\n")
    assert re.match(f"STUCK: {said}", headline), headline
    assert [pattern for pattern in below if not re.search(pattern, lines)] == [], lines
    assert outcomes[way].codes[: len(codes)] == codes
    assert "STUCK" not in lines


def test_nothing_but_the_message_is_printed_and_stacks_and_message_are_in_files(
    outcomes: dict[str, Outcome],
) -> None:
    """No traceback of a rank whose peers exit sooner, also if one of them hosts the store."""
    stopped, asleep = outcomes["stopped"], outcomes["asleep"]
    errors = [*asleep.errors, *stopped.errors]
    assert [error for error in errors if "STUCK" not in error] == [""] * 3
    assert [error for error in errors if "Traceback" in error] == []
    (noted,) = stopped.folder.glob("on_stuck_*.txt")
    assert noted.read_text().strip() == stopped.message.strip()
    stacks = sorted(path.name for path in (stopped.folder / "stuck").iterdir())
    assert stacks == ["rank-00000.txt", "rank-00001.txt"]
    for rank, function in enumerate(("in all_reduce", "in fall_asleep")):
        text = (asleep.folder / "stuck" / f"rank-{rank:05d}.txt").read_text()
        assert function in text.split("thread MainThread")[1].split("\nthread ")[0]
        assert text.startswith(f"rank {rank} of 2, process ")
        assert "thread watchdog " in text


def test_a_slow_loop_is_left_alone_and_no_thread_is_left(outcomes: dict[str, Outcome]) -> None:
    outcome = outcomes["slow"]
    assert outcome.codes == [0, 0], outcome.errors
    assert not any("STUCK" in error for error in outcome.errors)
    assert all("threads left: []\nfinished" in output for output in outcome.output)


# One rank, whose watchdog would end the process


def alone(timeouts: TimeoutConfig, messages: list[str]) -> AgedWatchdog:
    return AgedWatchdog(timeouts, RankInfo(0, 1, 0, 1, False), messages.append)


def go_through_sections_without_a_time_out() -> tuple[list[str], list[str]]:
    """Return the messages, and the threads that are left."""
    messages: list[str] = []
    watchdog = alone(TimeoutConfig(setup_s=60, step_s=0), messages)
    watchdog.connect()
    for section in ("data", "step"):  # data has no timeout by default
        watchdog.enter(section)  # type: ignore[arg-type]
        watchdog.age(1000)
        watchdog.wait_for_check()
    watchdog.end()
    return messages, [thread.name for thread in threading.enumerate() if "watchdog" in thread.name]


def go_on_while_looked_at() -> list[str]:
    """Return the messages if the main thread's next step begins while the watchdog reads its stack."""
    looked, messages = threading.Event(), list[str]()

    class Late(AgedWatchdog):
        def _report(self) -> RankReport:
            self.enter("step", 2)
            looked.set()
            return super()._report()

    watchdog = Late(TimeoutConfig(step_s=60), RankInfo(0, 1, 0, 1, False), messages.append)
    watchdog.enter("step", 1)
    watchdog.age(1000)
    watchdog.wait_for_check()
    assert looked.is_set()
    watchdog.end()
    return messages


def go_on_after_a_stop() -> list[str]:
    """Return the messages if the process is stopped for longer than its timeout, as by Ctrl-Z or a batch
    system, and continues."""
    messages = list[str]()
    watchdog = alone(TimeoutConfig(step_s=60), messages)
    watchdog.enter("step", 1)
    watchdog.suspend(1000)
    watchdog.wait_for_check()
    watchdog.wait_for_check()
    watchdog.end()
    return messages


def go_on_while_data_still_comes() -> list[str]:
    """Return the messages if a step waits for data for longer than its timeout, of which some comes in time
    again and again."""
    messages, looks, stop = list[str](), iter(range(5)), GracefulShutdown(RunConfig(), print, print)
    watchdog = alone(TimeoutConfig(step_s=60), messages)
    stop.on_fetched = watchdog.restart_clock
    watchdog.enter("step", 1)

    def is_ready(limit_s: float) -> bool:
        watchdog.age(40)
        watchdog.wait_for_check()
        return next(looks) == 4

    assert stop.await_data(is_ready, itertools.count().__next__)
    stop.end()
    watchdog.end()
    return messages


def test_preparing_data_has_a_time_out_of_its_own_0_is_never_and_close_leaves_no_thread() -> None:
    assert run_ranks(1, go_through_sections_without_a_time_out) == [([], [])]
    assert [*map(timeout_key, get_args(Section))] == [
        field.name for field in dataclasses.fields(TimeoutConfig)
    ]


@pytest.mark.parametrize("goes_on", [go_on_while_looked_at, go_on_after_a_stop, go_on_while_data_still_comes])
def test_a_main_thread_that_goes_on_is_not_stuck(goes_on) -> None:
    assert run_ranks(1, goes_on) == [[]]
