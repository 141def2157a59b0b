"""The commands of a new user with GPUs, on fake GPUs: complete runs."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from meshwright.tools.dryrun import log
from meshwright.tools.dryrun.install import ROOT, FakeGpu
from meshwright.tools.dryrun.log import Call
from tests.fake_gpu.calls import devices, refused, stream_waits, unimplemented
from tests.fake_gpu.commands import run, start
from tests.support.launch import EAGER, LIMIT_S, TINY, read_metrics, read_status, write_text

pytestmark = [pytest.mark.slow, pytest.mark.sampled(10, day=6)]
# head dim 16, which cuDNN requires
HEADS = ["--model.n_heads=2", "--model.n_kv_heads=1", "--parallel.param_dtype=bfloat16"]
TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m")
FIRST, LAST = 6, 9  # profiled steps
BATCH_BYTES = 2 * 32 * 8  # int64[2, 32] of tokens or targets (TINY)
SAVED_BYTES = 32 * 4  # TINY's smallest parameter
STEP_LAUNCHES = 100  # fewer than the launches of a step


@pytest.fixture
def data(tmp_path: Path) -> list[str]:
    return write_text(tmp_path)


def batches_awaited(calls: Sequence[Call]) -> int:
    """Return how often the step's stream waits for the stream on which batches are copied."""
    (stream,) = {
        c.stream
        for c in calls
        if c.kind == "memcpy" and c.words == ("HtoD", str(BATCH_BYTES), "pinned") and c.stream
    }
    return stream_waits(calls, calls)[0, stream]


def saves_awaited(calls: Sequence[Call]) -> bool:
    """Return whether the host synchronizes the device after each save's copies to page-locked memory, before
    any other wait."""
    copied = saved = False
    for call in calls:
        if (
            call.kind == "memcpy"
            and call.words[::2] == ("DtoH", "pinned")
            and int(call.words[1]) >= SAVED_BYTES
        ):
            copied = saved = True
        elif call.kind in log.WAITS and copied:
            if call.kind != "device_sync":
                return False
            copied = False
    return saved and not copied


def launches_before_flags(calls: Sequence[Call]) -> list[int]:
    """Return the launches between the recording of an event and the wait for it, for each wait: those of a
    full step if the host is a step ahead."""
    launches, at = 0, dict[str, int]()
    counts = []
    for call in calls:
        launches += call.kind in log.LAUNCHES
        if call.kind == "record":
            at[call.words[0]] = launches
        elif call.kind == "event_sync":
            counts.append(launches - at[call.words[0]])
    return counts


def test_two_ranks_train_save_and_profile_each_on_its_own_gpu(
    fake_gpu: FakeGpu, data: list[str], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    keys = [
        "--train.steps=12",
        "--train.eval_every=6",
        "--checkpoint.every=6",
        f"--profile.start={FIRST}",
        f"--profile.steps={LAST - FIRST + 1}",
    ]
    code, output = run(
        fake_gpu,
        tmp_path / "scratch",
        *TORCHRUN,
        "train.main",
        *TINY,
        *HEADS,
        *data,
        *keys,
        f"--run.dir={folder}",
        devices=2,
    )
    assert code == 0, output
    assert read_status(folder)["state"] == "finished"
    assert (folder / "checkpoints" / "step-00000012").is_dir()
    assert read_metrics(folder)[12]["eval_loss"] == 0.0
    assert "attention cudnn" in output
    logs = [log.read_calls(path) for path in (tmp_path / "scratch").glob("log.*")]
    for calls in logs:
        assert unimplemented(calls) + refused(calls) == []
        assert batches_awaited(calls) >= 12
        assert saves_awaited(calls)
        assert sum(launches < STEP_LAUNCHES for launches in launches_before_flags(calls)) <= 3, (
            "only two saves and the end of the run wait for a flag immediately"
        )
    assert sorted(map(sorted, map(devices, logs))) == [[0], [1]], (
        "each rank has a context on its own device only"
    )
    trace = subprocess.run(
        [sys.executable, "-m", "tools.trace", str(folder), "--json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=True,
    )
    report = json.loads(trace.stdout)
    sent = {(row["collective"], row["axis"]) for row in report["communication"]}
    assert {("all_gather", "dp_shard"), ("reduce_scatter", "dp_shard")} <= sent


def test_a_signal_saves_and_the_same_command_goes_on(
    fake_gpu: FakeGpu, data: list[str], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    command = ["train.main", *TINY, *EAGER, *data, "--checkpoint.every=1000", f"--run.dir={folder}"]
    with start(fake_gpu, tmp_path / "scratch", *command, "--train.steps=100000") as process:
        try:
            deadline_s = time.monotonic() + LIMIT_S
            while not (folder / "metrics.jsonl").exists() or len(read_metrics(folder)) < 3:
                assert process.poll() is None, process.communicate()[0]
                assert time.monotonic() < deadline_s
                time.sleep(0.05)
            process.send_signal(signal.SIGTERM)
            output = process.communicate(timeout=LIMIT_S)[0]
        finally:
            process.kill()
    assert process.returncode == 75, output
    step = read_status(folder)["step"]
    code, output = run(fake_gpu, tmp_path / "scratch", *command, f"--train.steps={step + 2}")
    assert code == 0, output
    assert read_status(folder) | {"state": "finished", "resumed_from": step} == read_status(folder)


def test_a_gpu_that_refuses_memory_is_explained(fake_gpu: FakeGpu, data: list[str], tmp_path: Path) -> None:
    large = [
        "--train.micro_batch_size=2048",
        "--train.global_batch_size=2048",
        "--parallel.loss_chunk_tokens=0",
    ]
    code, output = run(
        fake_gpu,
        tmp_path / "scratch",
        "train.main",
        *TINY,
        *EAGER,
        *large,
        *data,
        "--train.steps=2",
        f"--run.dir={tmp_path / 'run'}",
        FAKE_CUDA_REFUSES_GIB="0.7",
    )
    assert code == 1
    assert "OutOfMemory: rank 0 ran out of memory: CUDA out of memory." in output
    assert "would help: --parallel.activation_checkpoint=full" in output
    assert "Traceback" not in output
    assert (tmp_path / "run/profile/out-of-memory-rank-0.pickle").stat().st_size > 0
