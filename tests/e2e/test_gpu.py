"""The same command on a GPU and in float32 on the CPU, resumed from the same checkpoint.

Bounds, in nats of loss over nine steps: float32 5e-4 (different kernels, different orders of summation, no
TF32); bfloat16 5e-2 (hidden states have 8 bits of mantissa).
"""

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.gpu import FAKE
from tests.support.launch import EAGER, ROOT, TINY, environment, read_metrics, run, write_text

pytestmark = pytest.mark.gpu
STEPS = 10
FLOAT32, BFLOAT16 = 5e-4, 5e-2
MODES = {
    "eager": (EAGER, FLOAT32),
    "compiled": ([], FLOAT32),
    "full": (["--parallel.activation_checkpoint=full"], FLOAT32),
    "selective": (["--parallel.activation_checkpoint=selective"], FLOAT32),
    "half_matmul": (
        ["--parallel.activation_checkpoint=selective", "--parallel.selective_policy=half_matmul"],
        FLOAT32,
    ),
    "budget": (["--parallel.activation_checkpoint=budget", "--parallel.activation_budget=0.3"], FLOAT32),
    "max-autotune": (["--parallel.compile.mode=max-autotune-no-cudagraphs"], FLOAT32),
    "no-expandable-segments": (["--run.expandable_segments=false"], FLOAT32),
    "offload": (["--parallel.cpu_offload=true"], FLOAT32),
    "bfloat16": (["--parallel.param_dtype=bfloat16"], BFLOAT16),
    "bfloat16-selective": (
        ["--parallel.param_dtype=bfloat16", "--parallel.activation_checkpoint=selective"],
        BFLOAT16,
    ),
}


# With a document mask the GPU runs FlexAttention, which needs heads of at least 16 channels.
DOCUMENTS = ["--data.document_mask=true", "--model.n_heads=2", "--model.n_kv_heads=1"]
DOCUMENT_MODES = ("eager", "compiled", "full", "selective", "budget", "bfloat16")


def train_on_cpu(folder: Path, *arguments: str) -> Path:
    """A float32 run on the CPU, with a checkpoint after its first step."""
    steps = [f"--train.steps={STEPS}", "--checkpoint.every=1", "--checkpoint.keep=0"]
    result = run(1, *TINY, *arguments, *EAGER, *steps, "--run.device=cpu", f"--run.dir={folder / 'run'}")
    assert result.returncode == 0, result.stderr
    return folder / "run"


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory) -> tuple[Path, list[str]]:
    """A CPU run, and the arguments of its data."""
    folder = tmp_path_factory.mktemp("cpu")
    data = write_text(folder)
    return train_on_cpu(folder, *data), data


@pytest.fixture(scope="module")
def documents_on_cpu(tmp_path_factory) -> tuple[Path, list[str]]:
    """The same with a document mask, on documents about as long as a sequence."""
    folder = tmp_path_factory.mktemp("documents")
    lines = (json.dumps({"text": f"line {n} squares to {n * n}"}) for n in range(3000))
    (folder / "lines.jsonl").write_text("\n".join(lines))
    data = [*DOCUMENTS, f"--data.source={folder / 'lines.jsonl'}", f"--data.cache_dir={folder / 'cache'}"]
    return train_on_cpu(folder, *data), data


@pytest.mark.parametrize("mode", MODES)
def test_a_gpu_goes_on_as_the_cpu_does(mode, on_cpu, tmp_path):
    check(mode, *on_cpu, tmp_path)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("mode", DOCUMENT_MODES)
def test_a_gpu_keeps_documents_apart_as_the_cpu_does(mode, documents_on_cpu, tmp_path):
    check(mode, *documents_on_cpu, tmp_path)


def check(mode: str, folder: Path, data: list[str], tmp_path: Path) -> None:
    keys, bound = MODES[mode]
    start = f"--checkpoint.resume={folder / 'checkpoints' / 'step-00000001'}"
    steps = [f"--train.steps={STEPS}", "--train.eval_every=5", "--checkpoint.every=5", "--run.device=cuda"]
    result = run(1, *TINY, *data, *keys, *steps, start, f"--run.dir={tmp_path}", timeout_s=300)
    assert result.returncode == 0, result.stderr
    on_gpu, on_cpu = read_metrics(tmp_path), read_metrics(folder)
    later = range(2, STEPS + 1)
    if not FAKE:  # the fake GPU computes no values
        assert [on_gpu[step]["loss"] for step in later] == pytest.approx(
            [on_cpu[step]["loss"] for step in later], abs=bound
        )
    assert [on_gpu[step]["recompiles"] for step in later] == [0] * len(later)
    assert 0 < on_gpu[STEPS]["peak_memory_gib"] <= on_gpu[STEPS]["reserved_memory_gib"]


WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaMemcpy", "cudaCtxSynchronize")
FIRST, LAST = 6, 9  # profiled steps, between the reports of steps 5 and 10
BATCH_BYTES, MICRO_BATCHES = 2 * 32 * 8, 4  # int64[2, 32] of tokens or targets; micro batches per step (TINY)


@pytest.fixture(scope="module")
def profiled(on_cpu, tmp_path_factory) -> list[dict]:
    """The trace events of a compiled run's steps between two reports."""
    folder = tmp_path_factory.mktemp("profiled")
    keys = [
        "--metrics.every=5",
        f"--profile.start={FIRST}",
        f"--profile.steps={LAST - FIRST + 1}",
        "--train.gc_every_steps=2",
    ]
    result = run(
        1,
        *TINY,
        *on_cpu[1],
        *keys,
        "--run.device=cuda",
        f"--train.steps={STEPS}",
        "--checkpoint.every=0",
        f"--run.dir={folder}",
        timeout_s=300,
    )
    assert result.returncode == 0, result.stderr
    (trace,) = (folder / "profile").glob("*/rank-0.json.gz")
    with gzip.open(trace, "rt", encoding="utf-8") as file:
        return json.load(file)["traceEvents"]


def test_nothing_waits_for_the_gpu_between_two_reports(profiled):
    launches = [event["ts"] for event in profiled if event.get("name") == "cudaLaunchKernel"]
    assert len(launches) > 100, "the trace must have the steps"
    calls = [
        e["name"]
        for e in profiled
        if e.get("cat") == "cuda_runtime" and min(launches) <= e["ts"] <= max(launches)
    ]
    assert [name for name in calls if name in WAITS] == []
    # The flag of the previous step, read after the next is enqueued (train/fault_tolerance/nonfinite.py).
    assert calls.count("cudaEventSynchronize") <= LAST - FIRST + 1


def test_batches_are_copied_on_a_stream_on_which_nothing_is_computed(profiled):
    """Batches are recognized by their size: FSDP2 also copies metadata of its kernels to the device."""
    copies = [
        e
        for e in profiled
        if e.get("cat") == "gpu_memcpy" and e["args"]["bytes"] == BATCH_BYTES and "HtoD" in e["name"]
    ]
    computing = {e["args"]["stream"] for e in profiled if e.get("cat") == "kernel"}
    assert all("Pinned" in copy["name"] for copy in copies)
    assert len(copies) >= 2 * MICRO_BATCHES * (LAST - FIRST), "tokens and targets of each step"
    assert not computing & {copy["args"]["stream"] for copy in copies}


@pytest.mark.values
def test_batches_from_another_stream_are_whole_when_they_are_used():
    """The device memory of each step is soon reused while the current stream is busy: the batches must equal
    those of the same order on a CPU."""
    from meshwright.train.checkpoint.manifest import TrainPosition
    from meshwright.train.data.sample_order import SampleOrder
    from meshwright.train.data.token_store import Source
    from meshwright.train.data.training_data import TrainLoader
    from tests.train.data.test_loader import SEQUENCES, TOKENS, shape_of

    order = SampleOrder((Source("all", 1.0, TOKENS),), SEQUENCES, 0)
    seen = []
    for device in (torch.device("cpu"), torch.device("cuda", 0)):
        loader, busy = (
            TrainLoader(order, SEQUENCES, shape_of(0, 1, 2), TrainPosition(), device, 2),
            torch.ones(2000, 2000, device=device),
        )
        kept = []
        for _ in range(40):
            if device.type == "cuda":
                busy = busy @ busy * 0
            batches = loader.next().micro_batches
            kept.append(torch.stack([batch.tokens * 1 for batch in batches]))
            del batches
        loader.close()
        seen.append(torch.stack(kept).cpu())
    assert torch.equal(*seen)


def test_segments_grow_on_a_gpu(on_cpu, tmp_path):
    program = (
        "import sys, torch, atexit; from meshwright.train.main import main; atexit.register(lambda: "
        "print('expandable', {s['is_expandable'] for s in torch.cuda.memory_snapshot()})); main(sys.argv[1:])"
    )
    for setting in ("true", "false"):
        line = [
            sys.executable,
            "-c",
            program,
            *TINY,
            *on_cpu[1],
            *EAGER,
            "--train.steps=2",
            "--run.device=cuda",
            f"--run.expandable_segments={setting}",
            f"--run.dir={tmp_path / setting}",
        ]
        result = subprocess.run(
            line, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=300, check=True
        )
        assert f"expandable {{{setting.capitalize()}}}" in result.stdout
