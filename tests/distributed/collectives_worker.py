"""Trains one step on real processes and writes down the collectives of every rank. `OUT [config arguments]`."""

import dataclasses
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from parallel.collectives import record_collectives
from parallel.mesh import build_mesh, data_parallel_group
from train.build import build_model
from train.config import parse_config
from train.ending import end_process
from train.optim import build_optimizer
from train.place import read_place
from train.planning import plan_run
from train.runtime import start_process
from train.step import Batch, train_step


def main() -> None:
    config, place, device = parse_config(sys.argv[2:]), read_place(), torch.device("cpu")
    plan = plan_run(config, place.world_size)
    start_process(config.run, place, device)
    mesh = build_mesh(plan.mesh, "cpu")
    model = build_model(config, plan, mesh, device)
    optimizer = build_optimizer(model, config.optim)
    tokens = torch.randint(config.model.vocab_size, (plan.micro_batch_size, config.train.seq_len))
    batches = [Batch(tokens, tokens)] * plan.accumulation
    with record_collectives(model, plan, mesh) as collectives:
        train_step(model, optimizer, batches, config.train.grad_clip, data_parallel_group(mesh))
    rows = [dataclasses.asdict(collective) for collective in collectives]
    held = {
        "params": sum(p.to_local().untyped_storage().nbytes() for p in model.parameters()),
        "optimizer": sum(dist_local(v).untyped_storage().nbytes() for s in optimizer.state.values() for v in s.values()),
    }
    (Path(sys.argv[1]) / f"{dist.get_rank()}.json").write_text(json.dumps({"collectives": rows, "held": held}))
    dist.destroy_process_group()
    end_process(0)


def dist_local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


if __name__ == "__main__":
    main()
