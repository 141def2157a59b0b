"""One norm over gradients on different meshes, which torch's own clipping refuses."""

import pytest
import torch

from parallel.fsdp import clip_divisor
from tests.distributed.clip_worker import SHAPES, whole_gradients
from tests.support.launch import run


@pytest.mark.parametrize("max_norm", [1.0, 100.0, 0.0], ids=["clipped", "below", "never"])
def test_gradients_on_mixed_meshes_are_clipped_as_one_process_would(max_norm, tmp_path):
    out = tmp_path / "out.pt"
    result = run(4, str(out), str(max_norm), "2.0", module="tests.distributed.clip_worker")
    assert result.returncode == 0, result.stderr
    got = torch.load(out)
    plain = [torch.nn.Parameter(torch.zeros(shape)) for shape in SHAPES.values()]
    for p, grad in zip(plain, whole_gradients().values(), strict=True):
        p.grad = grad
    optimizer = torch.optim.AdamW(plain)
    norm = torch.nn.utils.clip_grad_norm_(plain, max_norm or float("inf"))
    optimizer.step()
    assert 1 < norm < 100
    assert got["norms"].tolist() == pytest.approx([norm.item()] * 4, rel=1e-6)
    for (name, moment), p in zip(got["moments"].items(), plain, strict=True):
        torch.testing.assert_close(moment, optimizer.state[p]["exp_avg"], rtol=1e-6, atol=0, msg=name)


def test_a_gradient_below_the_limit_is_divided_by_one():
    assert [clip_divisor(torch.tensor(norm), 2.0).item() for norm in (0.0, 1.0, 1.999)] == [1.0, 1.0, 1.0]
    assert clip_divisor(torch.tensor(8.0), 2.0).item() == pytest.approx(4.0)
    assert clip_divisor(torch.tensor(8.0), 0.0) is None


@pytest.mark.parametrize("loss", ["nan", "inf", "-inf"])
def test_a_loss_that_is_not_finite_on_one_rank_makes_the_norm_so_on_all(loss, tmp_path):
    out = tmp_path / "out.pt"
    result = run(4, str(out), "1.0", loss, module="tests.distributed.clip_worker")
    assert result.returncode == 0, result.stderr
    assert not torch.load(out)["norms"].isfinite().any()
