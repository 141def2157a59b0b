"""What compiling promises: one graph per kind of block whatever the depth, no break, and recompiles that are seen."""

import subprocess
import sys

import pytest

from tests.launch import EAGER, ROOT, TINY, environment, read_metrics, run, write_text

AOT = "--parallel.compile.backend=aot_eager"


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> list[str]:
    return write_text(tmp_path_factory.mktemp("data"))


@pytest.mark.parametrize("layers", [2, 6])
def test_blocks_share_one_graph_and_none_breaks(layers, data):
    # Argument 1 is the file the worker writes to, 2 its steps, 3 its padding.
    program = (
        "import sys, torch; from tests.distributed import parity_worker as w; w.main()\n"
        "from torch._dynamo.utils import counters; print(dict(counters['stats']), dict(counters['graph_break']))"
    )
    line = [sys.executable, "-c", program, "/dev/null", "2", "even", *TINY, *data, AOT, f"--model.n_layers={layers}"]
    result = subprocess.run(line, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    assert "'unique_graphs': 2" in result.stdout, "one for all blocks, one for the head"
    assert result.stdout.strip().endswith("{}"), "a graph broke"


MODES = {"aot": [AOT], "recompute": [AOT, "--parallel.activation_checkpoint=full"], "inductor": []}


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_nothing_is_compiled_after_the_first_step_with_evaluations_in_between(mode, data, tmp_path):
    steps = ["--train.steps=6", "--train.eval_every=2", "--train.eval_sequences=13", "--checkpoint.every=3"]
    result = run(2, *TINY, *data, *mode, *steps, f"--run.dir={tmp_path}", "--metrics.tensorboard=false")
    assert result.returncode == 0, result.stderr
    assert [row["recompiles"] for step, row in read_metrics(tmp_path).items() if step] == [0] * 6


def test_a_forced_recompile_is_counted(data, tmp_path):
    # A sequence of another length in step 3 breaks the first graph's guards.
    program = (
        "import sys; import train.loop as loop; from train.step import Batch, train_step\n"
        "calls = []\n"
        "def shortened(model, optimizer, batches, *rest):\n"
        "    calls.append(1)\n"
        "    if len(calls) == 3:\n"
        "        batches = [Batch(b.tokens[:, :16], b.targets[:, :16]) for b in batches]\n"
        "    return train_step(model, optimizer, batches, *rest)\n"
        "loop.train_step = shortened\n"
        "from train.main import main; main(sys.argv[1:])"
    )
    line = [sys.executable, "-c", program, *TINY, *data, AOT, "--train.steps=4", f"--run.dir={tmp_path}"]
    result = subprocess.run(line, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    assert [read_metrics(tmp_path)[step]["recompiles"] for step in range(1, 5)] == [0, 0, 2, 2]
    assert "2 recompiles" in result.stdout


def test_recomputing_blocks_keeps_less_memory_for_the_backward(data, tmp_path):
    peaks = {}
    for mode in ("none", "full"):
        folder = tmp_path / mode
        big = ["--model.dim=128", "--model.ffn_dim=1024", "--model.n_layers=8", "--train.seq_len=256", "--train.steps=2"]
        result = run(1, *TINY, *data, *EAGER, *big, f"--parallel.activation_checkpoint={mode}", f"--run.dir={folder}")
        assert result.returncode == 0, result.stderr
        peaks[mode] = read_metrics(folder)[2]["peak_memory_gib"]
    assert peaks["full"] < peaks["none"] - 0.06
