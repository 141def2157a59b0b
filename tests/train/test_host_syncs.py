"""Between two reports the loop reads no value back, except for the two named here, which do not stall a
GPU."""

import json
from collections import Counter
from pathlib import Path

from tests.support.launch import EAGER, TINY, run, write_text

REPORT_EVERY, STEPS = 3, 8
# The values that a step reads between reports, on a CPU: the flag of a skipped step, which a GPU copies to
# the host asynchronously; and, over gloo and always on the host, whether another rank has requested a stop.
NAMED = {
    "train/fault_tolerance/nonfinite.py NonFiniteGuard._read": 1,
    "train/fault_tolerance/shutdown.py GracefulShutdown._any_requested": 1,
}


def test_every_step_between_reports_reads_the_same_two_values_and_none_on_the_device(tmp_path: Path) -> None:
    keys = [
        *TINY,
        *EAGER,
        *write_text(tmp_path),
        f"--run.dir={tmp_path / 'run'}",
        f"--metrics.every={REPORT_EVERY}",
        f"--train.steps={STEPS}",
        "--checkpoint.every=0",
        "--train.gc_every_steps=2",
        "--optim.name=muon",
    ]
    result = run(2, str(tmp_path), *keys, module="tests.support.workers.host_syncs")
    assert result.returncode == 0, result.stderr
    for rank in range(2):
        recorded = [(step, caller) for step, _, caller in json.loads((tmp_path / f"{rank}.json").read_text())]
        by_step = {step: Counter(caller for at, caller in recorded if at == step) for step in range(2, STEPS)}
        for step, reads in by_step.items():
            others = {caller: count for caller, count in reads.items() if caller not in NAMED}
            assert reads - Counter(others) == Counter(NAMED), step
            assert bool(others) == (step % REPORT_EVERY == 0), f"step {step}: {others}"
            assert all(
                caller.startswith(
                    ("train/metrics/collector.py", "train/data/training_data.py TrainingData.describe_step")
                )
                for caller in others
            )
