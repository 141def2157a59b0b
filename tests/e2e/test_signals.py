"""A signal in any phase of a run: the run saves at the agreed step, or ends immediately without damage."""

import os
import signal
import time
from pathlib import Path

import pytest

from meshwright.train.checkpoint.commit import list_checkpoints
from tests.support.launch import Launch, read_metrics, read_status, run
from tests.support.run_faults import (
    LIMIT_S,
    check_commits,
    check_stopped,
    partials,
    started,
    steps_of,
    tiny,
    torchrun,
    wait,
    wait_for_commit,
    wait_for_step,
    workers,
)

LARGER = ["--model.dim=256", "--model.n_layers=4", "--model.ffn_dim=1024"]
TERM = "signal SIGTERM"


def cpu_s(pid: int) -> float:
    """Seconds of CPU that a process has used so far (proc(5), fields 14 and 15 of stat)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_sigterm_to_torchrun_saves(data, tmp_path):
    folder = tmp_path / "run"
    with torchrun(
        folder, ["--standalone", "--nproc-per-node=2"], tiny(data, "--checkpoint.every=1000")
    ) as launch:
        wait_for_step(launch, folder, 3)
        assert len(workers(launch)) == 2
        # torchrun forwards the signal to all workers, and ends with its own traceback
        launch.send_signal(signal.SIGTERM)
        launch.wait(LIMIT_S)
    assert check_stopped(folder, TERM) >= 3
    assert f"saved in {list_checkpoints(folder / 'checkpoints')[-1]}; the same command" in launch.output()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("every", [5, 4])
def test_nothing_comes_between_a_stop_and_its_save_and_no_evaluation_between_a_step_and_its_save(
    every, data, tmp_path
):
    """The evaluation after step 5 would take many seconds, a step takes milliseconds. The exit code of one
    process is 75."""
    folder = tmp_path / "run"
    long = ["--train.eval_every=5", "--train.eval_sequences=0", "--data.eval_fraction=0.9"]
    step_0 = ["--train.eval_every=0", "--checkpoint.every=1"]  # which a resumed run does not evaluate
    assert run(1, *tiny(data, *long, *step_0, steps=1), f"--run.dir={folder}").returncode == 0
    with started(1, folder, tiny(data, *long, f"--checkpoint.every={every}")) as launch:
        wait_for_commit(launch, folder, every)
        launch.send_signal(signal.SIGTERM)
        assert launch.wait(LIMIT_S) == 75, launch.output()
    assert check_stopped(folder, TERM) in (4, 5)
    assert not any("eval_loss" in row for row in read_metrics(folder).values())


def test_a_second_signal_ends_it_at_once_and_the_last_commit_is_as_it_was(data, tmp_path):
    folder = tmp_path / "run"
    assert run(1, *tiny(data, "--checkpoint.every=1", steps=1), f"--run.dir={folder}").returncode == 0
    assert check_commits(folder) == 1
    long_step = "--train.global_batch_size=20000"  # takes minutes
    with started(1, folder, tiny(data, "--checkpoint.every=1", long_step)) as launch:
        wait(launch, lambda: read_status(folder)["resumed_from"] == 1)
        used_s = cpu_s(launch.ranks[0].pid)
        # the rest of the setup takes far less
        wait(launch, lambda: cpu_s(launch.ranks[0].pid) > used_s + 0.5)
        deadline_s = time.monotonic() + LIMIT_S
        while launch.running() and time.monotonic() < deadline_s:
            launch.send_signal(signal.SIGTERM)  # signals within half a second count as one request
            time.sleep(0.05)
        assert launch.wait(LIMIT_S) == 128 + signal.SIGTERM, launch.output()
    assert check_commits(folder) == 1, "the step was not waited for"
    assert steps_of(folder) <= {1}
    status = read_status(folder)
    assert status["state"] == "stopped"
    assert status["reason"].startswith(f"{TERM}, then {TERM}: ")
    assert "without saving" in status["reason"]
    assert "intact" in launch.output()


@pytest.mark.slow
@pytest.mark.sampled(10)
def test_sigterm_in_the_compiler_stops_after_the_first_step(data, tmp_path):
    folder, cache = tmp_path / "run", tmp_path / "compiled"
    compiled = [
        argument for argument in tiny(data, "--checkpoint.every=1000") if "compile.enabled" not in argument
    ]
    with started(
        1, folder, [*compiled, "--model.n_layers=1", f"--parallel.compile.cache_dir={cache}"]
    ) as launch:
        wait(
            launch,
            lambda: any(path.is_file() and "work-" not in path.name for path in cache.rglob("*")),
        )
        assert not steps_of(folder), "the run is still compiling"
        launch.send_signal(signal.SIGTERM)
        assert launch.wait(LIMIT_S) == 75, launch.output()
    assert check_stopped(folder, TERM) == 1


@pytest.mark.slow
@pytest.mark.sampled(10)
@pytest.mark.parametrize("asynchronous", ["true", "false"])
def test_sigterm_in_a_save_lets_it_be_committed_and_saves_once_more(asynchronous, data, tmp_path):
    folder = tmp_path / "run"
    saving = [*LARGER, "--checkpoint.every=2", "--checkpoint.keep=0"]
    saving += [f"--checkpoint.asynchronous={asynchronous}"]
    with started(2, folder, tiny(data, *saving)) as launch:
        half = hold_in_a_save(launch, folder)
        launch.send_signal(signal.SIGTERM)
        launch.send_signal(signal.SIGCONT)
        launch.wait(LIMIT_S)
    committed = [path.name for path in list_checkpoints(folder / "checkpoints")]
    assert half in committed, "the save in progress is committed"
    assert half < committed[-1] == f"step-{check_stopped(folder, TERM):08d}"


def hold_in_a_save(launch: Launch, folder: Path) -> str:
    """Stop all ranks while a checkpoint is being written; return the name it will have. Before the first step
    a run only tries to save."""
    wait_for_step(launch, folder, 1)
    while True:
        wait(launch, lambda: partials(folder))
        launch.send_signal(signal.SIGSTOP)
        wait(launch, lambda: all(is_held(rank.pid) for rank in launch.ranks))
        if half := partials(folder):
            return half[0].name.removeprefix(".").removesuffix(".partial")
        launch.send_signal(signal.SIGCONT)


def is_held(pid: int) -> bool:
    """Whether all threads of a process are stopped (proc(5), field 3 of stat)."""
    return all(
        path.read_text().rpartition(")")[2].split()[0] == "T"
        for path in Path(f"/proc/{pid}/task").glob("*/stat")
    )
