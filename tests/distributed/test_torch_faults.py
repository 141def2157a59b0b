"""Faults of torch that this project works around: remove a test and its workaround when torch is fixed.

Each docstring names the workaround.
"""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.distributed.parity import GRADIENT, LOSS, Job, check_parity, plain_run, run_jobs
from tests.support.launch import write_text
from tests.support.worlds import RanksError, run_ranks

VERSION = ".".join(torch.__version__.split(".")[:2])
only_2_13 = pytest.mark.skipif(
    VERSION != "2.13", reason=f"a bug of torch 2.13 (not of 2.11); installed: {VERSION}"
)
pytestmark = [pytest.mark.slow, pytest.mark.sampled(10, together="torch")]
COMPILED_TP = ["--parallel.compile.backend=aot_eager", "--parallel.tp=2"]
HANG_S = 10  # eight groups take a second


@only_2_13
def test_a_collective_that_is_not_waited_for_loses_the_gradient_of_the_embedding(tmp_path):
    """Workaround: parallel/tensor_parallel.py waits. With torch's AsyncCollectiveTensor instead, as torch's
    own styles return it, no other gradient is wrong apart from clipping, and the parity check detects it."""
    job, data, lost = Job(2, COMPILED_TP, 2, "async"), write_text(tmp_path), "tok_embeddings.weight"
    got, plain = run_jobs({"async": job}, data)["async"], plain_run(job, data)
    assert "error" not in got, got["error"]
    assert torch.count_nonzero(got["grads"][lost]) == 0
    assert got["losses"][0] == pytest.approx(plain["losses"][0], abs=LOSS)
    for name in got["grads"].keys() - {lost}:
        grad, other = got["grads"][name], plain["grads"][name]
        assert (grad / grad.norm() - other / other.norm()).norm() < GRADIENT, name
    with pytest.raises(AssertionError):
        check_parity(got, plain)


@only_2_13
def test_a_compiled_block_with_dtensor_weights_cannot_recompute_torchs_attention_on_a_cpu(tmp_path):
    """Workaround: a CPU attention of ours that torch does not classify as random, which test_parity.py
    recomputes; and parallel/compile/apply.py says what to do."""
    keys = ["--parallel.attention=flash", "--parallel.activation_checkpoint=full"]
    got = run_jobs({"flash": Job(2, [*COMPILED_TP, *keys], 0)}, write_text(tmp_path), steps=1)["flash"]
    assert "on a CPU, torch 2.13 cannot recompute random operators" in got["error"]


def shard_in_groups(group: int | bool) -> None:
    """Apply FSDP2 over dp 4 x tp 2, with reshard_after_forward=group."""
    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
    for _ in range(8):
        fully_shard(nn.Linear(8, 8), mesh=mesh["dp"], reshard_after_forward=group)


def test_resharding_to_smaller_groups_beside_tp_hangs():
    """Workaround: such a plan is refused (tests/parallel/plan/test_make.py)."""
    if VERSION not in ("2.11", "2.12", "2.13"):
        pytest.skip(
            f"a bug of torch 2.11 to 2.13; installed: {VERSION}: check whether parallel/plan/rules.py must "
            "still refuse it"
        )
    run_ranks(8, shard_in_groups, True)
    with pytest.raises(RanksError, match=r"(?s)no rank failed, but after.*in _new_process_group_helper"):
        run_ranks(8, shard_in_groups, 2, limit_s=HANG_S)
