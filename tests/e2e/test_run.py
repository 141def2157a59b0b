"""A run as its user sees it: its output folder, the screen, stop and resume, and user errors."""

import contextlib
import fcntl
import os
import pty
import random
import shutil
import signal
import termios
import threading
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from meshwright.parallel.plan.serialize import load_plan
from meshwright.train.config_parser import load_config
from meshwright.train.main import main
from meshwright.train.metrics.tensorboard import tag_of
from tests.e2e.conftest import SMALL
from tests.support.forks import environment, fork
from tests.support.launch import TINY, Launch, read_metrics, read_status, rows_in, run, run_command
from tests.support.run_faults import LIMIT_S, started, tiny, wait_for_step

CURVE = ("loss", "eval_loss", "grad_norm", "lr")
KEYS = {
    "step",
    "loss",
    "grad_norm",
    "lr",
    "tokens_per_s",
    "tokens_per_s_per_gpu",
    "step_time_s",
    "peak_memory_gib",
    "reserved_memory_gib",
    "data_wait_s",
    "recompiles",
}


@pytest.fixture
def again(two_ranks: tuple[Path, str, str], tmp_path: Path) -> Path:
    """A copy of the folder of the run of six steps on two ranks."""
    return shutil.copytree(two_ranks[0], tmp_path / "again")


def test_a_run_leaves_a_folder_that_tells_everything(two_ranks):
    folder, out, err = two_ranks
    assert err == "", "stderr contains only messages that a user can act on"
    assert read_status(folder)["state"] == "finished"
    metrics = read_metrics(folder)
    assert sorted(metrics) == [0, 1, 2, 3, 4, 5, 6]
    assert all(metrics[step].keys() >= KEYS for step in range(1, 7))
    assert [step for step, row in metrics.items() if "eval_loss" in row] == [0, 3, 6]
    assert metrics[6]["eval_loss"] < metrics[0]["eval_loss"]
    assert "mfu" not in metrics[6], "a CPU has no known peak, so there is no MFU"
    kept = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert kept == ["step-00000004", "step-00000006"], "checkpoint.keep=2"
    assert load_config(folder / "config.yaml").train.steps == 6
    assert load_plan(folder / "plan.yaml").mesh.dp_shard == 2
    for fact in ("torch 2.", "CPU", "2 processes", "parameters", "layers.[0-1]", "documents", "finished"):
        assert fact in out


def test_tensorboard_reads_what_metrics_jsonl_says(two_ranks):
    folder = two_ranks[0]
    board = EventAccumulator(str(folder / "tb")).Reload()
    metrics = read_metrics(folder)
    for name in (*CURVE, "tokens_per_s", "step_time_s", "data_wait_s", "peak_memory_gib", "recompiles"):
        shown = {event.step: event.value for event in board.Scalars(tag_of(name))}
        assert shown == pytest.approx(
            {step: row[name] for step, row in metrics.items() if name in row}, rel=1e-6
        )
    texts = [board.Tensors(name)[0].tensor_proto.string_val[0].decode() for name in ("config", "plan")]
    assert "global_batch_size: 8" in texts[0]
    assert "dp_shard: 2" in texts[1]


def test_a_finished_run_has_nothing_to_do_and_more_steps_continue_it_on_another_mesh(data, again, tmp_path):
    keys = [*SMALL, *data, "--train.eval_every=3", "--train.eval_sequences=13"]
    done = run(1, *keys, "--train.steps=6", f"--run.dir={again}")
    assert done.returncode == 0
    assert "step 6 of 6" in done.stdout
    assert len(rows_in(again)) == 7
    assert run(1, *keys, "--train.steps=7", "--checkpoint.every=2", f"--run.dir={again}").returncode == 0
    assert read_status(again)["resumed_from"] == 6
    assert run(1, *keys, "--train.steps=3", f"--run.dir={tmp_path / 'alone'}").returncode == 0
    expected, got = read_metrics(tmp_path / "alone"), read_metrics(again)
    assert sorted(got) == list(range(8))
    assert [got[step]["loss"] for step in (1, 2, 3)] == pytest.approx(
        [expected[step]["loss"] for step in (1, 2, 3)], abs=5e-5
    )
    # Thirteen held-out sequences, in batches of two per rank.
    assert got[3]["eval_loss"] == pytest.approx(expected[3]["eval_loss"], abs=5e-5)
    assert got[0]["eval_loss"] == pytest.approx(expected[0]["eval_loss"], abs=1e-6), "the same weights"


def test_stopped_at_a_random_step_and_resumed_the_curve_is_the_uninterrupted_one_bit_for_bit(data, tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    saving = ["--train.eval_every=5", "--train.eval_sequences=8", "--checkpoint.every=7"]
    signal_step = random.Random(os.environ["MESHWRIGHT_TESTS_SEED"]).randint(2, 8)
    with started(2, cut, tiny(data, *saving)) as launch:
        wait_for_step(launch, cut, signal_step)
        launch.ranks[1].send_signal(signal.SIGTERM)  # not rank 0: all must agree
        assert launch.wait(LIMIT_S) == 0, launch.output()
    status = read_status(cut)
    stopped_at = status["step"]
    assert (status["state"], status["reason"]) == ("stopped", "signal SIGTERM")
    assert stopped_at >= signal_step
    assert (cut / "checkpoints" / f"step-{stopped_at:08d}").is_dir()
    assert f"stopped at step {stopped_at} of " in launch.output()
    before, last = len(rows_in(cut)), stopped_at + 2
    for folder in (cut, whole):
        assert run(2, *tiny(data, *saving, steps=last), f"--run.dir={folder}").returncode == 0
    status = read_status(cut)
    assert (status["state"], status["step"], status["resumed_from"], status["reason"]) == (
        "finished",
        last,
        stopped_at,
        "",
    )
    assert rows_in(cut)[before]["step"] == stopped_at + 1, "never a silent restart from 0"
    got, expected = (
        {step: [row.get(key) for key in CURVE] for step, row in read_metrics(folder).items()}
        for folder in (cut, whole)
    )
    expected[stopped_at][1] = None  # a stop does not evaluate
    assert got == expected, f"signal at step {signal_step}"


def on_terminal(*arguments: str) -> None:
    """Train as the foreground program of the terminal on stdout."""
    os.setsid()
    fcntl.ioctl(1, termios.TIOCSCTTY, 0)
    main(arguments)


def test_one_process_stopped_by_ctrl_c_on_a_terminal_saves_and_exits_75(data, tmp_path):
    folder, screen = tmp_path / "run", bytearray()
    leader, follower = pty.openpty()
    terminal = Path(os.ttyname(follower))
    process = fork(
        on_terminal,
        *tiny(data, "--checkpoint.every=1000"),
        f"--run.dir={folder}",
        output=terminal,
        env=environment(TERM="xterm"),
    )
    reader = threading.Thread(target=read_all, args=(leader, screen), daemon=True)
    reader.start()
    try:
        wait_for_step(Launch([process], Path(os.devnull)), folder, 5)
        os.write(leader, b"\x03")
        assert process.wait(timeout=LIMIT_S) == 75, screen.decode()
    finally:
        process.kill()
        os.close(follower)
        reader.join(LIMIT_S)
    assert not reader.is_alive(), "a process still has the terminal open"
    os.close(leader)
    assert b"Traceback" not in screen
    assert b"/100000" in screen, "a terminal shows the progress bar"
    status = read_status(folder)
    assert (status["state"], status["reason"]) == ("stopped", "signal SIGINT")
    assert (folder / "checkpoints" / f"step-{status['step']:08d}").is_dir()


def read_all(terminal: int, into: bytearray) -> None:
    with contextlib.suppress(OSError):  # reading a terminal raises it when no program has it open
        while part := os.read(terminal, 65536):
            into += part


@pytest.mark.slow
@pytest.mark.sampled(10)
def test_a_model_that_does_not_fit_is_refused_with_what_would(data, tmp_path):
    # With an eighth of the machine's memory few configs fit, and trying those that fit takes long.
    result = run(
        1, *SMALL, *data, "--model.ffn_dim=20000000000", f"--run.dir={tmp_path / 'run'}", LOCAL_WORLD_SIZE="8"
    )
    assert (result.returncode, result.stdout) == (2, ""), result.stderr
    assert result.stderr.startswith("PlanError: this plan needs ")
    assert "Traceback" not in result.stderr
    for words in ("GiB per process", "Fits:", "here, --config llama_"):
        assert words in result.stderr


@pytest.mark.slow
@pytest.mark.sampled(10)
def test_under_torchrun_the_first_thing_on_the_screen_is_our_message_and_its_report_carries_it(tmp_path):
    result = run_command(2, "--config=llama_debug.yaml", "--train.stepz=3", f"--run.dir={tmp_path / 'run'}")
    assert result.returncode == 1, "torchrun's own exit code"
    said = "ConfigError: the command line: unknown key train.stepz"
    assert result.stderr.startswith(said)
    assert result.stderr.count(f"\n{said}") <= 1, "only rank 0 prints it; torchrun's report repeats it"
    assert "Did you mean train.steps?" in result.stderr
    report = result.stderr.partition("Root Cause")[2]
    assert "unknown key train.stepz" in report


def test_without_a_compiler_the_message_names_both_ways_out(data, tmp_path):
    result = run(1, *TINY, *data, "--train.steps=1", f"--run.dir={tmp_path / 'run'}", PATH=str(tmp_path))
    assert result.returncode == 2, result.stderr
    assert "g++" in result.stderr
    assert "--parallel.compile.enabled=false" in result.stderr
    assert "Traceback" not in result.stderr
