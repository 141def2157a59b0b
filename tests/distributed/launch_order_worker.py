"""Trains two steps on real processes and profiles the second: writes what the hooks of FSDP2 launch, and when products run, in
the order of the trace of rank 0. `OUT [config arguments]`."""

import json
import re
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from parallel.mesh import build_mesh, data_parallel_group
from train.build import build_model
from train.config import parse_config
from train.ending import end_process
from train.optim import build_optimizer
from train.place import read_place
from train.planning import plan_run
from train.runtime import start_process
from train.step import Batch, train_step

LABEL = re.compile(r"FSDP::(all_gather|all_gather_copy_out|post_backward_reduce) \(([\w.]+)")
WORDS = {"all_gather": "all_gather", "all_gather_copy_out": "copy_out", "post_backward_reduce": "reduce_scatter"}
PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm")


def main() -> None:
    config, place, device = parse_config(sys.argv[2:]), read_place(), torch.device("cpu")
    plan = plan_run(config, place.world_size)
    start_process(config.run, place, device)
    mesh = build_mesh(plan.mesh, "cpu")
    model = build_model(config, plan, mesh, device)
    optimizer = build_optimizer(model, config.optim)
    tokens = torch.randint(config.model.vocab_size, (plan.micro_batch_size, config.train.seq_len))

    def step() -> None:
        train_step(model, optimizer, [Batch(tokens, tokens)], config.train.grad_clip, data_parallel_group(mesh))

    step()  # FSDP2 sets itself up in the first
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        step()
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(words_of(trace)))
    dist.barrier()
    dist.destroy_process_group()
    end_process(0)


def words_of(trace: profile) -> list[list[str]]:
    """What happens and to which unit, by when it starts; "product" alone for any number of them in a row."""
    words: list[list[str]] = []
    for event in sorted(trace.events() or (), key=lambda event: event.time_range.start):
        if match := LABEL.match(event.name):
            words.append([WORDS[match[1]], match[2]])
        elif event.name in PRODUCTS and words[-1:] != [["product", ""]]:
            words.append(["product", ""])
    return words


if __name__ == "__main__":
    main()
