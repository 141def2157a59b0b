"""The effect of bfloat16 moments and parameters on the losses of a run with two shards."""

import pytest

from tests.distributed import matrix
from tests.distributed.parity import Job, run_jobs
from tests.support import launch
from tests.support.launch import write_text

STEPS = 10
EAGER = [*launch.EAGER, *matrix.GENTLE, "--model.n_layers=2"]
MOMENTS, MIXED = "--optim.state_dtype=bfloat16", "--parallel.param_dtype=bfloat16"
JOBS = {
    "plain": Job(2, EAGER, 0),
    "float32": Job(2, [*EAGER, "--optim.state_dtype=float32", "--parallel.storage_dtype=float32"], 0),
    "moments": Job(2, [*EAGER, MOMENTS], 0),
    "mixed": Job(2, [*EAGER, MIXED], 0),
    "stored": Job(2, [*EAGER, MIXED, MOMENTS, "--parallel.storage_dtype=bfloat16"], 0),
}


@pytest.fixture(scope="module")
def losses(tmp_path_factory) -> dict[str, list[float]]:
    results = run_jobs(JOBS, write_text(tmp_path_factory.mktemp("state")), STEPS)
    assert [result["error"] for result in results.values() if "error" in result] == []
    return {name: result["losses"] for name, result in results.items()}


def test_switched_off_it_is_the_plain_path(losses):
    assert losses["float32"] == losses["plain"]


@pytest.mark.parametrize(
    ("name", "baseline", "band"), [("moments", "plain", 0.001), ("stored", "mixed", 0.02)]
)
def test_losses_stay_beside_those_of_float32(name, baseline, band, losses):
    """Losses are within a band in nats at every step, and differ, which shows that bfloat16 was used."""
    assert losses[baseline][-1] < losses[baseline][0] - 1
    assert losses[name] == pytest.approx(losses[baseline], abs=band, rel=0)
    assert losses[name] != losses[baseline]
