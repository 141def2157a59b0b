"""Run optimizer steps of rank 0 of N on the fake GPU, with the real model, plan, collectives and compiler.
The kernels compute nothing.

    python -m tools.dryrun.step WORLD STEPS MEMORY_FILE --config=llama_8b.yaml [--section.key=value ...]

The log gets a mark "step N" before and "end N" after each step (tools/dryrun/log.py reads it). MEMORY_FILE
gets the caching allocator's peaks in the last step, in bytes.
"""

import ctypes
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed import fake_pg  # noqa: F401  (registers the backend fake)

from meshwright.parallel.mesh import build_mesh, data_parallel_group
from meshwright.train.build_model import build_model
from meshwright.train.config_parser import parse_config
from meshwright.train.data.batch import Batch
from meshwright.train.distributed.process_group import use_expandable_segments
from meshwright.train.optim.optimizer import build_optimizer
from meshwright.train.planning.device_defaults import attention_on_device, check_attention
from meshwright.train.planning.resolve import plan_run
from meshwright.train.step import train_step

DEVICE = torch.device("cuda", 0)


def run_steps(world_size: int, steps: int, arguments: list[str]) -> dict[str, int]:
    """Run the steps; return the memory peaks of the last one."""
    config = parse_config(arguments)
    use_expandable_segments()
    torch.cuda.set_device(DEVICE)
    dist.init_process_group(
        "cpu:fake,cuda:nccl",
        store=dist.HashStore(),  # type: ignore[attr-defined]
        rank=0,
        world_size=world_size,
    )
    plan = plan_run(
        config.job,
        world_size,
        8,
        attention_on_device(config.job, DEVICE, torch.cuda.get_device_name(DEVICE)),
        "bfloat16",
    )
    check_attention(config.job, plan, "cuda")
    mesh = build_mesh(plan.mesh, "cuda")
    model = build_model(config.model, config.train, plan, mesh, DEVICE, config.run.seed)
    optimizer = build_optimizer(model, config.optim, config.train.steps)
    mark = ctypes.CDLL("libfakecore.so").fake_mark
    for step in range(steps):
        tokens = torch.zeros(plan.micro_batch_size, config.train.seq_len, dtype=torch.int64, device=DEVICE)
        batch = Batch(tokens, tokens, tokens.clone() if config.data.document_mask else None)
        torch.cuda.reset_peak_memory_stats()
        mark(f"step {step}".encode())
        train_step(
            model, optimizer, [batch] * plan.accumulation, config.train.grad_clip, data_parallel_group(mesh)
        )
        mark(f"end {step}".encode())
    stats: dict[str, Any] = torch.cuda.memory_stats()
    return {kind: stats[f"{kind}_bytes.all.peak"] for kind in ("allocated", "reserved")}


if __name__ == "__main__":
    peaks = run_steps(int(sys.argv[1]), int(sys.argv[2]), sys.argv[4:])
    Path(sys.argv[3]).write_text(json.dumps(peaks))
    sys.stdout.flush()
    os._exit(0)  # NCCL's threads would wait for peers that do not exist
