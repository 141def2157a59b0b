"""Asked to stop by a signal, at any moment of the journey: saved at the agreed step, or ended at once with nothing spoilt."""

import os
import signal
import time

import pytest

from tests.e2e.faults import LIMIT_S, check_commits, check_stopped, partials, started, steps_of, tiny, wait, wait_for_step
from tests.support.launch import read_metrics, read_status, write_text

LARGER = ["--model.dim=256", "--model.n_layers=8", "--model.n_heads=8", "--model.n_kv_heads=8", "--model.ffn_dim=1024"]
TERM = "signal SIGTERM"


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> list[str]:
    return write_text(tmp_path_factory.mktemp("data"))


def test_sigterm_to_torchrun_saves_and_is_no_failure(data, tmp_path):
    folder = tmp_path / "run"
    with started(2, folder, tiny(data, "--checkpoint.every=1000")) as launch:
        wait_for_step(launch, folder, 3)
        assert len(launch.workers()) == 2
        launch.process.send_signal(signal.SIGTERM)  # it passes the signal on to all workers
        assert launch.wait_until_ended(LIMIT_S) < 30
    assert check_stopped(folder, TERM) >= 3
    assert "saved; the same command goes on" in launch.output()


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_sigterm_to_one_worker_stops_all_and_torchrun_does_not_restart_them(rank, data, tmp_path):
    folder = tmp_path / "run"
    restarts = ["--standalone", "--nproc-per-node=2", "--max-restarts=3"]
    with started(2, folder, tiny(data, "--checkpoint.every=1000"), restarts) as launch:
        wait_for_step(launch, folder, 3)
        os.kill(launch.workers()[rank], signal.SIGTERM)
        launch.wait_until_ended(LIMIT_S)
    assert launch.process.returncode == 0, launch.output()
    assert check_stopped(folder, TERM) >= 3


@pytest.mark.slow
def test_alone_the_exit_code_of_a_stop_in_an_evaluation_is_75(data, tmp_path):
    folder = tmp_path / "run"
    evaluation = ["--train.eval_every=5", "--train.eval_sequences=800", "--checkpoint.every=1000"]
    with started(1, folder, tiny(data, *evaluation)) as launch:
        wait_for_step(launch, folder, 4)
        time.sleep(0.4)  # a step takes milliseconds, the evaluation at step 5 seconds
        reported = steps_of(folder)
        launch.process.send_signal(signal.SIGTERM)
        launch.wait_until_ended(LIMIT_S)
    assert launch.process.returncode == 75, launch.output()
    assert max(reported) == 4, "the signal came during the evaluation"
    assert check_stopped(folder, TERM) in (5, 6)
    assert "eval_loss" in read_metrics(folder)[5], "which was not cut short"


def test_a_second_signal_ends_it_at_once_and_the_last_commit_is_as_it_was(data, tmp_path):
    folder = tmp_path / "run"
    long_steps = ["--train.global_batch_size=1000", "--checkpoint.every=1", "--checkpoint.asynchronous=false"]
    with started(1, folder, tiny(data, *long_steps)) as launch:
        wait(launch, lambda: check_commits(folder) == 1)
        launch.process.send_signal(signal.SIGTERM)
        time.sleep(0.8)  # within half a second it would be the same request, delivered twice
        launch.process.send_signal(signal.SIGTERM)
        assert launch.wait_until_ended(LIMIT_S) < 3, "a step takes longer"
    assert launch.process.returncode == 128 + signal.SIGTERM
    assert check_commits(folder) == 1
    status = read_status(folder)
    assert (status["state"], status["reason"]) == ("stopped", f"{TERM}, then {TERM}: ended at once, without saving")
    assert "what was committed is intact" in launch.output()


@pytest.mark.slow
def test_sigterm_in_the_compiler_stops_after_the_first_step(data, tmp_path):
    folder, cache = tmp_path / "run", tmp_path / "compiled"
    compiled = [argument for argument in tiny(data, "--checkpoint.every=1000") if "compile.enabled" not in argument]
    with started(1, folder, [*compiled, f"--parallel.compile.cache_dir={cache}"]) as launch:
        wait(launch, lambda: any(path.is_file() and not path.name.startswith("work-") for path in cache.rglob("*")))
        assert not steps_of(folder), "it compiles"
        launch.process.send_signal(signal.SIGTERM)
        launch.wait_until_ended(LIMIT_S)
    assert launch.process.returncode == 75, launch.output()
    assert check_stopped(folder, TERM) == 1


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", ["true", "false"])
def test_sigterm_in_a_save_lets_it_be_committed_and_saves_once_more(asynchronous, data, tmp_path):
    folder = tmp_path / "run"
    saving = [*LARGER, "--checkpoint.every=2", f"--checkpoint.asynchronous={asynchronous}", "--checkpoint.keep=0"]
    with started(2, folder, tiny(data, *saving)) as launch:
        wait(launch, lambda: partials(folder))
        launch.process.send_signal(signal.SIGTERM)
        half = partials(folder)
        launch.wait_until_ended(LIMIT_S)
    assert half, "the signal came during the save"
    assert check_stopped(folder, TERM) > 2
    committed = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert committed[0] == "step-00000002", "the save that was under way"


@pytest.mark.slow
def test_a_stop_that_cannot_be_agreed_ends_after_the_grace_period(data, tmp_path):
    folder = tmp_path / "run"
    with started(2, folder, tiny(data, "--checkpoint.every=2", "--run.grace_s=3")) as launch:
        wait_for_step(launch, folder, 5)
        first, second = launch.workers()[0], launch.workers()[1]
        os.kill(second, signal.SIGSTOP)
        os.kill(first, signal.SIGTERM)
        asked_s = time.monotonic()
        wait(launch, lambda: 0 not in launch.workers())
        assert 2.5 < time.monotonic() - asked_s < 10
        os.kill(second, signal.SIGCONT)  # else torchrun waits 30 s for it
        launch.wait_until_ended(LIMIT_S)
    assert "run.grace_s=3 s were not enough to stop" in launch.output()
    assert read_status(folder)["state"] == "stopped"
    assert check_commits(folder) >= 2
