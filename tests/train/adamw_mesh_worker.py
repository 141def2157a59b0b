"""Steps a model stored in bfloat16, with moments in bfloat16, on gradients that are the same on any mesh, and writes it whole.
Run by test_adamw.py: `OUT`, then config arguments."""

import sys
import zlib

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from parallel.fsdp import copy_shard
from parallel.mesh import build_mesh
from train.build import build_model
from train.config import parse_config
from train.ending import end_process
from train.optim import build_optimizer
from train.place import read_place
from train.planning import plan_run
from train.runtime import start_process

STEPS = 3


def train(arguments: list[str]) -> dict[str, Tensor]:
    """Parameters and moments after some steps, by name."""
    config = parse_config(arguments)
    plan = plan_run(config, dist.get_world_size())
    model = build_model(config, plan, build_mesh(plan.mesh, "cpu"), torch.device("cpu"))
    optimizer = build_optimizer(model, config.optim, config.run.seed)
    for step in range(STEPS):
        for name, parameter in model.named_parameters():
            generator = torch.Generator().manual_seed(zlib.crc32(f"{step}:{name}".encode()))
            parameter.grad = torch.zeros_like(parameter)
            copy_shard(parameter.grad, torch.randn(parameter.shape, generator=generator))
        optimizer.step()
    tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        tensors |= {f"{name}, {key}": value for key, value in optimizer.state[parameter].items()}
    return {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in tensors.items()}


def main() -> None:
    place = read_place()
    start_process(parse_config([]).run, place, torch.device("cpu"))
    results = [train([*sys.argv[2:], *keys.split()]) for keys in ("--parallel.tp=1", "--parallel.tp=2")]
    if place.is_main:
        torch.save(results, sys.argv[1])
    dist.destroy_process_group()
    end_process(0)


if __name__ == "__main__":
    main()
