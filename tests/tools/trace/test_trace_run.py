"""tools.trace on a real profile of two gloo ranks. Slow units, late gathers: test_profiled_steps.py."""

import json
from pathlib import Path

import pytest
import torch

from meshwright.tools.trace.__main__ import main
from meshwright.tools.trace.kernels import KernelTable
from meshwright.tools.trace.reader import read_events
from meshwright.train.config_parser import load_config
from tests.support.launch import EAGER, TINY, run, write_text

NEWER_THAN_2_11 = torch.__version__ >= "2.12"
NOTHING_ELSE = ["--train.eval_every=0", "--checkpoint.every=0", "--metrics.every=1"]


@pytest.mark.slow
@pytest.mark.sampled(6)
def test_a_real_step_has_the_work_counted_by_hand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two micro batches of 2 sequences of 32 tokens; model width 32, 2 blocks, 4 heads of 8."""
    folder = tmp_path / "run"
    window = ["--train.steps=2", "--profile.start=2", "--profile.steps=1", "--profile.all_ranks=true"]
    done = run(2, *TINY, *EAGER, *NOTHING_ELSE, *write_text(tmp_path), *window, f"--run.dir={folder}")
    assert done.returncode == 0, done.stdout + done.stderr
    main([str(folder), "--rank=1", "--json"])
    found = json.loads(capsys.readouterr().out)
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
    forwards = [phase["gathers"] for phase in found["prefetch"] if phase["phase"] == "forward"]
    units = ["tok_embeddings", "layers.0", "layers.1", "head"]
    assert [[gather["unit"] for gather in gathers] for gathers in forwards] == [units] * 2
    assert [[gather["ahead"] for gather in gathers] for gathers in forwards] == [[0, 1, 1, 1]] * 2
    # torch 2.11 does not write the host's name into a trace
    assert found["clock"].startswith("one host's clock" if NEWER_THAN_2_11 else "several clocks")

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
