"""Steps with clipped gradients that lie on different meshes, and writes norms and first moments. Run by test_clip.py: `OUT
MAX_NORM LOSS`, where LOSS is that of rank 2."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from parallel.fsdp import clip_divisor, gradient_norm
from train.ending import end_process

SHAPES = {"sharded": (6, 5), "sharded_and_split": (8, 4), "split": (4, 3), "replicated": (7,), "uneven": (3, 2), "plain": (2, 3)}


def whole_gradients() -> dict[str, torch.Tensor]:
    """The same on every rank and in the test."""
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def main() -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    placed = {
        "sharded": (mesh["dp_shard"], [Shard(0)]),
        "sharded_and_split": (mesh, [Shard(0), Shard(1)]),
        "split": (mesh["tp"], [Shard(0)]),
        "replicated": (mesh, [Shard(0), Replicate()]),
        "uneven": (mesh["dp_shard"], [Shard(0)]),  # 2 rows and 1
    }
    parameters = {}
    for name, grad in whole_gradients().items():
        if name in placed:
            grad = distribute_tensor(grad, *placed[name], src_data_rank=None)
        parameters[name] = nn.Parameter(torch.zeros_like(grad))
        parameters[name].grad = grad
    frozen = nn.Parameter(torch.ones(3), requires_grad=False)
    loss = torch.tensor(float(sys.argv[3]) if dist.get_rank() == 2 else 1.0)
    norm = gradient_norm([*parameters.values(), frozen], loss)
    optimizer = torch.optim.AdamW([{"params": [p]} for p in parameters.values()], fused=True)  # a group each: a mesh each
    optimizer.grad_scale = clip_divisor(norm, float(sys.argv[2]))
    optimizer.step()
    norms = [torch.zeros_like(norm) for _ in range(4)]
    dist.all_gather(norms, norm)
    moments = {name: optimizer.state[p]["exp_avg"] for name, p in parameters.items()}
    moments = {name: moment.full_tensor() if name in placed else moment for name, moment in moments.items()}
    if dist.get_rank() == 0:
        torch.save({"norms": torch.stack(norms), "moments": moments}, sys.argv[1])
    dist.destroy_process_group()
    end_process(0)


if __name__ == "__main__":
    main()
