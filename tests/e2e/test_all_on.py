"""100 steps with all speed features on, compared with a plain float32 run with all of them off."""

import pytest

from tests.support.launch import EAGER, TINY, read_metrics, run

STEPS = 100
BATCH = ["--train.micro_batch_size=4", "--train.global_batch_size=8"]
OFF = [*EAGER, "--parallel.attention=math", "--parallel.loss_chunk_tokens=0", "--train.gc_every_steps=0"]
ON = [
    "--parallel.compile.backend=aot_eager",
    "--parallel.attention=cpu",
    "--parallel.loss_chunk_tokens=64",
    "--train.gc_every_steps=7",
    "--parallel.param_dtype=bfloat16",
    "--parallel.storage_dtype=bfloat16",
    "--optim.state_dtype=bfloat16",
]
# In nats. bfloat16 has 8 bits: a step's loss differs by a few thousandths (tests/distributed/test_parity.py),
# and stochastically rounded weights take another path with the same mean.
OF_A_STEP, OF_THE_MEAN = 0.06, 0.005  # measured: 0.018, 0.0001


@pytest.mark.slow
@pytest.mark.sampled(10)
def test_everything_on_learns_what_the_plain_run_learns(data, tmp_path) -> None:
    curves = {}
    for name, ranks, keys in (("off", 1, OFF), ("on", 2, ON)):
        folder = tmp_path / name
        result = run(
            ranks, *TINY, *BATCH, *data, *keys, f"--train.steps={STEPS}", f"--run.dir={folder}", timeout_s=600
        )
        assert result.returncode == 0, result.stderr
        curves[name] = [read_metrics(folder)[step]["loss"] for step in range(1, STEPS + 1)]
    differences = [on - off for on, off in zip(curves["on"], curves["off"], strict=True)]
    assert curves["off"][-1] < curves["off"][0] - 1, "the data must be learnable"
    assert max(map(abs, differences)) < OF_A_STEP
    assert abs(sum(differences[-50:]) / 50) < OF_THE_MEAN
