"""A gradient norm over gradients on different meshes, which torch's own clipping refuses."""

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from meshwright.parallel.grad_norm import clip_divisor, gradient_norm
from tests.support.worlds import run_ranks

SHAPES = {
    "sharded": (6, 5),
    "sharded_and_split": (8, 4),
    "split": (4, 3),
    "replicated": (7,),
    "uneven": (3, 2),
    "plain": (2, 3),
}
MAX_NORMS = {"clipped": 1.0, "below": 100.0, "never": 0.0}


def full_gradients() -> dict[str, Tensor]:
    """Return the full gradients, the same on every rank and in the test."""
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def step(max_norm: float) -> tuple[float, dict[str, Tensor]]:
    """Return this rank's norm of gradients on different meshes, and the first moments after a step."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    placed = {
        "sharded": (mesh["dp_shard"], [Shard(0)]),
        "sharded_and_split": (mesh, [Shard(0), Shard(1)]),
        "split": (mesh["tp"], [Shard(0)]),
        "replicated": (mesh, [Shard(0), Replicate()]),
        "uneven": (mesh["dp_shard"], [Shard(0)]),  # 2 rows and 1
    }
    parameters = {}
    for name, grad in full_gradients().items():
        if name in placed:
            grad = distribute_tensor(grad, *placed[name], src_data_rank=None)
        parameters[name] = nn.Parameter(torch.zeros_like(grad))
        parameters[name].grad = grad
    frozen = nn.Parameter(torch.ones(3), requires_grad=False)
    norm = gradient_norm([*parameters.values(), frozen], torch.tensor(1.0))
    # a parameter group for each, because fused AdamW needs one mesh per group
    optimizer = torch.optim.AdamW([{"params": [p]} for p in parameters.values()], fused=True)
    optimizer.grad_scale = clip_divisor(norm, max_norm)
    optimizer.step()
    moments = {name: optimizer.state[p]["exp_avg"] for name, p in parameters.items()}
    return norm.item(), {n: m.full_tensor() if n in placed else m for n, m in moments.items()}


def steps() -> dict[str, tuple[float, dict[str, Tensor]]]:
    return {name: step(norm) for name, norm in MAX_NORMS.items()}


def test_gradients_on_mixed_meshes_are_clipped_as_one_process_would() -> None:
    ranks = run_ranks(4, steps)
    for name, max_norm in MAX_NORMS.items():
        plain = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES.values()]
        for p, grad in zip(plain, full_gradients().values(), strict=True):
            p.grad = grad
        optimizer = torch.optim.AdamW(plain)
        norm = torch.nn.utils.clip_grad_norm_(plain, max_norm or float("inf")).item()
        optimizer.step()
        assert 1 < norm < 100
        assert [rank[name][0] for rank in ranks] == pytest.approx([norm] * 4, rel=1e-6)
        for (parameter, moment), p in zip(ranks[0][name][1].items(), plain, strict=True):
            expected = optimizer.state[p]["exp_avg"]
            torch.testing.assert_close(moment, expected, rtol=1e-6, atol=0, msg=f"{name}: {parameter}")
