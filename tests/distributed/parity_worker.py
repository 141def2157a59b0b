"""Trains a few steps on the mesh the arguments describe and writes losses, norms and first gradients to a file.

Run by test_parity.py: `OUT STEPS UNEVEN [config arguments]`.
"""

import sys

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from parallel.compile import count_compiled_graphs
from parallel.mesh import build_mesh, data_parallel_group, data_parallel_rank
from tests.distributed.reference import pad_unevenly
from train.build import build_model
from train.config import parse_config
from train.data.loader import BatchShape, TrainLoader
from train.data.tokens import load_tokens
from train.optim import build_optimizer, learning_rate, set_learning_rate
from train.planning import plan_run
from train.runtime import read_place, start_process
from train.step import Batch, train_step


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def main() -> None:
    out, steps, uneven = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "uneven"
    config, place, device = parse_config(sys.argv[4:]), read_place(), torch.device("cpu")
    plan = plan_run(config, place.world_size)
    start_process(config.run, place, device)
    mesh = build_mesh(plan.mesh, "cpu")
    model = build_model(config, plan, mesh, device)
    weights = {name: whole(p) for name, p in model.named_parameters()}
    optimizer = build_optimizer(model, config.optim)
    shape = BatchShape(plan.micro_batch_size, plan.accumulation, config.train.seq_len, data_parallel_rank(mesh, plan.mesh),
                       plan.mesh.data_parallel)  # fmt: skip
    loader = TrainLoader(load_tokens(config.data).train, shape, config.run.seed, 0, device, 2)
    grads: dict[str, Tensor] = {}

    def keep_first_gradients(*_: object) -> None:
        if not grads:
            grads.update({name: whole(p.grad) for name, p in model.named_parameters()})

    optimizer.register_step_pre_hook(keep_first_gradients)
    losses, norms, graphs = [], [], []
    for step in range(1, steps + 1):
        set_learning_rate(optimizer, learning_rate(config.optim, step, steps))
        batches, _ = loader.next()
        if uneven:
            batches = [Batch(b.tokens, pad_unevenly(b.tokens, b.targets)) for b in batches]
        result = train_step(model, optimizer, batches, config.train.grad_clip, data_parallel_group(mesh))
        losses.append(result.loss.item())
        norms.append(result.grad_norm.item())
        graphs.append(count_compiled_graphs())
    loader.close()
    if place.is_main:
        torch.save({"losses": losses, "norms": norms, "grads": grads, "weights": weights, "graphs": graphs}, out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
