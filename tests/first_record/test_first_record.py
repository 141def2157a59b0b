"""What a version has written, later ones read: from 0.1.0 on a checkpoint and a plan file load until
CHANGELOG.md says that they no longer do.

`step-00000002` is the first record of that, written on 2026-11-26 by torch 2.13.0 on a CPU, from this file's
folder's `text.txt`, by `torchrun --nproc-per-node 4 -m train.main --config llama_debug.yaml` with the keys of
its config.yaml. The losses below are those of the same run, continued at once. A record is never rewritten to
make a test pass: a new one is put beside it.
"""

import json
from pathlib import Path

import pytest

from meshwright.parallel.plan.serialize import load_plan, plan_to_yaml
from tests.support.forks import ROOT
from tests.support.launch import read_metrics, run

RECORD = Path(__file__).parent.relative_to(ROOT) / "step-00000002"  # the config names the text from there
LOSSES = {3: 5.449317932128906, 4: 5.325156211853027}
GRADIENT_NORMS = {3: 0.8655247092247009, 4: 0.8664131760597229}
DATA_HASHES = {3: "000000019595d441", 4: "00000002896f1bcb"}


def test_the_checkpoint_verifies_and_training_continues_with_the_losses_it_had(tmp_path: Path) -> None:
    verified = run(1, "verify", str(RECORD), "--json", module="tools.checkpoint")
    assert json.loads(verified.stdout)["verified"] == [str(RECORD)], verified.stderr
    keys = [f"--config={RECORD / 'config.yaml'}", f"--checkpoint.resume={RECORD}", "--train.steps=4"]
    alone = ["--parallel.dp_shard=1", "--parallel.tp=1", f"--data.cache_dir={tmp_path / 'cache'}"]
    done = run(1, *keys, *alone, f"--run.dir={tmp_path / 'run'}")
    assert done.returncode == 0, done.stderr
    rows = read_metrics(tmp_path / "run")
    assert {step: row["data_hash"] for step, row in rows.items()} == DATA_HASHES
    assert {step: row["loss"] for step, row in rows.items()} == pytest.approx(LOSSES, rel=1e-5)
    assert {step: row["grad_norm"] for step, row in rows.items()} == pytest.approx(GRADIENT_NORMS, rel=1e-5)


def test_the_plan_file_is_read_and_saved_again_without_losing_a_line() -> None:
    """Later versions may add lines."""
    path = ROOT / RECORD / "plan.yaml"
    saved = iter(plan_to_yaml(load_plan(path)).splitlines())
    assert [line for line in path.read_text().splitlines() if line not in saved] == []
