"""tools.trace on real profiles of two gloo ranks: the work of a step, a slow unit and a late all-gather."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.tools.trace.__main__ import main
from meshwright.tools.trace.kernels import KernelTable
from meshwright.tools.trace.reader import read_events
from meshwright.train.config_parser import load_config
from tests.support.launch import EAGER, TINY, run, write_text
from tests.support.workers.slowed_run import LATE, SLEEP_S, SLOW

NEWER_THAN_2_11 = torch.__version__ >= "2.12"
NOTHING_ELSE = ["--train.eval_every=0", "--checkpoint.every=0", "--metrics.every=1"]
DEEP = [
    "--model.dim=64",
    "--model.n_layers=6",
    "--model.n_heads=4",
    "--model.n_kv_heads=4",
    "--model.ffn_dim=64",
    "--train.seq_len=32",
    "--train.micro_batch_size=1",
    "--train.global_batch_size=2",
]


def profile(folder: Path, module: str, *arguments: str) -> Path:
    """Train on two ranks, profile all but the first step, and return the folder of the run."""
    window = ["--profile.start=2", "--profile.all_ranks=true", f"--run.dir={folder / 'run'}"]
    done = run(2, *arguments, *EAGER, *NOTHING_ELSE, *write_text(folder), *window, module=module)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "run"


def analyze(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    main([*arguments, "--json"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.slow
@pytest.mark.sampled(6)
def test_a_real_step_has_the_work_counted_by_hand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two micro batches of 2 sequences of 32 tokens; model width 32, 2 blocks, 4 heads of 8."""
    folder = profile(tmp_path, "meshwright.train.main", *TINY, "--train.steps=2", "--profile.steps=1")
    found = analyze(capsys, str(folder), "--rank=1")
    assert [step["step"] for step in found["steps"]] == [2]
    assert sum(found["shares"].values()) == 1.0
    assert all(share >= 0 for share in found["shares"].values())
    counts = {(c["collective"], c["axis"]): c["count"] for c in found["communication"]}
    # tokens, norm, and the agreement to stop, which is not waited for and may run in the next step
    assert counts.pop(("all_reduce", "")) in (2, 3, 4)
    # forward of embedding, two blocks and head, and again the blocks
    assert counts == {("all_gather", "dp_shard"): 2 * 6, ("reduce_scatter", "dp_shard"): 2 * 4}
    lanes = {row["lane"] for row in found["plan"]["lanes"]}
    assert lanes >= {"step", "compute", "exposed", "all_gather", "reduce_scatter"}

    table, micro_batches, tokens = KernelTable(), 2, 2 * 2 * 32
    for event in read_events(folder / "profile/step-00000002/rank-1.json.gz"):
        if event["ph"] == "X":
            table.add(event)
    kernels = {row.name: row for row in table.rows(1, None, 60)}
    blocks = 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64)
    head = 32 * load_config(folder / "config.yaml").model.vocab_size
    products = kernels["aten::mm"]  # each linear: forward, input gradient, weight gradient
    assert products.calls_per_step == micro_batches * 3 * (2 * 7 + 1)
    assert products.tflops is not None
    assert products.tflops * products.seconds_per_step * 1e12 == pytest.approx(
        3 * 2 * tokens * (blocks + head)
    )
    attention = kernels["aten::_scaled_dot_product_flash_attention_for_cpu (causal: half)"]
    assert attention.calls_per_step == micro_batches * 2
    assert attention.tflops is not None
    assert attention.tflops * attention.seconds_per_step * 1e12 == pytest.approx(
        micro_batches * 2 * (2 * 2 * 2 * 4 * 32 * 32 * 8) / 2
    )
    assert all(row.roof_share is None for row in kernels.values())
    assert "aten::_fused_adamw_" in kernels


@pytest.mark.slow
@pytest.mark.sampled(8)
def test_the_slow_unit_and_the_late_gather_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The slow unit takes at least SLEEP_S longer, which is long against the noise of a busy machine."""
    slowed = "tests.support.workers.slowed_run"
    folder = profile(tmp_path, slowed, *DEEP, "--train.steps=3", "--profile.steps=2")
    found = analyze(capsys, str(folder), "--rank=1", f"--picture={folder / 'step.svg'}")
    slow = {(unit["unit"], unit["rank"]): unit for unit in found["slow_units"] if unit["phase"] == "forward"}
    for rank in range(2):
        assert slow[SLOW, rank]["seconds"] > SLEEP_S
    (forward,) = [phase for phase in found["prefetch"] if phase["phase"] == "forward"]
    assert not forward["launches_block"]
    gathers = {gather["unit"]: gather for gather in forward["gathers"]}
    blocks = {f"layers.{i}": 1 for i in range(6)}
    ahead = {"tok_embeddings": 0, **blocks, "head": 1, LATE: 0}
    assert {unit: gather["ahead"] for unit, gather in gathers.items()} == ahead
    assert gathers[LATE]["late"]
    assert gathers[LATE]["finished_s"] > gathers[LATE]["needed_s"]
    assert gathers[LATE]["waited_s"] > 0
    for step in found["steps"]:
        assert step["shares"]["overlapped"] > 0, "gathers are launched a unit ahead"
    # torch 2.11 does not write the host's name into a trace
    expected = "one host's clock" if NEWER_THAN_2_11 else "several clocks"
    assert found["clock"].startswith(expected)
    assert "<svg" in (folder / "step.svg").read_text()
