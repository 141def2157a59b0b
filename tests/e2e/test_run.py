"""A run as its user sees it: the folder it leaves, the screen, stopping, going on, and mistakes."""

import contextlib
import json
import os
import pty
import random
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest
import torch

from parallel.plan_file import load_plan
from tests.support.launch import EAGER, ROOT, TINY, command, environment, read_metrics, read_status, run, write_text
from train.board_tags import tag_of
from train.config import load_config
from train.data.tokens import load_corpus

CURVE = ("loss", "eval_loss", "grad_norm", "lr")
KEYS = {"step", "loss", "grad_norm", "lr", "tokens_per_s", "tokens_per_s_per_gpu", "step_time_s", "peak_memory_gib",
        "reserved_memory_gib", "data_wait_s", "recompiles"}  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> list[str]:
    return write_text(tmp_path_factory.mktemp("data"))


def arguments(folder: Path, data: list[str], *more: str) -> list[str]:
    return [*TINY, *data, f"--run.dir={folder}", *more]


def curve(folder: Path) -> dict[int, dict[str, float]]:
    return {step: {k: row[k] for k in CURVE if k in row} for step, row in read_metrics(folder).items()}


def wait_for_step(process: subprocess.Popen, folder: Path, step: int) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        if (folder / "metrics.jsonl").exists() and step in read_metrics(folder):
            return
        time.sleep(0.02)
    raise AssertionError(f"step {step} was not reached: {process.communicate()}")


def read_all(terminal: int, into: bytearray) -> None:
    with contextlib.suppress(OSError):  # what reading a terminal whose program has ended raises
        while part := os.read(terminal, 65536):
            into += part


def test_a_run_leaves_a_folder_that_tells_everything(data, tmp_path):
    folder = tmp_path / "run"
    result = run(2, *arguments(folder, data, *EAGER, "--train.steps=6", "--train.eval_every=3", "--checkpoint.every=3"))
    assert result.returncode == 0, result.stderr
    assert result.stderr == "", "nothing on the screen that a user cannot act on"
    assert read_status(folder)["state"] == "finished"
    rows = read_metrics(folder)
    assert sorted(rows) == [0, 1, 2, 3, 4, 5, 6]
    assert all(rows[step].keys() >= KEYS for step in range(1, 7))
    assert [step for step, row in rows.items() if "eval_loss" in row] == [0, 3, 6]
    assert rows[6]["eval_loss"] < rows[0]["eval_loss"]
    assert "mfu" not in rows[6], "a CPU has no known peak, so there is no MFU"
    assert sorted(p.name for p in (folder / "checkpoints").iterdir()) == ["step-00000003", "step-00000006"]
    assert load_config(folder / "config.yaml").train.steps == 6
    assert load_plan(folder / "plan.yaml").mesh.dp_shard == 2
    for words in ("torch 2.", "CPU", "2 processes", "parameters", "layers.[0-1]", "documents", "finished"):
        assert words in result.stdout


def test_tensorboard_reads_what_metrics_jsonl_says(data, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = tmp_path / "run"
    assert run(1, *arguments(folder, data, *EAGER, "--train.steps=4", "--train.eval_every=2")).returncode == 0
    board = EventAccumulator(str(folder / "tb"))
    board.Reload()
    rows = read_metrics(folder)
    for name in (*CURVE, "tokens_per_s", "step_time_s", "data_wait_s", "peak_memory_gib", "recompiles"):
        shown = {event.step: event.value for event in board.Scalars(tag_of(name))}
        assert shown == pytest.approx({step: row[name] for step, row in rows.items() if name in row}, rel=1e-6)
    texts = [board.Tensors(name)[0].tensor_proto.string_val[0].decode() for name in ("config", "plan")]
    assert "global_batch_size: 8" in texts[0]
    assert "dp_shard: 1" in texts[1]


def test_stopped_at_a_random_step_and_resumed_the_curve_is_the_uninterrupted_one_bit_for_bit(data, tmp_path):
    steps = ["--train.steps=40", "--train.eval_every=10", "--checkpoint.every=7", *EAGER]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert run(2, *arguments(whole, data, *steps)).returncode == 0
    process = subprocess.Popen(command(2, *arguments(cut, data, *steps)), cwd=ROOT, env=environment(),
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)  # fmt: skip
    wait_for_step(process, cut, random.randint(2, 20))
    workers = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=True).stdout.split()
    os.kill(int(workers[-1]), signal.SIGTERM)  # one worker, not rank 0: all must agree
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    status = read_status(cut)
    assert status["state"] == "stopped"
    stopped_at = status["step"]
    assert 2 <= stopped_at < 40
    assert (cut / "checkpoints" / f"step-{stopped_at:08d}").is_dir()
    assert f"stopped at step {stopped_at} of 40" in out

    before = len((cut / "metrics.jsonl").read_text().splitlines())
    assert run(2, *arguments(cut, data, *steps)).returncode == 0
    status = read_status(cut)
    assert (status["state"], status["step"], status["resumed_from"], status["reason"]) == ("finished", 40, stopped_at, "")
    first_again = json.loads((cut / "metrics.jsonl").read_text().splitlines()[before])
    assert first_again["step"] == stopped_at + 1, "never a silent restart from 0"
    assert curve(cut) == curve(whole)


def test_one_process_stopped_by_ctrl_c_on_a_terminal_saves_and_exits_75(data, tmp_path):
    folder = tmp_path / "run"
    leader, follower = pty.openpty()
    line = command(1, *arguments(folder, data, *EAGER, "--train.steps=5000", "--checkpoint.every=1000"))
    process = subprocess.Popen(line, cwd=ROOT, env=environment(TERM="xterm"), stdout=follower, stderr=follower)
    os.close(follower)
    screen = bytearray()
    reader = threading.Thread(target=read_all, args=(leader, screen), daemon=True)
    reader.start()
    wait_for_step(process, folder, 5)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 75
    reader.join(timeout=10)
    assert b"Traceback" not in screen
    assert b"/5000" in screen, "a terminal gets the live line"
    status = read_status(folder)
    assert (status["state"], status["reason"]) == ("stopped", "signal SIGINT")
    assert (folder / "checkpoints" / f"step-{status['step']:08d}").is_dir()


def test_a_finished_run_started_again_has_nothing_to_do_and_more_steps_continue_it(data, tmp_path):
    folder = tmp_path / "run"
    base = arguments(folder, data, *EAGER, "--checkpoint.every=2", "--optim.schedule=constant")
    assert run(1, *base, "--train.steps=4").returncode == 0
    again = run(1, *base, "--train.steps=4")
    assert again.returncode == 0
    assert "step 4 of 4" in again.stdout
    assert run(1, *base, "--train.steps=6").returncode == 0
    assert sorted(read_metrics(folder)) == [1, 2, 3, 4, 5, 6]
    assert read_status(folder)["resumed_from"] == 4


def test_a_run_can_be_measured_in_epochs_and_goes_on_into_the_next(data, tmp_path):
    folder = tmp_path / "run"
    shape = ["--train.seq_len=1000", "--model.max_seq_len=1000", "--train.global_batch_size=64", "--train.micro_batch_size=16"]
    assert run(1, *arguments(folder, data, *EAGER, *shape, "--train.epochs=1.5")).returncode == 0
    sequences = (load_corpus(load_config(folder / "config.yaml").data).sources[0].split.tokens - 1) // 1000
    assert read_status(folder)["step"] == int(1.5 * sequences) // 64 > sequences // 64


def test_only_the_newest_checkpoints_are_kept(data, tmp_path):
    folder = tmp_path / "run"
    saving = ["--train.steps=5", "--checkpoint.every=1", "--checkpoint.keep=2"]
    assert run(1, *arguments(folder, data, *EAGER, *saving)).returncode == 0
    assert sorted(p.name for p in (folder / "checkpoints").iterdir()) == ["step-00000004", "step-00000005"]


def test_a_checkpoint_of_another_model_is_refused_with_the_first_differences(data, tmp_path):
    folder = tmp_path / "run"
    base = arguments(folder, data, *EAGER, "--checkpoint.every=2", "--train.steps=2")
    assert run(1, *base).returncode == 0
    result = run(1, *base, "--model.ffn_dim=96")
    assert result.returncode == 2
    assert "feed_forward.w1.weight: here float32[96, 32], saved float32[64, 32]" in result.stderr
    assert "Traceback" not in result.stderr


def test_resume_on_another_mesh_goes_on_with_the_same_data(data, tmp_path):
    whole, moved = tmp_path / "whole", tmp_path / "moved"
    base = [*EAGER, "--checkpoint.every=3", "--optim.schedule=constant"]
    assert run(1, *arguments(whole, data, *base, "--train.steps=6")).returncode == 0
    assert run(2, *arguments(moved, data, *base, "--train.steps=3")).returncode == 0
    assert run(1, *arguments(moved, data, *base, "--train.steps=6")).returncode == 0
    assert read_status(moved)["resumed_from"] == 3
    want, got = curve(whole), curve(moved)
    assert [got[step]["loss"] for step in range(1, 7)] == pytest.approx([want[step]["loss"] for step in range(1, 7)], abs=5e-5)


def test_a_checkpoint_that_has_lost_a_shard_or_a_byte_is_refused(data, tmp_path):
    folder = tmp_path / "run"
    base = arguments(folder, data, *EAGER, "--checkpoint.every=2")
    assert run(2, *base, "--train.steps=2").returncode == 0
    first, second = sorted((folder / "checkpoints" / "step-00000002").glob("*.safetensors"))
    os.truncate(second, second.stat().st_size - 1)
    first.unlink()
    result = run(1, *base, "--train.steps=4")
    assert result.returncode == 2
    assert f"{first.name} is missing" in result.stderr
    assert second.name in result.stderr
    assert "Traceback" not in result.stderr


def test_a_new_start_beside_newer_checkpoints_is_refused_and_nothing_is_lost(data, tmp_path):
    folder = tmp_path / "run"
    base = arguments(folder, data, *EAGER, "--checkpoint.every=2", "--train.steps=4")
    assert run(1, *base).returncode == 0
    result = run(1, *base, "--checkpoint.resume=none")
    assert result.returncode == 2
    assert "holds step-00000002" in result.stderr
    assert "--checkpoint.resume=auto goes on from the newest" in result.stderr
    assert len(list((folder / "checkpoints").iterdir())) == 2


def test_held_out_sequences_that_do_not_divide_are_padded_with_one_sequence_per_rank(data, tmp_path):
    losses = []
    for processes in (1, 2):
        folder = tmp_path / str(processes)
        counts = ["--train.eval_every=1", "--train.eval_sequences=13", "--train.steps=1"]
        assert run(processes, *arguments(folder, data, *EAGER, *counts), "--train.micro_batch_size=1").returncode == 0
        losses.append(read_metrics(folder)[0]["eval_loss"])
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)


@pytest.mark.parametrize(("mistake", "words"), [
    (["--config=lama_debug.yaml"], ["lama_debug.yaml", "Did you mean llama_debug.yaml?"]),
    (["--train.stepz=3"], ["unknown key train.stepz", "Did you mean train.steps?"]),
    (["--train.steps=many"], ["train.steps", "many", "whole number"]),
    (["--parallel.dp_shard=3"], ["dp_shard=3", "this run has 1"]),
    (["--parallel.param_dtype=float16"], ["float16", "bfloat16"]),
    (["--data.source=/nowhere"], ["data.source=/nowhere", "stdlib"]),
    (["--model.vocab_size=100"], ["model.vocab_size=100", "257"]),
    (["--train.seq_len=500000", "--model.max_seq_len=500000"], ["sequence", "train.seq_len=500000"]),
    (["--checkpoint.resume=/nowhere/step-00000001"], ["/nowhere/step-00000001", "not a checkpoint"]),
    (["--parallel.compile.enabled=true", "--parallel.compile.backend=nonsense"], ["backend=nonsense", "no backend"]),
    (["--parallel.compile.enabled=true", "--parallel.compile.mode=nonsense"], ["mode=nonsense", "max-autotune"]),
    (["--parallel.compile.enabled=true", "--parallel.compile.cache_dir=/dev/null/c"], ["cache_dir=/dev/null/c", "name another"]),
    (["--run.dir=/dev/null/run"], ["run.dir=/dev/null/run", "name another"]),
    pytest.param(["--run.device=cuda"], ["run.device=cuda needs 1 GPUs", "--run.device=cpu"],
                 marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")),
    (["--parallel.plan=/nowhere.yaml"], ["/nowhere.yaml"]),
    (["--config=llama_405b.yaml"], ["GiB per process", "Fits:", "here, --config llama_"]),
])  # fmt: skip
def test_a_mistake_is_one_clear_message_and_exit_code_2(mistake, words, data, tmp_path):
    small = [] if mistake[0].startswith("--config=llama_4") else [*TINY, *data]
    started = time.monotonic()
    result = run(1, *small, f"--run.dir={tmp_path / 'run'}", *EAGER, *mistake)
    assert result.returncode == 2, result.stderr
    assert result.stdout == "" or "sequence" in words
    assert "Traceback" not in result.stderr
    for word in words:
        assert word in result.stderr
    assert time.monotonic() - started < 60


def test_under_torchrun_the_first_thing_on_the_screen_is_our_message_and_its_report_carries_it(tmp_path):
    result = run(2, "--config=llama_debug.yaml", "--train.stepz=3", f"--run.dir={tmp_path / 'run'}")
    assert result.returncode == 1, "torchrun's own exit code"
    assert result.stderr.startswith("ConfigError: unknown key train.stepz")
    assert result.stderr.count("\nConfigError: unknown key") <= 1, "rank 0 alone speaks; torchrun's report repeats it"
    assert "Did you mean train.steps?" in result.stderr


def test_without_a_compiler_the_message_names_both_ways_out(data, tmp_path):
    result = run(1, *arguments(tmp_path / "run", data, "--train.steps=1"), PATH=str(tmp_path))
    assert result.returncode == 2, result.stderr
    assert "g++" in result.stderr
    assert "--parallel.compile.enabled=false" in result.stderr
    assert "Traceback" not in result.stderr
