"""Takes the norm of each unit's gradient in a real step under several plans, and writes them beside what the whole gradients
say. Run by test_gradient_norms.py: `OUT`, then one argument for each plan, its keys separated by spaces."""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from parallel.mesh import build_mesh, data_parallel_group
from tests.support.launch import EAGER, TINY
from tests.train.test_step import make_batches
from train.build import build_model
from train.config import parse_config
from train.ending import end_process
from train.gradient_norms import GradientNorms
from train.optim import build_optimizer
from train.place import read_place
from train.planning import plan_run
from train.runtime import start_process
from train.step import train_step


def step(keys: list[str]) -> dict[str, Any]:
    """The norm that the step found; by unit those that were taken and those of the whole gradients; and the first by rank."""
    config = parse_config([*TINY, "--model.n_kv_heads=4", *EAGER, *keys])
    plan = plan_run(config, dist.get_world_size())
    mesh = build_mesh(plan.mesh, "cpu")
    model = build_model(config, plan, mesh, torch.device("cpu"))
    optimizer = build_optimizer(model, config.optim, config.run.seed)
    expected: dict[str, float] = {}

    def gather(*_: Any) -> None:
        for unit in plan.units:
            held = dict.fromkeys(p for name in unit.modules for p in model.get_submodule(name).parameters() if p.grad is not None)
            whole = [p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in held]
            if whole:
                expected[unit.name] = torch.cat([grad.double().flatten() for grad in whole]).norm().item()

    optimizer.register_step_pre_hook(gather)
    norms = GradientNorms(model, plan, optimizer)
    norms.want(True)
    torch.manual_seed(mesh.get_rank() // plan.mesh.tp)  # ranks of one tp group see the same data
    result = train_step(model, optimizer, make_batches(2), 0.01, data_parallel_group(mesh))
    found = norms.take()
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, found)
    return {"grad_norm": result.grad_norm.item(), "found": found, "expected": expected, "ranks": ranks, "then": norms.take()}


def main() -> None:
    place = read_place()
    start_process(parse_config([]).run, place, torch.device("cpu"))
    results = [step(keys.split()) for keys in sys.argv[2:]]
    if place.is_main:
        Path(sys.argv[1]).write_text(json.dumps(results))
    dist.destroy_process_group()
    end_process(0)


if __name__ == "__main__":
    main()
