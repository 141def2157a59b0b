"""The same command on a GPU, against float32 on the CPU from the same checkpoint on.

Bounds, in nats of loss over nine steps: float32 5e-4 (other kernels, other orders of summation, no TF32); bfloat16 5e-2
(hidden states have 8 bits of mantissa).
"""

import json
from pathlib import Path

import pytest
import torch

from tests.launch import EAGER, TINY, read_metrics, run, write_text

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
STEPS = 10
FLOAT32, BFLOAT16 = 5e-4, 5e-2
MODES = {
    "eager": (EAGER, FLOAT32),
    "compiled": ([], FLOAT32),
    "full": (["--parallel.activation_checkpoint=full"], FLOAT32),
    "selective": (["--parallel.activation_checkpoint=selective"], FLOAT32),
    "half_matmul": (["--parallel.activation_checkpoint=selective", "--parallel.selective_policy=half_matmul"], FLOAT32),
    "budget": (["--parallel.activation_checkpoint=budget", "--parallel.activation_budget=0.3"], FLOAT32),
    "offload": (["--parallel.cpu_offload=true"], FLOAT32),
    "bfloat16": (["--parallel.param_dtype=bfloat16"], BFLOAT16),
    "bfloat16-selective": (["--parallel.param_dtype=bfloat16", "--parallel.activation_checkpoint=selective"], BFLOAT16),
}


# Documents apart: FlexAttention, which wants heads of at least 16 channels, in place of our CPU kernel.
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
    """A run, and the arguments of its data."""
    folder = tmp_path_factory.mktemp("cpu")
    data = write_text(folder)
    return train_on_cpu(folder, *data), data


@pytest.fixture(scope="module")
def documents_on_cpu(tmp_path_factory) -> tuple[Path, list[str]]:
    """The same on documents about as long as a sequence, which are kept apart."""
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
    here, there = read_metrics(tmp_path), read_metrics(folder)
    later = range(2, STEPS + 1)
    assert [here[step]["loss"] for step in later] == pytest.approx([there[step]["loss"] for step in later], abs=bound)
    assert [here[step]["recompiles"] for step in later] == [0] * len(later)
    assert 0 < here[STEPS]["peak_memory_gib"] <= here[STEPS]["reserved_memory_gib"]
