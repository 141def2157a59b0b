"""Hangs: real processes that stop, sleep or wait forever, and the message made from their reports."""

import dataclasses
import math
import re
import shutil
import threading
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import pytest

from meshwright.train.config import TimeoutConfig, bounded, check_bounds
from meshwright.train.distributed.ranks import RankInfo
from meshwright.train.fault_tolerance.hang_diagnosis import RankReport
from meshwright.train.fault_tolerance.watchdog import KEYS, Section
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


def test_a_stopped_rank_is_named(outcomes: dict[str, Outcome]) -> None:
    outcome = outcomes["stopped"]
    first = outcome.message.splitlines()[0]
    assert re.match(
        r"STUCK: rank 2 does not answer .*no heartbeat for about \d+ s: process stopped or killed", first
    ), first
    assert re.search(rf"ranks 0-1: step 3 for \d+ s, in all_reduce called from {AT} reduce", outcome.message)
    assert "run.timeouts.step_s=3600" in outcome.message
    assert outcome.codes == [1, 1, None]
    (noted,) = outcome.folder.glob("on_stuck_*.txt")
    assert noted.read_text().strip() == outcome.message.strip()
    stacks = sorted(path.name for path in (outcome.folder / "stuck").iterdir())
    assert stacks == ["rank-00000.txt", "rank-00001.txt"]


def test_the_rank_that_keeps_the_store_is_named_when_it_stops(outcomes: dict[str, Outcome]) -> None:
    outcome = outcomes["store stopped"]
    assert re.match(r"STUCK: rank 1 of 2 .*: rank 0, .* store at 127\.0\.0\.1:", outcome.message)
    assert "it does not answer" in outcome.message
    assert re.search(r"rank 1: step 3 for \d+ s, in all_reduce called from", outcome.message)
    assert outcome.codes == [None, 1]


def test_a_rank_asleep_in_a_function_of_ours_is_named_with_it(outcomes: dict[str, Outcome]) -> None:
    outcome = outcomes["asleep"]
    assert re.match(
        rf"STUCK: rank 1 is at {AT} fall_asleep, .*rank 0 waits in all_reduce \({AT} reduce\)\n",
        outcome.message,
    )
    assert "in default_pg of ranks 0-1: 2 by rank 1; 3 by rank 0" in outcome.message
    assert re.search(rf"rank 1: .*{AT} main > {AT} go_wrong", outcome.message)
    assert outcome.codes == [1, 1]
    for rank, function in enumerate(("in all_reduce", "in fall_asleep")):
        stacks = (outcome.folder / "stuck" / f"rank-{rank:05d}.txt").read_text()
        assert function in stacks.split("thread MainThread")[1].split("\nthread ")[0]
        assert stacks.startswith(f"rank {rank} of 2, process ")
        assert "thread watchdog " in stacks


def test_nothing_but_the_message_is_printed(outcomes: dict[str, Outcome]) -> None:
    """No traceback of a rank whose peers exit sooner, also if one of them hosts the store."""
    errors = [error for name in ("asleep", "stopped") for error in outcomes[name].errors]
    assert [error for error in errors if "STUCK" not in error] == [""] * 3
    assert [error for error in errors if "Traceback" in error] == []


def test_ranks_in_different_collectives_are_named_as_under_torchrun(outcomes: dict[str, Outcome]) -> None:
    outcome = outcomes["torchrun"]
    assert re.search(
        rf"STUCK: desynchronized collectives: all_reduce called from {AT} reduce by rank 0, "
        rf"all_gather_object called from {AT} gather_objects by rank 1\n",
        outcome.message,
    )
    assert outcome.message.count("STUCK") == 1
    assert outcome.codes == [1]


def test_a_rank_in_an_earlier_section_is_named_even_where_no_folder_can_be_made(
    outcomes: dict[str, Outcome],
) -> None:
    """That rank's own timeout is far away."""
    outcome = outcomes["behind"]
    behind = rf"STUCK: rank 0 is behind, in evaluation at step 2, at {AT} fall_asleep, .*rank 1 waits in "
    assert re.match(f"{behind}all_reduce", outcome.message)
    taken = r"step 3 has taken \d+ s on rank 1 of 2, more than run.timeouts.step_s=3600"
    assert re.search(taken, outcome.message)
    unwritten = r"stacks could not be written to .*/a_file/stuck \(NotADirectoryError: Not a directory\)"
    assert re.search(unwritten, outcome.message)
    assert outcome.codes == [1, 1]


def test_a_rank_that_ended_too_early_is_named(outcomes: dict[str, Outcome]) -> None:
    outcome = outcomes["ended"]
    assert re.match("STUCK: rank 1 has ended, .*the last step", outcome.message)
    assert outcome.codes[0] == 1


def test_a_slow_loop_is_left_alone_and_no_thread_is_left(outcomes: dict[str, Outcome]) -> None:
    outcome = outcomes["slow"]
    assert outcome.codes == [0, 0], outcome.errors
    assert not any("STUCK" in error for error in outcome.errors)
    assert all("threads left: []\nfinished" in output for output in outcome.output)


def test_a_rank_that_waits_for_others_to_join_says_so(outcomes: dict[str, Outcome]) -> None:
    outcome = outcomes["alone"]
    assert re.match("STUCK: rank 0 of 2 .*: it has not joined the other processes", outcome.message)
    assert re.search(rf"set-up for \d+ s, in init_process_group called from {AT} main", outcome.message)
    assert "it waits for all 2 processes to join" in outcome.message
    assert outcome.codes == [1]


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
    watchdog.close()
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
    watchdog.close()
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
    watchdog.close()
    return messages


def test_preparing_data_has_a_time_out_of_its_own_0_is_never_and_close_leaves_no_thread() -> None:
    assert run_ranks(1, go_through_sections_without_a_time_out) == [([], [])]
    assert tuple(KEYS) == get_args(Section)
    assert [*KEYS.values()] == [field.name for field in dataclasses.fields(TimeoutConfig)]


@pytest.mark.parametrize("goes_on", [go_on_while_looked_at, go_on_after_a_stop])
def test_a_main_thread_that_goes_on_is_not_stuck(goes_on) -> None:
    assert run_ranks(1, goes_on) == [[]]


def test_bounds_hold_in_nested_sections() -> None:
    @dataclass(frozen=True)
    class Outer:
        timeouts: TimeoutConfig
        grace_s: float = bounded(1.0, low=0)

    check_bounds("run", Outer(TimeoutConfig(step_s=0)))
    for key, value in (("data_s", -1), ("step_s", -1), ("setup_s", math.nan)):
        with pytest.raises(ValueError, match=rf"^run\.timeouts\.{key}={value} must lie between 0 and"):
            check_bounds("run", Outer(TimeoutConfig(**{key: value})))
